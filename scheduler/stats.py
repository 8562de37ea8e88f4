"""The scheduler's snapshot for metrics and dashboards."""

from itertools import chain

from scheduler.beam_blocks import each_beam, num_empty_slots
from scheduler.kv_cache_manager import KVCacheManager
from scheduler.output import SchedulerStats
from scheduler.preemption import Preemptor
from scheduler.queues import Queues


def make_stats(
    kv: KVCacheManager,
    queues: Queues,
    preemptor: Preemptor,
    *,
    num_recomputed_tokens: int,
    num_missing_blocks: int,
    num_step_splits: int,
    num_overdue: int,
    num_allowed_seqs: int,
    kv_block_bytes: int,
) -> SchedulerStats:
    """The state of now; the counters of others are passed on as they are."""
    pool, swap, running = kv.pool, kv.swap, [*queues.running, *queues.ending.values()]
    num_allocated = kv.num_owned_blocks * kv.block_size
    # But for beams only full blocks are shared, so what is empty is empty in one sequence's last blocks. Blocks on
    # their way in or out count as filled.
    num_empty = sum(
        [
            len(seq.block_table) * kv.block_size - seq.num_computed_tokens
            if seq.beams is None
            else num_empty_slots(seq.beams, kv.block_size)
            for seq in running
        ]
    )
    num_in_tables = sum([len(seq.block_table) for seq in each_beam(chain(running, queues.moving.values()))])
    num_swapped = 0 if swap is None else swap.num_sequences
    return SchedulerStats(
        num_running=len(running),
        num_waiting=len(queues.waiting) + len(queues.moving) - num_swapped,
        num_swapped=num_swapped,
        num_blocks=pool.num_blocks,
        num_free_blocks=pool.num_free - pool.num_free_cached,
        num_cached_blocks=pool.num_free_cached,
        num_filled_slots=num_allocated - num_empty,
        num_allocated_slots=num_allocated,
        num_preemptions_recompute=preemptor.num_recomputes,
        num_preemptions_swap=preemptor.num_swaps,
        num_recomputed_tokens=num_recomputed_tokens,
        prefix_queried_tokens=kv.num_queried_tokens,
        prefix_hit_tokens=kv.num_hit_tokens,
        num_missing_blocks=num_missing_blocks,
        num_full_tier_recomputes=preemptor.num_full_tier_recomputes,
        num_swapped_out_blocks=0 if swap is None else swap.num_out_blocks,
        num_swapped_in_blocks=0 if swap is None else swap.num_in_blocks,
        swapped_out_bytes=0 if swap is None else swap.num_out_blocks * kv_block_bytes,
        swapped_in_bytes=0 if swap is None else swap.num_in_blocks * kv_block_bytes,
        num_damaged_blocks=0 if swap is None else swap.num_damaged_blocks,
        num_cpu_blocks=0 if swap is None else swap.pool.num_blocks,
        num_used_cpu_blocks=0 if swap is None else swap.pool.num_blocks - swap.pool.num_free,
        num_transfers=0 if swap is None else len(swap.flights),
        num_step_splits=num_step_splits,
        prefix_tier_hit_tokens=kv.num_tier_hit_tokens,
        num_written_behind_blocks=0 if swap is None else swap.num_written_behind_blocks,
        written_behind_bytes=0 if swap is None else swap.num_written_behind_blocks * kv_block_bytes,
        num_overdue=num_overdue,
        num_allowed_seqs=num_allowed_seqs,
        num_saved_blocks=num_in_tables - (kv.num_owned_blocks - kv.num_leaving_blocks),
        num_forks=kv.num_forks,
        num_copied_blocks=kv.num_copied_blocks,
    )
