"""What a run brings, and the few statistics that are made of it."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class OursRun:
    """One pass of our engine over the workload. Times are in seconds; lists hold one entry a request or a gap.

    wall_s: from the first request's sending to the last token's arrival. num_steps: steps that computed something.
    step_s, forward_s: spent in the engine's steps, and of that in forward passes and sampling.
    kv_use: filled of allocated slots, averaged over the steps. num_slots_read: filled slots, summed over the steps.
    ttft_s: from when a place among the sequences in flight was free for the request to its first token.
    gap_s: between one token of a sequence and the next. reply_s: as ttft_s, but to the last token.
    first_ids: what the first request got.
    """

    wall_s: float
    num_output_tokens: int
    num_steps: int
    step_s: float
    forward_s: float
    kv_use: float
    num_slots_read: int
    num_prefix_hits: int
    ttft_s: list[float]
    gap_s: list[float]
    reply_s: list[float]
    first_ids: list[int]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second."""
        return self.num_output_tokens / self.wall_s

    @property
    def host_share(self) -> float:
        """What is neither forward pass nor sampling, as a share of the whole time, waiting for the pipe included."""
        return 1 - self.forward_s / self.wall_s


@dataclass(frozen=True, slots=True)
class PeerRun:
    """One pass of a peer over the same requests. Only tokens that were asked for count.

    reply_s, ttft_s, gap_s: as in OursRun. A static batch is done for all its requests at once: its reply_s counts from
    the batch's start, and the other two are empty. num_steps: forward passes; None where the peer doesn't tell.
    """

    wall_s: float
    num_output_tokens: int
    num_steps: int | None
    reply_s: list[float]
    first_ids: list[int]
    ttft_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Useful output tokens a second."""
        return self.num_output_tokens / self.wall_s


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of a few measurements."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Median, least and greatest of at least one value."""
    return Spread(statistics.median(values), min(values), max(values))


def ratios(ours: Sequence[OursRun], peer: Sequence[PeerRun]) -> list[float]:
    """Tokens/s of ours over the peer's, alternation by alternation: what drifts between them drops out."""
    return [mine.tokens_per_s / theirs.tokens_per_s for mine, theirs in zip(ours, peer, strict=True)]


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks. Of no values: nan."""
    if not values:
        return float("nan")
    ranked = sorted(values)
    rank = (len(ranked) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (ranked[above] - ranked[below]) * (rank - below)
