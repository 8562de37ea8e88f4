"""A step begins to copy no more than its share, so that a long sequence's swap holds nobody up."""

from typing import Any

import pytest

from scheduler import CacheConfig, PreemptionMode, SequenceStatus, Transfer
from scheduler.copy_queue import CopyQueue
from scheduler.errors import InvalidConfigError
from scheduler.output import BlockCopy
from tests.unit.scheduler.fake_runner import Driver, generate
from tests.unit.scheduler.makers import make_scheduler, make_seq

BLOCK_SIZE = 2


def pressed(step_blocks: int, **rest: Any) -> Driver:
    """Blocks of 2: "short" decodes, and "long", of 10 blocks, has to give way in the end."""
    options: dict[str, Any] = {"preemption_mode": PreemptionMode.SWAP, "enable_prefix_caching": False} | rest
    scheduler = make_scheduler(16, BLOCK_SIZE, num_cpu_blocks=16, swap_step_blocks=step_blocks, **options)
    driver = Driver(scheduler)
    driver.add(make_seq("short", 4, 20), make_seq("long", 19, 10))
    while driver.scheduler.stats().num_preemptions_swap == 0:
        driver.step()
    return driver


def copies_of(driver: Driver) -> tuple[int, int]:
    assert driver.last_output is not None
    return driver.last_output.num_swapped_blocks


def test_a_long_victim_leaves_in_several_steps_and_the_other_decodes_in_each_of_them() -> None:
    driver = pressed(step_blocks=4)
    long = next(iter(driver.scheduler.moving.values()))
    num_blocks = len(long.cpu_table)
    assert num_blocks > 8
    copied = [copies_of(driver)[0]]
    while long.status is SequenceStatus.SWAPPING_OUT:
        assert len(driver.step()) == 1
        copied.append(copies_of(driver)[0])
    assert copied[:-1] == [4, 4]
    assert sum(copied) == num_blocks
    driver.run()
    for seq_id, num_prompt, num_new in (("short", 4, 20), ("long", 19, 10)):
        assert driver.generated[seq_id] == generate("", make_seq(seq_id, num_prompt).token_ids, num_new)
    assert driver.scheduler.stats().num_recomputed_tokens == 0


def test_each_piece_frees_its_blocks_when_it_has_ended_not_when_all_have() -> None:
    driver = pressed(step_blocks=4)
    kv = driver.scheduler.kv
    num_leaving = [kv.num_leaving_blocks]
    while kv.has_transfers:
        driver.step()
        num_leaving.append(kv.num_leaving_blocks)
    assert num_leaving == [num_leaving[0] - 4 * index for index in range(len(num_leaving) - 1)] + [0]


def test_the_tail_leaves_first_so_that_the_head_of_a_prompt_stays_in_the_cache_longest() -> None:
    driver = pressed(step_blocks=4, enable_prefix_caching=True)
    swap = driver.scheduler.kv.swap
    assert swap is not None
    long = next(iter(driver.scheduler.moving.values()))
    places = {block.block_id: place for place, block in enumerate(long.cpu_table)}
    left = [[places[block.block_id] for block in flight.cpu] for flight in swap.flights.values()]
    assert [*sorted(left, reverse=True)] == left
    assert min(min(each) for each in left) == 0


def test_one_that_comes_back_in_several_steps_runs_when_all_is_there() -> None:
    driver = pressed(step_blocks=3)
    copied = []
    while driver.scheduler.has_work:
        driver.step()
        copied.append(copies_of(driver)[1])
    assert max(copied) == 3
    assert sum(copied) == driver.scheduler.stats().num_swapped_in_blocks > 6


@pytest.mark.parametrize("status", [SequenceStatus.SWAPPING_OUT, SequenceStatus.SWAPPING_IN])
def test_an_abort_between_two_pieces_leaves_nothing_behind(status: SequenceStatus) -> None:
    driver = pressed(step_blocks=3)
    while not any(seq.status is status for seq in driver.scheduler.moving.values()):
        driver.step()
    assert driver.scheduler.abort("long")
    assert driver.scheduler.kv.has_transfers
    driver.run()
    assert driver.generated["short"] == generate("", make_seq("short", 4).token_ids, 20)
    stats = driver.scheduler.stats()
    assert (stats.num_free_blocks + stats.num_cached_blocks, stats.num_used_cpu_blocks) == (16, 0)


def test_without_a_limit_a_victim_leaves_in_one_step() -> None:
    driver = pressed(step_blocks=0)
    assert copies_of(driver)[0] > 8
    assert not driver.scheduler.kv.has_transfers


def transfer(number: int, num_blocks: int) -> Transfer:
    return Transfer(number, tuple(BlockCopy(index, index) for index in range(num_blocks)))


@pytest.mark.parametrize(
    ("max_blocks", "taken"),
    [(0, [[1, 2, 3, 4]]), (4, [[1], [2, 3], [4]]), (5, [[1], [2, 3], [4]]), (9, [[1, 2, 3], [4]])],
)
def test_copies_wait_in_their_order_and_small_ones_share_a_step(max_blocks: int, taken: list[list[int]]) -> None:
    queue = CopyQueue(max_blocks)
    for number, num_blocks in enumerate((4, 2, 2, 4), start=1):
        queue.add(transfer(number, num_blocks))
    found = []
    while len(queue):
        found.append([each.transfer_id for each in queue.take()])
    assert found == taken
    assert (queue.num_blocks, queue.take()) == (0, ())


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="swap_step_blocks is -1"):
        CacheConfig(10, swap_step_blocks=-1)
