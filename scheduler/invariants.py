"""What must hold between any two calls of the scheduler. For tests and for debugging: it walks everything."""

from collections import Counter

from scheduler.beam_blocks import each_beam
from scheduler.beam_group import BeamGroup
from scheduler.block_pool import BlockPool
from scheduler.prefix_cache import PrefixCache
from scheduler.scheduler import Scheduler
from scheduler.sequence import PLACEHOLDER, Sequence, SequenceStatus
from scheduler.swap_tier import Flight


def check(scheduler: Scheduler) -> None:
    """Raise AssertionError, with the numbers, at the first invariant that is broken."""
    check_pool(scheduler)
    check_prefix_cache(scheduler)
    check_queues(scheduler)
    for seq in _unfinished(scheduler):
        if seq.beams is not None:
            check_beams(seq.beams)
    for seq in each_beam(scheduler.running):
        check_running(scheduler, seq)
    for seq in scheduler.ending.values():
        check_ending(seq)
    for seq in _unfinished(scheduler):
        check_placeholders(seq)
    for seq in each_beam(scheduler.waiting):
        if seq.head.status is SequenceStatus.SWAPPED:
            check_swapped(scheduler, seq)
        else:
            check_waiting(scheduler, seq)
    for seq in each_beam(scheduler.moving.values()):
        check_moving(scheduler, seq)
    check_swap_tier(scheduler)
    if not scheduler.has_unfinished and not scheduler.kv.has_transfers:
        num_owned = scheduler.kv.num_owned_blocks
        assert num_owned == 0, f"nothing is unfinished, but {num_owned} blocks are owned"


def check_pool(scheduler: Scheduler) -> None:
    """Free + unique owned + cached = total; a reference for each table or transfer that holds a block."""
    pool, flights = scheduler.kv.pool, _flights(scheduler)
    owners = Counter(block.block_id for seq in _holders(scheduler) for block in seq.block_table)
    owners.update(block.block_id for flight in flights for block in flight.device)
    _check_references(pool, owners)
    stats = scheduler.stats()
    assert stats.num_free_blocks + len(owners) + stats.num_cached_blocks == pool.num_blocks, (
        f"{stats.num_free_blocks} free + {len(owners)} owned + {stats.num_cached_blocks} cached blocks are not "
        f"{pool.num_blocks}"
    )
    assert stats.num_filled_slots <= stats.num_allocated_slots == len(owners) * scheduler.kv.block_size, (
        f"{stats.num_filled_slots} of {stats.num_allocated_slots} slots are filled in {len(owners)} blocks"
    )


def check_swap_tier(scheduler: Scheduler) -> None:
    """The CPU tier's blocks, as those of the device; and those that wait for a transfer are those that it lets go."""
    swap = scheduler.kv.swap
    seqs, moving = _unfinished(scheduler), scheduler.moving.values()
    num_swapped = sum(len(seq.cpu_table) > 0 for seq in seqs)
    stats = scheduler.stats()
    assert stats.num_swapped == num_swapped, f"{num_swapped} sequences hold CPU blocks, {stats.num_swapped} are counted"
    num_waiting = sum(seq.status is SequenceStatus.WAITING for seq in scheduler.waiting)
    assert stats.num_waiting == num_waiting, f"{num_waiting} sequences wait, {stats.num_waiting} are counted"
    if swap is None:
        assert not moving, f"{[*moving]} are on their way, but there is no CPU tier"
        return
    flights = swap.flights.values()
    owners = Counter(block.block_id for seq in each_beam(seqs) for block in seq.cpu_table)
    owners.update(block.block_id for flight in flights for block in flight.cpu)
    _check_references(swap.pool, owners)
    _check_entries(swap.pool, swap.index)
    awaited = Counter(seq.seq_id for flight in flights for seq in flight.waiting if not seq.is_finished)
    expected = {seq.seq_id: seq.num_transfers for seq in moving}
    assert awaited == expected, f"transfers are awaited by {dict(awaited)}, but those that move wait for {expected}"


def check_prefix_cache(scheduler: Scheduler) -> None:
    """Each entry leads to a block that holds it, and each content has its entry."""
    _check_entries(scheduler.kv.pool, scheduler.kv.prefix_cache)


def _unfinished(scheduler: Scheduler) -> list[Sequence]:
    return [*scheduler.running, *scheduler.ending.values(), *scheduler.waiting, *scheduler.moving.values()]


def _holders(scheduler: Scheduler) -> list[Sequence]:
    """All that may hold blocks."""
    return list(each_beam(_unfinished(scheduler)))


def _flights(scheduler: Scheduler) -> list[Flight]:
    return [] if scheduler.kv.swap is None else list(scheduler.kv.swap.flights.values())


