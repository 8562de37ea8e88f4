"""Copies full blocks of the likely victims to the CPU tier before they are victims."""

from itertools import islice

from scheduler.kv_cache_manager import KVCacheManager
from scheduler.preemption import RunningQueue
from scheduler.sequence import Sequence

# A sequence is a likely victim if the free blocks may run out within so many steps.
HORIZON_STEPS = 64
# How much all will grow is added up in so many parts, one a step: a walk over all that run would make that step long.
NUM_PARTS = 16
# Blocks of so many sequences are written in a step, the likeliest victims'. What others have filled gathers until it is
# their turn, and costs no more for that.
MAX_WRITTEN = 4
# A step that admits more than so many takes long enough: it leaves the writing to the next one. So do so many in a row.
MAX_ADMITTED = 2
MAX_WAITS = 3


class WriteBehind:
    """Uses the idle link between the tiers, so that a preemption finds its victim's full blocks copied already.

        running   [ leader | … | likely victims ]      as many, from the back, as hold the blocks that may be missing
                                   ▼
        CPU tier  full blocks of a few of them that don't lie there yet, at most `num_blocks` a step, in one transfer

    Only what is free in the CPU tier is used, and nobody waits for these copies but a victim whose blocks are being
    copied when it is preempted. A copy is found by its content, like every cached block; so without a prefix cache
    there is no writing behind. What was copied for somebody who then ends unharmed was for nothing: that is its price.
    """

    def __init__(self, kv: KVCacheManager, num_blocks: int) -> None:
        self._kv = kv
        self._num_blocks = num_blocks
        self._num_growth_blocks = [0] * NUM_PARTS
        self._part = 0
        self._num_waits = 0

    def begin(self, running: RunningQueue, num_admitted: int) -> None:
        """Begin the copies of a step that admits so many, if none that was begun is still on its way.

        What is to be swapped comes first, and counts: the budget is what is left of it.
        """
        kv, swap = self._kv, self._kv.swap
        if swap is None or swap.index is None or self._num_blocks == 0 or len(running) < 2:
            return
        if num_admitted > MAX_ADMITTED and self._num_waits < MAX_WAITS:
            self._num_waits += 1
            return
        self._num_waits = 0
        num_left, num_room = self._num_blocks - swap.num_queued_blocks, swap.pool.num_free
        if num_left <= 0 or not swap.is_link_idle:
            return
        block_size = kv.block_size
        num_wanted = self._num_wanted_blocks(running)
        num_written = 0
        # The likeliest victims first: as many as hold the blocks that are wanted.
        for seq in running.last_first():
            if num_wanted <= 0 or num_left == 0 or num_room == 0 or num_written == MAX_WRITTEN:
                break
            num_wanted -= len(seq.block_table.blocks)
            # What lies in the tier for a likelier victim is not given up for a less likely one.
            if not seq.use_prefix_cache:
                continue
            num_full = min(seq.num_settled_tokens // block_size, num_room)
            num_room -= num_full
            if num_full > seq.num_written_blocks:
                num_left -= swap.write_behind(seq, num_full, num_left)
                num_written += 1
        swap.begin_write_behind()

    def _num_wanted_blocks(self, running: RunningQueue) -> int:
        """Blocks that will be missing if all grow for HORIZON_STEPS: roughly, since of most it is some steps old."""
        part = islice(running, self._part, None, NUM_PARTS)
        self._num_growth_blocks[self._part] = sum([self._num_growth_blocks_of(seq) for seq in part])
        self._part = (self._part + 1) % NUM_PARTS
        return sum(self._num_growth_blocks) - self._kv.num_available_blocks

    def _num_growth_blocks_of(self, seq: Sequence) -> int:
        num_tokens = min(len(seq.token_ids) + HORIZON_STEPS, seq.max_num_tokens - 1)
        return max(0, self._kv.num_blocks_for(num_tokens) - len(seq.block_table.blocks))
