"""The workloads by name: what lengths their requests have, and how many of them are run."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ops.bench.errors import BenchError
from ops.bench.workload import Lengths, WorkloadShape, draw_lengths

if TYPE_CHECKING:
    from ops.simulate.traces import TraceRequest


@dataclass(frozen=True, slots=True)
class Preset:
    """A workload. num_requests of a batch: `rounds` times the batch, but no fewer than `min_requests`.

    num_shared: tokens that all prompts begin with; the shape's prompt lengths come on top of them.
    needs_trace: lengths are those of a recorded trace, and the shape says nothing.
    """

    about: str
    shape: WorkloadShape
    rounds: int
    min_requests: int
    alternations: int = 3
    batches: tuple[int, ...] = (1, 8, 32)
    num_shared: int = 0
    needs_trace: bool = False


def lognormal(prompt_median: float, prompt_sigma: float, output_median: float, output_sigma: float) -> WorkloadShape:
    """The shape with these medians: a lognormal's mean is its median times exp(sigma² / 2)."""
    return WorkloadShape(
        prompt_median * math.exp(prompt_sigma**2 / 2),
        prompt_sigma,
        output_median * math.exp(output_sigma**2 / 2),
        output_sigma,
    )


# Sized for two cores: all batches and alternations in about ten minutes, most of which the static batch takes.
FULL: Final = Preset("short replies, lognormal", WorkloadShape(120, 0.4, 32, 0.8), rounds=2, min_requests=8)
# To see that everything works; its figures are too few to mean anything.
QUICK: Final = Preset(
    "a small run, to see that everything works", WorkloadShape(24, 0.4, 8, 0.5), 1, min_requests=2, alternations=1
)
DEFAULT: Final = "mixed"
PRESETS: Final = {
    DEFAULT: FULL,
    "chat": Preset(
        "lognormal lengths as in chats: prompts of 100 tokens and replies of 55 in the median",
        lognormal(100, 0.8, 55, 0.8),
        rounds=2,
        min_requests=8,
    ),
    "article": Preset(
        "a batch at a time, 50 tokens of reply to a prompt of 64", WorkloadShape(64, 0, 50, 0), rounds=1, min_requests=1
    ),
    "azure": Preset(
        "a slice of a recorded trace, scaled; --trace names the file",
        WorkloadShape(1, 0, 1, 0),
        rounds=2,
        min_requests=8,
        needs_trace=True,
    ),
    "shared-prompt": Preset(
        "one system prompt of 512 tokens before everybody's own 40",
        WorkloadShape(40, 0.6, 32, 0.6),
        rounds=2,
        min_requests=8,
        num_shared=512,
    ),
    "long-context": Preset(
        "prompts of 1,500 tokens and short replies",
        WorkloadShape(1500, 0.2, 48, 0.4),
        rounds=1,
        min_requests=3,
        alternations=2,
        batches=(1, 4, 8),
    ),
}


@dataclass(frozen=True, slots=True)
class TraceSlice:
    """Which requests of a recorded trace, and how much smaller: lengths are multiplied by `scale_lengths`."""

    path: str
    scale_lengths: float

    def lengths(self, num_requests: int, seed: int) -> list[Lengths]:
        """Lengths of that many requests in a row. Raises BenchError, or SimulateError for a file that is no trace."""
        return [Lengths(each.num_prompt_tokens, each.num_output_tokens) for each in self._requests(num_requests, seed)]

    def arrivals(self, num_requests: int, seed: int) -> list[float]:
        """When these requests came, in seconds from the first one. Raises as `lengths`."""
        return [each.arrival_s for each in self._requests(num_requests, seed)]

    def _requests(self, num_requests: int, seed: int) -> "tuple[TraceRequest, ...]":
        from ops.simulate.adapt import scaled, window
        from ops.simulate.traces import read_trace

        trace = scaled(window(read_trace(Path(self.path)), num_requests, seed), speed_up=1, lengths=self.scale_lengths)
        if len(trace.requests) < num_requests:
            raise BenchError(f"{self.path} has {len(trace.requests)} requests, but {num_requests} are to be run")
        return trace.requests


def lengths_of(
    shape: WorkloadShape, num_shared: int, trace: TraceSlice | None, num_requests: int, seed: int
) -> list[Lengths]:
    """Lengths of the first `num_requests` requests: the trace's, or drawn from the shape after the shared tokens."""
    if trace is not None:
        return trace.lengths(num_requests, seed)
    drawn = draw_lengths(shape, num_requests, seed)
    return [Lengths(num_shared + each.num_prompt, each.num_output) for each in drawn]
