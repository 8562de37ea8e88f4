"""When tokens came, and what that makes of waiting: all in seconds of one clock."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Timeline:
    """A pass over some requests, in their order.

    token_s: of each request the times of its tokens, at least one. free_s: when it could have begun: it had arrived,
    and there was a place among the sequences in flight.
    """

    started_s: float
    token_s: list[list[float]]
    free_s: list[float]

    @property
    def wall_s(self) -> float:
        """From the beginning to the last token."""
        return max(times[-1] for times in self.token_s) - self.started_s

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests."""
        return sum(len(times) for times in self.token_s)

    @property
    def ttft_s(self) -> list[float]:
        """Of each request, until its first token."""
        return [times[0] - free for times, free in zip(self.token_s, self.free_s, strict=True)]

    @property
    def reply_s(self) -> list[float]:
        """Of each request, until its last token."""
        return [times[-1] - free for times, free in zip(self.token_s, self.free_s, strict=True)]

    @property
    def gap_s(self) -> list[float]:
        """From one token of a request to its next, of all requests one after another."""
        return [after - before for times in self.token_s for before, after in pairwise(times)]


def closed_loop(started_s: float, token_s: list[list[float]], batch: int) -> Timeline:
    """All requests wait from the start, and are admitted in their order.

    The first `batch` have a place at once, each later one when the next of those before it ends.
    """
    ends = sorted(times[-1] for times in token_s)
    free_s = [started_s if index < batch else ends[index - batch] for index in range(len(token_s))]
    return Timeline(started_s, token_s, free_s)


def open_loop(started_s: float, token_s: list[list[float]], arrivals_s: Sequence[float]) -> Timeline:
    """Requests come at `arrivals_s`, counted from the start, whatever there is a place for."""
    return Timeline(started_s, token_s, [started_s + arrival for arrival in arrivals_s])
