"""What CUDA graphs take beside weights and KV cache: measured at start on the two largest, before the pool is sized."""

from collections.abc import Callable

import torch

from model.cuda_graphs import Capture, Compute, CudaCapture
from model.decode_shapes import decode_shapes
from model.decoder import Decoder
from model.kv_cache import KVCache
from model.model_runner import ModelRunner, RunnerConfig


def measure_graphs(
    decoder: Decoder,
    config: RunnerConfig,
    block_size: int,
    *,
    capture: Capture | None = None,
    free_bytes: Callable[[], int] | None = None,
) -> int | None:
    """Bytes that the graphs of all shapes will take; None where the log says that they can't be captured.

    They share a pool, which the largest sizes, so each further one takes about what the second does: its nodes. The KV
    cache is a single block: a graph holds where it is, not what it holds, and these are thrown away.
    """
    cache = KVCache(decoder.config, num_blocks=1, block_size=block_size, dtype=decoder.kv_dtype, device=decoder.device)
    runner = ModelRunner(decoder, cache, config)
    measured = _Measured(capture or CudaCapture(decoder.device), free_bytes or (lambda: _free(decoder.device)))
    if not runner.capture_graphs(measured, num_shapes=2):
        return None
    num_shapes = len(decode_shapes(config.max_num_seqs, config.max_model_len).largest_first())
    first, *rest = measured.taken
    return first + (num_shapes - 1) * (rest[0] if rest else 0)


class _Measured:
    """Captures, and keeps what each has taken."""

    def __init__(self, capture: Capture, free_bytes: Callable[[], int]) -> None:
        self._capture = capture
        self._free_bytes = free_bytes
        self._before = free_bytes()
        self.taken: list[int] = []

    def __call__(self, compute: Compute) -> Compute:
        replay = self._capture(compute)
        now = self._free_bytes()
        self.taken.append(max(0, self._before - now))
        self._before = now
        return replay


def _free(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])