def _check_references(pool: BlockPool, owners: Counter[int]) -> None:
    free = pool.free_list()
    num_cached = sum(block.content is not None for block in free)
    assert len(free) == pool.num_free, f"{len(free)} blocks are in the free list, {pool.num_free} are counted"
    assert num_cached == pool.num_free_cached, f"{num_cached} free blocks are cached, {pool.num_free_cached} counted"
    assert len(free) + len(owners) == pool.num_blocks, (
        f"{len(free) - num_cached} free + {len(owners)} owned + {num_cached} cached blocks are not {pool.num_blocks}"
    )
    free_ids = {block.block_id for block in free}
    for block in pool.blocks:
        num_owners = owners[block.block_id]
        assert block.ref_cnt == num_owners, f"{block} is in {num_owners} block tables"
        assert (block.block_id in free_ids) == (num_owners == 0), f"{block} is free and owned, or neither"


def _check_entries(pool: BlockPool, cache: PrefixCache | None) -> None:
    contents = {block.block_id: block.content for block in pool.blocks if block.content is not None}
    entries = {} if cache is None else {block.block_id: key for key, block in cache.items()}
    hashes = {block_id: content.hash for block_id, content in contents.items()}
    assert entries == hashes, f"the prefix cache leads to {entries}, the blocks hold {hashes}"
    names = {content.name for content in contents.values()}
    assert len(names) == len(contents), f"{len(contents)} contents share {len(names)} names"


def check_queues(scheduler: Scheduler) -> None:
    """Each unfinished sequence is in exactly one queue, and in no queue twice."""
    queued = [*_unfinished(scheduler), *scheduler.complete]
    num_unfinished = scheduler.num_unfinished
    assert len({id(seq) for seq in queued}) == len(queued) == num_unfinished, (
        f"{len(scheduler.running)} running + {len(scheduler.waiting)} waiting + {len(scheduler.moving)} moving + "
        f"{len(scheduler.complete)} complete sequences, but {num_unfinished} are unfinished"
    )
    num_rows = sum(seq.sampling.beam_width for seq in scheduler.running)
    assert scheduler.running.num_rows == num_rows, f"{num_rows} rows are wanted, {scheduler.running.num_rows} counted"
    max_num_seqs = scheduler.config.max_num_seqs
    coming = [seq for seq in scheduler.moving.values() if seq.status is SequenceStatus.SWAPPING_IN]
    num_admitted = sum(seq.sampling.beam_width for seq in (*scheduler.running, *scheduler.ending.values(), *coming))
    assert num_admitted <= max_num_seqs, f"{num_admitted} run or are swapped in, but at most {max_num_seqs} may"


def check_beams(group: BeamGroup) -> None:
    """Different replies of one length, the head's among them, no more than the width, the likeliest first."""
    beams, head, logprobs = group.beams, group.head, group.search.logprobs
    assert sum(beam is head for beam in beams) == 1, f"{head} is not among its beams {beams}"
    assert 1 <= len(beams) == len(logprobs) <= group.search.width, f"{len(beams)} beams, {len(logprobs)} of them scored"
    assert all(beam.beams is group for beam in beams), f"{beams} are beams of one group"
    assert len({beam.num_tokens for beam in beams}) == 1, f"{beams} differ in length"
    assert len({tuple(beam.generated_token_ids) for beam in beams}) == len(beams), f"two of {beams} are the same"
    assert len({beam.seq_id for beam in beams}) == len(beams), f"two of {beams} have one id"
    assert logprobs == sorted(logprobs, reverse=True), f"beams of {head} are out of order: {logprobs}"
    prompt = head.token_ids[: head.num_prompt_tokens]
    assert all(beam.token_ids[: head.num_prompt_tokens] == prompt for beam in beams), f"{beams} differ in their prompt"


def check_running(scheduler: Scheduler, seq: Sequence) -> None:
    """Computed ≤ known tokens; no block beyond that of its last token; what is shared is sealed, or copied next.

    Only a family and beams share a block that is not full: whose next chunk writes to it copies it before that.
    """
    assert seq.head.status is SequenceStatus.RUNNING, f"{seq} is in the running queue"
    num_max = seq.max_num_tokens
    assert seq.num_computed_tokens <= seq.num_tokens < num_max, f"{seq} goes beyond its {num_max} tokens"
    num_blocks, block_size = len(seq.block_table), scheduler.kv.block_size
    assert seq.num_computed_tokens <= num_blocks * block_size < seq.num_tokens + block_size, (
        f"{seq} has blocks for {num_blocks * block_size} tokens"
    )
    if seq.num_computed_tokens < seq.num_decode_slots:
        is_mere_decode = seq.has_row and seq.family is None and seq.num_decode_slots == num_blocks * block_size
        assert is_mere_decode, f"{seq} has no row, shares, or has no {seq.num_decode_slots} slots to decode into"
        num_more = min(num_blocks + 1, scheduler.kv.num_blocks_for(num_max - 1)) - num_blocks
        assert seq.num_promised_blocks == num_more, f"{seq} is promised {seq.num_promised_blocks} blocks"
    num_full = seq.num_settled_tokens // block_size
    is_entered = seq.use_prefix_cache and (seq.is_followed or seq.num_preemptions > 0)
    if scheduler.kv.prefix_cache is not None and is_entered:
        assert seq.num_sealed_blocks == num_full, f"{seq} has sealed {seq.num_sealed_blocks} of {num_full} full blocks"
    for index, block in enumerate(seq.block_table):
        is_copied = index == num_full and (seq.family is not None or seq.beams is not None)
        assert block.ref_cnt == 1 or index < num_full or is_copied, (
            f"{block} is block {index} of {seq}: shared, but not full"
        )


