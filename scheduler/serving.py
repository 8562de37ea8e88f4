"""Gives the running sequences their chunks, and takes victims where blocks run out."""

from scheduler.kv_cache_manager import KVCacheManager
from scheduler.policy import Policy
from scheduler.preemption import Preemptor
from scheduler.queues import Queues
from scheduler.roster import Roster
from scheduler.sequence import Sequence
from scheduler.step_adder import StepAdder


class Serving:
    """The first part of a step, from the best protected sequence to the least.

    num_missing_blocks: that allocation found missing for running sequences, summed over steps. It only grows.
    """

    def __init__(
        self, kv: KVCacheManager, queues: Queues, roster: Roster, policy: Policy, preemptor: Preemptor
    ) -> None:
        self.num_missing_blocks = 0
        self._kv = kv
        self._queues = queues
        self._roster = roster
        self._is_order_changing = policy.fair is not None
        self._preemptor = preemptor

    def serve(self, adder: StepAdder) -> bool:
        """Give each running sequence its chunk, preempting from the back where blocks run out; whether they did.

        One that lacks no more than what copies on their way will free sits this step out, and nobody is preempted
        for it. So does a leader without anybody left to preempt: what it lacks is on its way.
        """
        kv, running = self._kv, self._queues.running
        growing = self._growing_in_order(adder)
        if adder.try_serve_decodes(running.part(0, len(running)), [running[index] for index in growing]):
            return False
        num_other_beams = sum([len(running[index].all_beams) - 1 for index in growing])
        last_lacking: Sequence | None = None
        index = 0
        for growing_index in (*growing, len(running)):
            adder.serve_decodes(running.part(index, growing_index))
            index = growing_index
            while index == growing_index < len(running) and adder.num_tokens_left > 0:
                seq = running[index]
                num_behind = len(running) - index - 1 + num_other_beams
                if adder.try_serve(seq, num_behind):
                    index += 1
                    continue
                if seq is not last_lacking:
                    last_lacking = seq
                    self.num_missing_blocks += adder.num_missing_blocks(seq, num_behind)
                is_last = len(running) == 1 and kv.has_transfers
                if is_last or (kv.has_transfers and adder.try_reserve(seq, num_behind)):
                    index += 1
                    continue
                self.preempt(running.pop_victim())
            if index >= len(running) or adder.num_tokens_left == 0:
                break
        return last_lacking is not None

    def preempt(self, victim: Sequence) -> None:
        """Take row and blocks of a sequence that was running and is in no queue; it is in one again afterwards."""
        for beam in victim.all_beams:
            self._roster.remove_row(beam)
        self._preemptor.preempt(victim)
        self._queues.place(victim)

    def _growing_in_order(self, adder: StepAdder) -> list[int]:
        """Which of the running sequences are no mere decodes, those being in the order of now if blocks may run out."""
        running = self._queues.running
        growing = running.growing()
        if not self._is_order_changing or not adder.may_lack_blocks([running[index] for index in growing]):
            return growing
        running.reorder()
        return running.growing()
