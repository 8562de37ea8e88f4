"""What must hold between any two calls of the scheduler. For tests and for debugging: it walks everything."""

from collections import Counter

from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence, SequenceStatus


def check(scheduler: Scheduler) -> None:
    """Raise AssertionError, with the numbers, at the first invariant that is broken."""
    check_pool(scheduler)
    check_prefix_cache(scheduler)
    check_queues(scheduler)
    for seq in scheduler.running:
        check_running(scheduler, seq)
    for seq in scheduler.waiting:
        check_waiting(seq)
    if not scheduler.has_unfinished:
        num_owned = scheduler.kv.num_owned_blocks
        assert num_owned == 0, f"nothing is unfinished, but {num_owned} blocks are owned"


def check_pool(scheduler: Scheduler) -> None:
    """Free + unique owned + cached = total; a reference for each table that holds a block, and none else."""
    pool = scheduler.kv.pool
    owners = Counter(block.block_id for seq in scheduler.running for block in seq.block_table)
    free = pool.free_list()
    num_cached = sum(block.content is not None for block in free)
    assert len(free) == pool.num_free, f"{len(free)} blocks are in the free list, {pool.num_free} are counted"
    assert num_cached == pool.num_free_cached, f"{num_cached} free blocks are cached, {pool.num_free_cached} counted"
    stats = scheduler.stats()
    assert stats.num_free_blocks + len(owners) + stats.num_cached_blocks == pool.num_blocks, (
        f"{stats.num_free_blocks} free + {len(owners)} owned + {stats.num_cached_blocks} cached blocks are not "
        f"{pool.num_blocks}"
    )
    assert stats.num_filled_slots <= stats.num_allocated_slots == len(owners) * scheduler.kv.block_size, (
        f"{stats.num_filled_slots} of {stats.num_allocated_slots} slots are filled in {len(owners)} blocks"
    )
    free_ids = {block.block_id for block in free}
    for block in pool.blocks:
        num_owners = owners[block.block_id]
        assert block.ref_cnt == num_owners, f"{block} is in {num_owners} block tables"
        assert (block.block_id in free_ids) == (num_owners == 0), f"{block} is free and owned, or neither"


def check_prefix_cache(scheduler: Scheduler) -> None:
    """Each entry leads to a block that holds it, and each content has its entry."""
    cache = scheduler.kv.prefix_cache
    contents = {block.block_id: block.content for block in scheduler.kv.pool.blocks if block.content is not None}
    entries = {} if cache is None else {block.block_id: key for key, block in cache.items()}
    hashes = {block_id: content.hash for block_id, content in contents.items()}
    assert entries == hashes, f"the prefix cache leads to {entries}, the blocks hold {hashes}"
    names = {content.name for content in contents.values()}
    assert len(names) == len(contents), f"{len(contents)} contents share {len(names)} names"


def check_queues(scheduler: Scheduler) -> None:
    """Each unfinished sequence is in exactly one queue, and in no queue twice."""
    queued = [*scheduler.running, *scheduler.waiting, *scheduler.complete]
    num_unfinished = scheduler.num_unfinished
    assert len({id(seq) for seq in queued}) == len(queued) == num_unfinished, (
        f"{len(scheduler.running)} running + {len(scheduler.waiting)} waiting + {len(scheduler.complete)} complete "
        f"sequences, but {num_unfinished} are unfinished"
    )
    max_num_seqs = scheduler.config.max_num_seqs
    assert len(scheduler.running) <= max_num_seqs, f"{len(scheduler.running)} run, but at most {max_num_seqs} may"


def check_running(scheduler: Scheduler, seq: Sequence) -> None:
    """Computed ≤ known tokens; no block beyond the one its last token lies in; shared blocks are sealed."""
    assert seq.status is SequenceStatus.RUNNING, f"{seq} is in the running queue"
    num_max = seq.max_num_tokens
    assert seq.num_computed_tokens <= seq.num_tokens < num_max, f"{seq} goes beyond its {num_max} tokens"
    num_blocks, block_size = len(seq.block_table), scheduler.kv.block_size
    assert seq.num_computed_tokens <= num_blocks * block_size < seq.num_tokens + block_size, (
        f"{seq} has blocks for {num_blocks * block_size} tokens"
    )
    num_full = seq.num_computed_tokens // block_size
    if scheduler.kv.prefix_cache is not None:
        assert seq.num_sealed_blocks == num_full, f"{seq} has sealed {seq.num_sealed_blocks} of {num_full} full blocks"
    for index, block in enumerate(seq.block_table):
        assert block.ref_cnt == 1 or index < num_full, f"{block} is block {index} of {seq}: shared, but not full"


def check_waiting(seq: Sequence) -> None:
    """Who waits holds nothing."""
    assert seq.status is SequenceStatus.WAITING, f"{seq} is in the waiting queue"
    num_held = seq.num_computed_tokens + seq.num_sealed_blocks + len(seq.block_table)
    assert num_held == 0, f"{seq} waits, but has computed tokens or blocks"
