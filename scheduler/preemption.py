"""Who gives way when blocks run out, and how."""

from bisect import insort
from collections.abc import Iterator
from enum import StrEnum
from math import inf

from scheduler.kv_cache_manager import KVCacheManager
from scheduler.sequence import Sequence, SequenceStatus


class PreemptionMode(StrEnum):
    """How a victim gives its blocks back."""

    RECOMPUTE = "recompute"


def protection_key(seq: Sequence) -> tuple[int, float, float, int]:
    """Smallest is best protected: the more important, then the closer deadline, then the earlier arrival.

    The deadline stands for the slack: both differ by the time of day, which is the same for all.
    """
    deadline_s = inf if seq.deadline_s is None else seq.deadline_s
    return (-seq.priority, deadline_s, seq.arrival_s, seq.serial)


class RunningQueue:
    """Running sequences in the order of their protection.

        [ leader | best protected … least protected ]
          served first                  preempted first

    A step serves from the front and takes victims from the back, so nobody loses blocks in a step in which it
    was served already. The leader is the oldest at the time when it became one, and stays until it ends: it
    is never preempted, whatever its priority. All others can be, so it always finds blocks; so it always ends.
    """

    def __init__(self) -> None:
        self._seqs: list[Sequence] = []

    @property
    def leader(self) -> Sequence | None:
        """The one that is never preempted; None where nothing runs."""
        return self._seqs[0] if self._seqs else None

    def add(self, seq: Sequence) -> None:
        """Put `seq` into its place; it leads if it is alone."""
        insort(self._seqs, seq, lo=min(1, len(self._seqs)), key=protection_key)

    def remove(self, seq: Sequence) -> None:
        """Take out one that has ended. If it led, the oldest of the others leads."""
        index = self._seqs.index(seq)
        del self._seqs[index]
        if index == 0 and self._seqs:
            heir = min(self._seqs, key=lambda other: (other.arrival_s, other.serial))
            self._seqs.remove(heir)
            self._seqs.insert(0, heir)

    def pop_victim(self) -> Sequence:
        """Take out the least protected one, which is never the leader."""
        assert len(self._seqs) > 1, f"the leader {self._seqs} is alone and still lacks blocks"
        return self._seqs.pop()

    def __getitem__(self, index: int) -> Sequence:
        return self._seqs[index]

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs)

    def __len__(self) -> int:
        return len(self._seqs)


class Preemptor:
    """Carries a preemption out, in the mode that fits the victim, and counts.

    There is one mode so far: the blocks are freed and their tokens computed again later, as far as the prefix
    cache has not kept them. Swapping to the CPU tier is a second one, chosen here per victim.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self.counts = dict.fromkeys(PreemptionMode, 0)

    def preempt(self, victim: Sequence) -> None:
        """Free the blocks of `victim`, which is in no queue now; it is WAITING afterwards."""
        self._kv.free(victim)
        victim.status = SequenceStatus.WAITING
        victim.num_preemptions += 1
        self.counts[PreemptionMode.RECOMPUTE] += 1
