"""Who is where."""

from scheduler.output import FinishReason
from scheduler.policy import Policy
from scheduler.preemption import RunningQueue
from scheduler.sequence import Sequence, SequenceStatus
from scheduler.waiting_queue import WaitingQueue


class Queues:
    """Each unfinished sequence is in exactly one of these.

    waiting: those that are WAITING or SWAPPED, in one order. running: the RUNNING ones. moving: those that are
    SWAPPING_OUT or SWAPPING_IN, by id. ending: RUNNING ones whose last token is being drawn while the step after it is
    decided, by id: they have blocks and a row, and get no chunk any more. complete: resumed ones that lacked nothing
    when they came, by id, and the reason with which they end in the next update.
    """

    def __init__(self, policy: Policy) -> None:
        self.waiting = WaitingQueue(policy)
        self.running = RunningQueue(policy.protection_key)
        self.moving: dict[str, Sequence] = {}
        self.ending: dict[str, Sequence] = {}
        self.complete: dict[str, tuple[Sequence, FinishReason]] = {}

    @property
    def coming(self) -> list[Sequence]:
        """Those that are being swapped in: they will run as soon as that has ended."""
        return [seq for seq in self.moving.values() if seq.status is SequenceStatus.SWAPPING_IN]

    def place(self, seq: Sequence) -> None:
        """Put a sequence that is in no queue into that of its status."""
        if seq.status is SequenceStatus.RUNNING:
            self.running.add(seq)
        elif seq.status in (SequenceStatus.SWAPPING_OUT, SequenceStatus.SWAPPING_IN):
            self.moving[seq.seq_id] = seq
        else:
            self.waiting.add(seq)

    def take_out(self, seq: Sequence) -> None:
        """Take an unfinished sequence out of whichever queue it is in."""
        if seq.status is SequenceStatus.RUNNING:
            if self.ending.pop(seq.seq_id, None) is None:
                self.running.remove(seq)
        elif self.moving.pop(seq.seq_id, None) is None and self.complete.pop(seq.seq_id, None) is None:
            self.waiting.remove(seq)
