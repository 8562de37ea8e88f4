"""Full blocks of likely victims lie in the CPU tier before they are victims."""

import random
from typing import Any

import pytest

from scheduler import (
    CacheConfig,
    PreemptionMode,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    SchedulerStats,
    Sequence,
    SequenceStatus,
    Transfer,
    TransferResult,
)
from scheduler.block_pool import Block
from scheduler.errors import InvalidConfigError
from scheduler.kv_cache_manager import KVCacheManager
from scheduler.swap_tier import SwapTier
from scheduler.write_behind import MAX_ADMITTED, MAX_WAITS, WriteBehind
from tests.unit.scheduler.fake_runner import CopyFaults, Driver, generate
from tests.unit.scheduler.makers import make_scheduler, make_seq
from tests.unit.scheduler.test_pressure import BLOCK_SIZE, made_trace

SWAP = PreemptionMode.SWAP


def pressed(write_behind: int, delay: int = 0, num_cpu_blocks: int = 2_000, **rest: Any) -> Driver:
    """A driver for the trace of test_pressure whose pool holds about half of it."""
    config = SchedulerConfig(
        1_000, max_num_batched_tokens=256, preemption_mode=SWAP, write_behind_blocks=write_behind, **rest
    )
    cache = CacheConfig(250, BLOCK_SIZE, num_cpu_blocks, kv_block_bytes=BLOCK_SIZE)
    return Driver(Scheduler(config, cache), faults=CopyFaults(random.Random(1), delay))


def two(num_cpu_blocks: int = 8, **rest: Any) -> tuple[Driver, Sequence]:
    """A pool of 8 blocks of 2, where b gives way to a when both have grown; a step writes up to 4 blocks behind."""
    options: dict[str, Any] = {"write_behind_blocks": 4, "preemption_mode": SWAP} | rest
    driver = Driver(make_scheduler(8, 2, num_cpu_blocks=num_cpu_blocks, **options))
    driver.add(make_seq("a", 3, 10), victim := make_seq("b", 3, 10))
    return driver, victim


def copied_in_last_step(driver: Driver) -> int:
    assert driver.last_output is not None
    return driver.last_output.num_swapped_blocks[0]


def copies_of_victims(driver: Driver) -> list[tuple[int, int]]:
    """Serve the trace; for each victim that was copied the tokens it had generated, and the blocks that this took."""
    copied: list[tuple[int, int]] = []

    def note(output: SchedulerOutput) -> None:
        swap = driver.scheduler.kv.swap
        assert swap is not None
        for transfer in output.swap_outs:
            victims = swap.flights[transfer.transfer_id].waiting
            copied.extend((seq.num_generated_tokens, len(transfer.copies)) for seq in victims)

    trace = made_trace(seed=20260301)
    for number, arrival in enumerate(trace):
        driver.add(make_seq(f"{number}", prompt=arrival.prompt, max_tokens=arrival.num_new_tokens, ignore_eos=True))
    while driver.scheduler.has_work:
        driver.step(between=note)
    for number, arrival in enumerate(trace):
        assert driver.generated[f"{number}"] == generate("", arrival.prompt, arrival.num_new_tokens)
    return copied


def test_preempting_one_that_decodes_costs_at_most_one_block_s_copy() -> None:
    """What a step has filled is written behind in the next one, so only who has just come may cost more."""
    behind, plain = pressed(write_behind=1_000), pressed(write_behind=0)
    copied, copied_without = copies_of_victims(behind), copies_of_victims(plain)
    assert len(copied) > 10
    assert max(num_blocks for num_generated, num_blocks in copied if num_generated > 1) == 1
    assert sum(num_blocks for _, num_blocks in copied_without) > 3 * len(copied_without)
    stats, without = behind.scheduler.stats(), plain.scheduler.stats()
    assert stats.written_behind_bytes == stats.num_written_behind_blocks * BLOCK_SIZE > 0
    assert without.num_written_behind_blocks == without.written_behind_bytes == 0
    assert stats.num_recomputed_tokens == 0


def test_blocks_of_several_victims_that_are_written_behind_in_one_step_are_one_transfer() -> None:
    driver = Driver(make_scheduler(24, 2, num_cpu_blocks=24, write_behind_blocks=9, preemption_mode=SWAP))
    driver.add(*[make_seq(name, 8, 10) for name in "abcd"])
    sizes: list[list[int]] = []
    num_victims = 0

    def note(output: SchedulerOutput) -> None:
        nonlocal num_victims
        sizes.append([len(transfer.copies) for transfer in output.swap_outs])
        sources = {copy.src for transfer in output.swap_outs for copy in transfer.copies}
        tables = [{*seq.block_table.block_ids()} for seq in driver.scheduler.running]
        num_victims = max(num_victims, sum(not sources.isdisjoint(table) for table in tables))

    while driver.scheduler.stats().num_preemptions_swap == 0:
        driver.step(between=note)
    assert num_victims > 1
    assert max(len(transfers) for transfers in sizes[:-1]) == 1
    driver.run()
    for name in "abcd":
        assert driver.generated[name] == generate("", make_seq(name, 8).token_ids, 10)