def check_ending(seq: Sequence) -> None:
    """Who is ending runs, holds a row and blocks, and lacks nothing but the id of its last token."""
    assert seq.status is SequenceStatus.RUNNING, f"{seq} is ending"
    assert seq.has_placeholder, f"{seq} is ending, but no token of it is being drawn"
    assert seq.has_row, f"{seq} is ending, but has no row"
    assert seq.num_tokens == seq.max_num_tokens, f"{seq} is ending before its {seq.max_num_tokens} tokens"


def check_placeholders(seq: Sequence) -> None:
    """A placeholder is the last token of a sequence that a step computes, and its own keys and values are not there."""
    num_real = seq.num_tokens - seq.has_placeholder
    assert PLACEHOLDER not in seq.token_ids[:num_real], f"{seq} has a placeholder before its last token"
    assert seq.num_computed_tokens <= num_real, f"{seq} has computed a token that is not drawn yet"
    assert 0 <= seq.num_in_flight_tokens <= seq.num_computed_tokens, f"{seq}: {seq.num_in_flight_tokens} are in flight"
    assert seq.num_in_flight_tokens > 0 or not seq.has_placeholder, f"{seq} has a placeholder, but no step draws it"


def check_waiting(scheduler: Scheduler, seq: Sequence) -> None:
    """Who waits holds nothing, and finds no more blocks than the notes of its last lookup allow."""
    assert seq.head.status is SequenceStatus.WAITING, f"{seq} is in the waiting queue"
    num_held = seq.num_computed_tokens + seq.num_sealed_blocks + len(seq.block_table) + len(seq.cpu_table)
    assert num_held == 0, f"{seq} waits, but has computed tokens or blocks"
    cache = scheduler.kv.prefix_cache
    if cache is not None:
        num_at_most = scheduler.kv.num_found_at_most(seq)
        num_found = len(cache.find(seq))
        assert num_found <= num_at_most, f"{seq} finds {num_found} blocks, but its notes say {num_at_most} at most"


def check_swapped(scheduler: Scheduler, seq: Sequence) -> None:
    """Who is swapped holds blocks for exactly its computed tokens in the CPU tier, and none on the device."""
    assert seq.num_computed_tokens + seq.num_sealed_blocks + len(seq.block_table) == 0, f"{seq} is swapped and holds"
    num_blocks = scheduler.kv.num_blocks_for(seq.num_swapped_tokens)
    assert len(seq.cpu_table) == num_blocks, f"{seq} has {len(seq.cpu_table)} CPU blocks of {num_blocks}"
    # A beam may have lost its blocks to a recompute, and not come back before it was swapped.
    assert num_blocks > 0 or seq.head is not seq, f"{seq} is swapped, but has nothing in the CPU tier"
    assert not seq.is_damaged, f"{seq} is swapped, but its blocks are damaged"
    assert not seq.has_row, f"{seq} is swapped, but has a row"


def check_moving(scheduler: Scheduler, seq: Sequence) -> None:
    """Who is on its way waits for a transfer, and holds CPU blocks; device blocks, as many, only on its way in."""
    status = seq.head.status
    assert seq.head.num_transfers > 0, f"{seq} is on its way, but waits for no transfer"
    assert not seq.has_row, f"{seq} is on its way, but has a row"
    num_blocks = scheduler.kv.num_blocks_for(seq.num_swapped_tokens)
    num_device = num_blocks if status is SequenceStatus.SWAPPING_IN else 0
    assert status in (SequenceStatus.SWAPPING_IN, SequenceStatus.SWAPPING_OUT), f"{seq} is on its way"
    assert (len(seq.block_table), len(seq.cpu_table)) == (num_device, num_blocks), (
        f"{seq} is on its way with {num_blocks} blocks, but holds {len(seq.cpu_table)} in the CPU tier"
    )
