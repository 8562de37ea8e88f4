"""Who was taken on and has not ended: the door in, and the one door out."""

from itertools import count

from scheduler.deadlines import Deadlines
from scheduler.kv_cache_manager import KVCacheManager
from scheduler.output import FinishReason, SequenceOutput
from scheduler.policy_fair import FairShare
from scheduler.queues import Queues
from scheduler.sequence import Sequence, SequenceStatus


class Roster:
    """The unfinished sequences by id, and what is to be told of those that have lost their rows or their time.

    A sequence enters once and ends once. An id whose row the runner is to drop is told in exactly one step.

    num_overdue: how many were dropped for their deadline. It only grows.
    """

    def __init__(self, kv: KVCacheManager, queues: Queues, deadlines: Deadlines, fair: FairShare | None) -> None:
        self.deadlines = deadlines
        self.num_overdue = 0
        self._kv = kv
        self._queues = queues
        self._fair = fair
        self._seqs: dict[str, Sequence] = {}
        self._serials = count()
        self._removed_ids: list[str] = []
        self._overdue: list[SequenceOutput] = []

    @property
    def has_news(self) -> bool:
        """Whether rows that are to be dropped, or sequences that were, are still to be told."""
        return bool(self._removed_ids or self._overdue)

    def get(self, seq_id: str) -> Sequence | None:
        """The unfinished sequence of this id, if there is one."""
        return self._seqs.get(seq_id)

    def enter(self, seq: Sequence, reason: FinishReason | None) -> None:
        """Take a sequence on; one that lacks nothing has the `reason` with which it ends in the next update."""
        if seq.family is not None:
            seq.family.join(seq)
        seq.serial = next(self._serials)
        self._seqs[seq.seq_id] = seq
        if self._fair is not None:
            self._fair.arrive(seq)
        if reason is None:
            self.deadlines.add(seq)
            self._queues.waiting.add(seq)
        else:
            self._queues.complete[seq.seq_id] = (seq, reason)

    def end(self, seq: Sequence, reason: FinishReason) -> None:
        """The one door out: whoever ends, for whatever reason, leaves no block, row or entry behind.

        The caller has taken it out of its queue.
        """
        if seq.has_placeholder:
            seq.token_ids.pop()
        for beam in seq.all_beams:
            self.remove_row(beam)
            self._kv.free(beam)
            beam.status = SequenceStatus.FINISHED
        if seq.family is not None:
            seq.family.leave(seq)
        seq.finish_reason = reason
        del self._seqs[seq.seq_id]
        self.deadlines.leave(seq)
        if self._fair is not None:
            self._fair.leave(seq)

    def drop_overdue(self, now: float, *, is_step_counted: bool) -> None:
        """Drop those whose deadline has come; or, if so wanted, will have come before the shortest step is over."""
        for seq in self.deadlines.take_overdue(now, is_step_counted=is_step_counted):
            self.drop(seq, now)

    def drop(self, seq: Sequence, now: float) -> None:
        """End a sequence for its deadline, whichever queue it is in; the next update says so."""
        self._queues.take_out(seq)
        self.end(seq, FinishReason.DEADLINE)
        self.num_overdue += 1
        self._overdue.append(SequenceOutput(seq.seq_id, (), FinishReason.DEADLINE, stats=seq.stats(now)))

    def end_complete(self, now: float) -> list[SequenceOutput]:
        """End those that were complete when they came."""
        outputs = []
        for seq, reason in self._queues.complete.values():
            self.end(seq, reason)
            outputs.append(SequenceOutput(seq.seq_id, (), reason, stats=seq.stats(now)))
        self._queues.complete.clear()
        return outputs

    def remove_row(self, seq: Sequence) -> None:
        """Have the runner drop its row, if it has one: after a swap it gets it back with its next chunk only."""
        if seq.has_row:
            self._removed_ids.append(seq.seq_id)
            seq.has_row = False
            seq.num_decode_slots = 0

    def take_removed_ids(self) -> tuple[str, ...]:
        """The ids of rows to be dropped that were not told yet."""
        removed_ids, self._removed_ids = tuple(self._removed_ids), []
        return removed_ids

    def take_overdue(self) -> list[SequenceOutput]:
        """What is to be said of those that were dropped for their deadline."""
        outputs, self._overdue = self._overdue, []
        return outputs

    def __len__(self) -> int:
        return len(self._seqs)