@pytest.mark.parametrize("budget", [1, 3])
def test_a_step_writes_no_more_behind_than_its_budget_and_only_while_the_link_is_idle(budget: int) -> None:
    driver = pressed(budget, delay=3)
    scheduler = driver.scheduler
    for number, arrival in enumerate(made_trace(seed=5, num_arrivals=40)):
        driver.add(make_seq(f"{number}", prompt=arrival.prompt, max_tokens=arrival.num_new_tokens, ignore_eos=True))
    while scheduler.has_work:
        before = scheduler.stats()
        driver.step(between=lambda output, before=before: check_step(driver, before, budget))  # type: ignore[misc]
    assert scheduler.stats().num_written_behind_blocks > 0


def check_step(driver: Driver, before: SchedulerStats, budget: int) -> None:
    num_written = driver.scheduler.stats().num_written_behind_blocks - before.num_written_behind_blocks
    assert num_written <= budget
    assert num_written == 0 or before.num_transfers == 0


@pytest.mark.parametrize(
    "off",
    [
        {"write_behind_blocks": 0},
        {"preemption_mode": PreemptionMode.RECOMPUTE},
        {"enable_prefix_caching": False},
        {"num_cpu_blocks": 0, "preemption_mode": PreemptionMode.AUTO},
    ],
)
def test_nothing_is_written_behind_where_it_is_off_or_of_no_use(off: dict[str, Any]) -> None:
    driver, _ = two(**off)
    driver.run()
    assert driver.scheduler.stats().num_written_behind_blocks == 0


def test_nothing_is_written_while_blocks_suffice_for_all_to_grow() -> None:
    driver = Driver(make_scheduler(500, 2, num_cpu_blocks=500, write_behind_blocks=9, preemption_mode=SWAP))
    driver.add(make_seq("a", 30, 10), make_seq("b", 30, 10))
    driver.run()
    assert driver.scheduler.stats().num_written_behind_blocks == 0


def test_a_victim_whose_blocks_are_being_written_waits_for_them() -> None:
    driver, victim = two()
    begun: list[Transfer] = []

    def hold(transfer: Transfer) -> bool:
        begun.append(transfer)
        return True

    driver.runner.faults.hold = hold
    while not begun:
        driver.step()
    assert driver.scheduler.preempt("b")
    assert victim.status is SequenceStatus.SWAPPING_OUT
    driver.runner.faults.hold = lambda transfer: transfer.transfer_id == begun[0].transfer_id
    driver.step()
    driver.step()
    assert victim.status is SequenceStatus.SWAPPING_OUT
    driver.runner.faults.hold = lambda transfer: False
    driver.run()
    assert driver.generated["b"] == generate("", make_seq("b", 3).token_ids, 10)


@pytest.mark.parametrize("end", ["abort", "fail"])
def test_blocks_of_one_that_ends_are_free_when_they_have_been_written(end: str) -> None:
    driver, _ = two()
    driver.runner.faults.hold = lambda transfer: True
    while not driver.scheduler.kv.has_transfers:
        driver.step()
    num_leaving = len(next(iter(driver.scheduler.kv.swap.flights.values())).device)  # type: ignore[union-attr]
    if end == "abort":
        driver.scheduler.abort("b")
    else:
        driver.step(failing={"b": "no number to choose from"})
    assert driver.scheduler.kv.num_leaving_blocks == num_leaving > 0
    driver.runner.faults.hold = lambda transfer: False
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    assert stats.num_used_cpu_blocks == 0


def test_a_tier_of_two_blocks_writes_each_block_at_most_once_and_the_link_comes_to_rest() -> None:
    driver, victim = two(num_cpu_blocks=2)
    num_idle = 0
    for _ in range(6):
        driver.step()
        num_idle += copied_in_last_step(driver) == 0
    assert victim.status is SequenceStatus.RUNNING
    assert driver.scheduler.stats().num_written_behind_blocks == 2
    assert num_idle >= 4
    driver.run()
    assert driver.generated["b"] == generate("", make_seq("b", 3).token_ids, 10)


