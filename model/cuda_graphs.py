"""CUDA graphs of decode steps: the host launches one graph in place of some hundred kernels.

A graph repeats what was captured, with the same sizes at the same addresses. So decodes are padded to a few shapes
(decode_shapes.py), their inputs lie in the same place each time (staging.py), and what can differ from that is asked
before each replay: a step that isn't what was captured is computed kernel by kernel, with the same numbers.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from model.decode_shapes import DecodeShape
from model.step_inputs import StepInputs

log = logging.getLogger("pagemill.model")

Compute = Callable[[], None]


class Capture(Protocol):
    """Captures what `compute` launches: CUDA, or a double of it in tests."""

    def __call__(self, compute: Compute) -> Compute:
        """What repeats it. Raises RuntimeError where it can't be captured."""
        ...


class CudaCapture:
    """Graphs of one device, which share one memory pool: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute) -> Compute:
        """See Capture. Runs it once before: what compiles or allocates on a first call can't be captured."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            compute()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using CUDA: only what this one does unasked breaks the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            compute()
        return graph.replay


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph and where it reads."""

    addresses: tuple[int, ...]
    replay: Compute


class DecodeGraphs:
    """The graphs of one forward pass, by shape.

    `hidden_states` computes a step's hidden states [num_tokens, hidden_size]; all graphs write theirs into one buffer
    of `max_num_seqs` rows, from which the next kernel on the stream has to take them.
    """

    def __init__(
        self,
        hidden_states: Callable[[StepInputs], torch.Tensor],
        capture: Capture,
        *,
        max_num_seqs: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._hidden_states = hidden_states
        self._capture = capture
        self._out = torch.empty((max_num_seqs, hidden_size), dtype=dtype, device=device)
        self._graphs: dict[DecodeShape, _Captured] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(self, shapes: Sequence[DecodeShape], inputs_of: Callable[[DecodeShape], StepInputs]) -> bool:
        """Capture these shapes, in their order: the largest first. False, and a log line, where one can't be.

        `inputs_of` gives inputs of a shape, at the addresses at which those of its steps will lie. Where it fails there
        are no graphs at all: what stands in the way of one stands in that of all others.
        """
        for shape in shapes:
            inputs = inputs_of(shape)
            try:
                replay = self._capture(lambda inputs=inputs: self._compute(inputs))  # type: ignore[misc]
            except RuntimeError as error:
                self._graphs.clear()
                log.warning(
                    "decodes run without CUDA graphs, since one of %d sequences can't be captured: %s",
                    shape.num_seqs,
                    (str(error).splitlines() or [type(error).__name__])[0],
                )
                return False
            self._graphs[shape] = _Captured(_addresses(inputs), replay)
        return True

    def run(self, inputs: StepInputs) -> torch.Tensor | None:
        """The hidden states of a step, padding included, valid until the next run; None where no graph fits it."""
        captured = None if inputs.shape is None else self._graphs.get(inputs.shape)
        if captured is None or captured.addresses != _addresses(inputs):
            return None
        captured.replay()
        return self._out[: len(inputs.input_ids)]

    def _compute(self, inputs: StepInputs) -> None:
        hidden = self._hidden_states(inputs)
        self._out[: len(hidden)].copy_(hidden)


def _addresses(inputs: StepInputs) -> tuple[int, ...]:
    meta = inputs.meta
    tensors = (inputs.input_ids, inputs.positions, inputs.slot_mapping)
    return tuple([tensor.data_ptr() for tensor in (*tensors, meta.block_tables, meta.query_starts, meta.context_lens)])
