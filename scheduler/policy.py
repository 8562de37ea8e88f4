"""The order of the waiting queue."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler.sequence import Sequence

_Key = tuple[int, bool, float, int]


def waiting_key(seq: Sequence) -> _Key:
    """Smallest first: the more important, then those that were preempted, then the earlier arrival."""
    return (-seq.priority, seq.num_preemptions == 0, seq.arrival_s, seq.serial)


class WaitingQueue:
    """Sequences that wait to be admitted, in the order of `waiting_key`.

    A sorted list: taking one from the middle (an abort, or a small one that passes a big one) costs a
    binary search and one memmove, and iteration is as fast as Python has it. No sequence's key may change while
    it is in here.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[_Key, Sequence]] = []

    def add(self, seq: Sequence) -> None:
        """Put `seq` into its place."""
        insort(self._entries, (waiting_key(seq), seq))

    def remove(self, seq: Sequence) -> None:
        """Take `seq` out, wherever it stands."""
        index = bisect_left(self._entries, waiting_key(seq), key=lambda entry: entry[0])
        assert self._entries[index : index + 1] == [(waiting_key(seq), seq)], f"{seq} is not in the waiting queue"
        del self._entries[index]

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for _, seq in self._entries)

    def __len__(self) -> int:
        return len(self._entries)