def test_a_copy_that_found_no_memory_is_not_relied_on() -> None:
    driver, victim = two()
    driver.runner.faults.p_no_memory = 1.0
    while not driver.scheduler.stats().num_written_behind_blocks:
        driver.step()
    driver.runner.faults.p_no_memory = 0.0
    driver.run()
    assert victim.num_preemptions > 0
    for name in ("a", "b"):
        assert driver.generated[name] == generate("", make_seq(name, 3).token_ids, 10)


def decoding(*names: str) -> Scheduler:
    """They decode, with three full blocks each, none of which was written behind; the first alone may want them all."""
    driver = Driver(make_scheduler(36, 2, num_cpu_blocks=80, write_behind_blocks=0, preemption_mode=SWAP))
    driver.add(*[make_seq(name, 6, 66, ignore_eos=True) for name in names])
    driver.step()
    return driver.scheduler


def test_a_step_that_admits_many_leaves_the_writing_to_a_later_one_a_few_times_in_a_row_at_most() -> None:
    scheduler = decoding(*"abcdef")
    behind = WriteBehind(scheduler.kv, 4)
    numbers = []
    for _ in range(MAX_WAITS + 1):
        behind.begin(scheduler.running, MAX_ADMITTED + 1)
        numbers.append(scheduler.stats().num_written_behind_blocks)
    assert numbers == [*[0] * MAX_WAITS, 4]


def test_a_step_writes_blocks_of_the_likeliest_victims_only_and_the_next_goes_on() -> None:
    scheduler = decoding(*"abcdef")
    behind = WriteBehind(scheduler.kv, 80)
    behind.begin(scheduler.running, MAX_ADMITTED)
    assert "".join(seq.seq_id for seq in scheduler.running if seq.num_written_blocks == 3) == "cdef"
    ended = [TransferResult(transfer.transfer_id) for transfer in scheduler.kv.take_transfers()[0]]
    for result in ended:
        scheduler.kv.end_transfer(result)
    behind.begin(scheduler.running, 0)
    assert "".join(seq.seq_id for seq in scheduler.running if seq.num_written_blocks == 3) == "bcdef"


def written(num_full: int) -> tuple[SwapTier, Sequence, list[int]]:
    """A tier in which the first blocks of a sequence of 40 tokens lie; the tier, and the ids of these blocks."""
    kv = KVCacheManager(CacheConfig(30, 2, 30))
    seq = make_seq("a", 40)
    kv.take_prefix(seq, kv.find_prefix(seq))
    assert kv.allocate_slots(seq, 40) is not None
    seq.num_computed_tokens = 40
    assert kv.swap is not None
    assert kv.swap.write_behind(seq, num_full, 99) == num_full
    finish(kv.swap)
    return kv.swap, seq, [block.block_id for block in found(kv.swap, seq)]


def finish(swap: SwapTier) -> None:
    swap.begin_write_behind()
    for transfer in swap.take_transfers()[0]:
        swap.end(TransferResult(transfer.transfer_id))


def found(swap: SwapTier, seq: Sequence) -> list[Block]:
    assert swap.index is not None
    return swap.index.find(seq)


def lose(swap: SwapTier, block_id: int) -> None:
    """Somebody else gets a block of the tier."""
    content = swap.pool.blocks[block_id].content
    assert swap.index is not None and content is not None  # noqa: PT018
    swap.index.evict(content)
    swap.pool.drop_content(swap.pool.blocks[block_id])


@pytest.mark.parametrize(
    ("lost", "num_before", "num_now", "num_copied"),
    [
        ([], 5, 6, 1),
        ([], 5, 8, 3),
        ([4], 5, 6, 2),
        ([2], 5, 6, 1),
        ([2], 5, 8, 6),
        ([0, 1, 2, 3, 4], 5, 7, 7),
    ],
    ids=["goes on", "and on", "the last is lost", "another is lost", "which is seen later", "all are lost"],
)
def test_what_was_written_is_written_on_behind_its_last_block_and_looked_up_now_and_then(
    lost: list[int], num_before: int, num_now: int, num_copied: int
) -> None:
    swap, seq, block_ids = written(num_before)
    assert len(block_ids) == num_before
    for index in lost:
        lose(swap, block_ids[index])
    assert swap.write_behind(seq, num_now, 99) == num_copied
    finish(swap)
    num_found = lost[0] if lost and num_copied < num_now - lost[0] else num_now
    assert len(found(swap, seq)) == num_found


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="write_behind_blocks is -1"):
        SchedulerConfig(100, write_behind_blocks=-1)
