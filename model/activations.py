"""What the largest step takes beside weights and KV cache: measured at start, on two layers of the model.

A layer's activations are gone before the next layer's come, so two take as much as all of them. One would not do:
behind the last layer's attention only sampled rows go on.
"""

import copy
from dataclasses import replace
from pathlib import Path

import torch

from model.decoder import Decoder
from model.errors import StepTooLargeError
from model.kv_cache import KVCache
from model.model_runner import ModelRunner, RunnerConfig
from scheduler.output import Chunks, NewRow, SchedulerOutput
from scheduler.sampling_params import SamplingParams

NUM_LAYERS = 2
_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"


def measure_activations(decoder: Decoder, config: RunnerConfig, block_size: int, max_tokens: int) -> int | None:
    """Bytes by which memory peaks in a step of `max_tokens` tokens with as many sampled rows as there may be.

    On CUDA the long prompt's tokens stand at the end of the longest context, since attention may need memory for all of
    it; the CPU's kernels don't, and there this is to take next to no time. The KV cache is a single block that every
    sequence uses: its contents don't matter, and the pool needn't exist yet.
    None where the system doesn't tell: on the CPU that is everywhere but on Linux. What it tells there is what was
    added to the memory that the process held already.

    Raises StepTooLargeError where such a step doesn't fit at once.
    """
    shallow = copy.copy(decoder)
    shallow.layers = decoder.layers[:NUM_LAYERS]
    cache = KVCache(
        replace(decoder.config, num_layers=len(shallow.layers)),
        num_blocks=1,
        block_size=block_size,
        dtype=decoder.kv_dtype,
        device=decoder.device,
    )
    runner = ModelRunner(shallow, cache, config)
    context = config.max_model_len if decoder.device.type == "cuda" else min(config.max_model_len, max_tokens)
    rows = _largest_batch(config.max_num_seqs, context, block_size, max_tokens)
    chunks = Chunks(
        seq_ids=tuple(row.seq_id for row, _ in rows),
        starts=tuple(len(row.token_ids) - count for row, count in rows),
        num_tokens=tuple(count for _, count in rows),
        is_sampled=(True,) * len(rows),
    )
    output = SchedulerOutput(step=0, new_rows=tuple(row for row, _ in rows), chunks=chunks)
    before = _start_measuring(decoder.device)
    if runner.execute(output).num_splits:
        raise StepTooLargeError(
            f"a step of {max_tokens} tokens in a context of {context} runs out of memory beside the "
            "weights: lower max_num_batched_tokens, max_model_len or max_num_seqs"
        )
    peak = _peak_bytes(decoder.device)
    return None if before is None or peak is None else max(0, peak - before)


def _largest_batch(max_num_seqs: int, context: int, block_size: int, max_tokens: int) -> list[tuple[NewRow, int]]:
    """Rows and how many of their last tokens are computed: one each, and for the first all that is left.

    Where that is more than a context holds, the others take their share.
    """
    num_rows = min(max_num_seqs, max_tokens)
    num_left = max_tokens - num_rows
    sampling = SamplingParams(temperature=1.0, top_k=1, top_p=0.9)
    rows = []
    for number in range(num_rows):
        count = 1 + min(num_left, context - 1)
        num_left -= count - 1
        length = context if count > 1 else 1
        blocks = (0,) * -(-length // block_size)
        rows.append((NewRow(f"row-{number}", (0,) * length, length, sampling, number, blocks), count))
    return rows


def _start_measuring(device: torch.device) -> int | None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return None
    return _status_bytes("VmRSS")


def _peak_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:")), None)
