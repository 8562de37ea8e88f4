"""Whose time is up, and who can't make it in time."""

from heapq import heapify, heappop, heappush

from scheduler.sequence import Sequence
from scheduler.step_pace import StepPace

# So many ended sequences may be kept here before they are looked for.
MAX_ENDED = 64


class Deadlines:
    """Unfinished sequences that have a deadline, the earliest on top of a heap. Ended ones stay in it for a while."""

    def __init__(self, pace: StepPace) -> None:
        self._pace = pace
        self._heap: list[tuple[float, int, Sequence]] = []
        self._num_ended = 0

    def add(self, seq: Sequence) -> None:
        """A sequence was taken on."""
        if seq.deadline_s is not None:
            heappush(self._heap, (seq.deadline_s, seq.serial, seq))

    def leave(self, seq: Sequence) -> None:
        """A sequence has ended."""
        if seq.deadline_s is None:
            return
        self._num_ended += 1
        if self._num_ended > MAX_ENDED and 2 * self._num_ended > len(self._heap):
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapify(self._heap)
            self._num_ended = 0

    def take_overdue(self, now: float, *, is_step_counted: bool) -> list[Sequence]:
        """Those, in whatever state, whose deadline has come; or will have before the shortest step is over."""
        limit = now + (self._pace.shortest_s if is_step_counted else 0.0)
        overdue = []
        while self._heap and self._heap[0][0] <= limit:
            seq = heappop(self._heap)[2]
            if not seq.is_finished:
                overdue.append(seq)
        return overdue

    def has_overdue(self, now: float, *, is_step_counted: bool) -> bool:
        """Whether `take_overdue` might find somebody: true, too, for one that has ended and was not cleared away."""
        return bool(self._heap) and self._heap[0][0] <= now + (self._pace.shortest_s if is_step_counted else 0.0)

    def is_hopeless(self, seq: Sequence, now: float, num_cached_tokens: int = 0) -> bool:
        """Whether the next token of `seq` can't come before its deadline, even if it had the engine to itself.

        num_cached_tokens: how many of its tokens need not be computed, beside those that are.
        """
        if seq.deadline_s is None:
            return False
        num_left = seq.num_tokens - max(seq.num_computed_tokens, seq.num_swapped_tokens, num_cached_tokens)
        return now + self._pace.least_s(num_left) >= seq.deadline_s
