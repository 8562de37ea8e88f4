"""The checker itself: each kind of damage is seen, and told with its numbers."""

from collections.abc import Callable

import pytest

from scheduler import Scheduler, SequenceStatus
from scheduler.invariants import check
from tests.unit.scheduler.fake_runner import Driver
from tests.unit.scheduler.makers import make_scheduler, make_seq


def leak_a_block(scheduler: Scheduler) -> None:
    scheduler.kv.pool.allocate(1)


def share_a_partial_block(scheduler: Scheduler) -> None:
    last = scheduler.running[0].block_table[2]
    scheduler.kv.pool.touch([last])
    scheduler.running[1].block_table.append([last])


def free_an_owned_block(scheduler: Scheduler) -> None:
    scheduler.kv.pool.free([scheduler.running[0].block_table[0]])


def hoard_a_block(scheduler: Scheduler) -> None:
    blocks = scheduler.kv.pool.allocate(2)
    assert blocks is not None
    scheduler.running[0].block_table.append(blocks)


def lose_a_cached_content(scheduler: Scheduler) -> None:
    scheduler.running[0].block_table[0].content = None


def queue_twice(scheduler: Scheduler) -> None:
    scheduler.running.add(scheduler.running[0])


def drop_out_of_the_queue(scheduler: Scheduler) -> None:
    scheduler.waiting.remove(next(iter(scheduler.waiting)))


def compute_too_much(scheduler: Scheduler) -> None:
    scheduler.running[0].num_computed_tokens += 2


def wait_with_computed_tokens(scheduler: Scheduler) -> None:
    next(iter(scheduler.waiting)).num_computed_tokens = 4


def run_under_a_wrong_name(scheduler: Scheduler) -> None:
    scheduler.running[0].status = SequenceStatus.SWAPPED


def miscount_free_blocks(scheduler: Scheduler) -> None:
    scheduler.kv.pool.num_free += 1


def miscount_cached_blocks(scheduler: Scheduler) -> None:
    scheduler.kv.pool.num_free_cached += 1


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (leak_a_block, r"\d+ free \+ 6 owned \+ 0 cached blocks are not 20"),
        (share_a_partial_block, r"Block\(2, ref_cnt=2.* is block 2 of .*a, RUNNING.*: shared, but not full"),
        (free_an_owned_block, "blocks are not 20"),
        (hoard_a_block, r"a, RUNNING, 10 of 11 tokens computed, 5 blocks\) has blocks for 20 tokens"),
        (lose_a_cached_content, "the prefix cache leads to"),
        (queue_twice, "is in 2 block tables"),
        (drop_out_of_the_queue, "2 running .* 0 waiting .* but 3 are unfinished"),
        (compute_too_much, "12 of 11 tokens computed.* goes beyond"),
        (wait_with_computed_tokens, "c, WAITING, 4 of 4 tokens computed.* waits, but"),
        (run_under_a_wrong_name, "a, SWAPPED.* is in the running queue"),
        (miscount_free_blocks, r"14 blocks are in the free list, 15 are counted"),
        (miscount_cached_blocks, r"0 free blocks are cached, 1 counted"),
    ],
)
def test_damage_is_seen(damage: Callable[[Scheduler], None], words: str) -> None:
    driver = Driver(make_scheduler(num_blocks=20, block_size=4, max_num_seqs=2))
    driver.add(make_seq("a", 10), make_seq("b", 9), make_seq("c", 4))
    driver.step()
    check(driver.scheduler)
    damage(driver.scheduler)
    with pytest.raises(AssertionError, match=words):
        check(driver.scheduler)


def test_blocks_owned_by_nobody_are_seen_when_idle() -> None:
    driver = Driver(make_scheduler(num_blocks=20))
    check(driver.scheduler)
    driver.scheduler.kv.pool.allocate(1)
    with pytest.raises(AssertionError, match=r"19 free \+ 0 owned \+ 0 cached blocks are not 20"):
        check(driver.scheduler)
