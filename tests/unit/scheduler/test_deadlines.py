"""Sequences whose time is up, in every state, and those that can't make it."""

import pytest

from scheduler import FinishReason, PreemptionMode, Scheduler, Sequence, SequenceStatus, Transfer
from tests.unit.scheduler.fake_runner import CopyFaults, Driver, generate
from tests.unit.scheduler.makers import make_scheduler, make_seq

SWAP = PreemptionMode.SWAP
DUE_S = 500.0


def pass_the_deadline(driver: Driver, seq: Sequence) -> None:
    """The next step begins when the time of `seq` is up: it ends in this step, without a token more."""
    num_before = len(driver.generated[seq.seq_id])
    driver.now = DUE_S
    driver.step()
    assert driver.ends[seq.seq_id].finish_reason is FinishReason.DEADLINE
    assert driver.ends[seq.seq_id].stats is not None
    assert seq.seq_id not in driver.num_tokens_by_id()
    assert len(driver.generated[seq.seq_id]) == num_before
    assert seq.status is SequenceStatus.FINISHED
    assert not driver.scheduler.abort(seq.seq_id)
    assert driver.scheduler.stats().num_overdue == 1


def expect_all_blocks_free(scheduler: Scheduler) -> None:
    stats = scheduler.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    assert (stats.num_running, stats.num_waiting, stats.num_swapped) == (0, 0, 0)
    assert (stats.num_used_cpu_blocks, stats.num_transfers) == (0, 0)


def test_one_that_waits_ends_at_its_deadline_without_a_token_computed() -> None:
    """A job of 50 ms behind a queue of 5 s: it costs the engine nothing."""
    driver = Driver(make_scheduler(max_num_seqs=1))
    driver.add(make_seq("long", 16, 100))
    driver.step()
    driver.add(make_seq("short of time", 16, 8, deadline_s=driver.now + 0.05))
    num_tokens = driver.runner.num_tokens
    driver.step()
    end = driver.ends["short of time"]
    assert end.finish_reason is FinishReason.DEADLINE
    assert end.stats is not None
    assert end.stats.first_scheduled_s is None
    assert driver.runner.num_tokens == num_tokens + 1
    driver.run()
    expect_all_blocks_free(driver.scheduler)


def test_one_whose_prompt_is_half_computed_ends_at_its_deadline() -> None:
    driver = Driver(make_scheduler(max_num_batched_tokens=16))
    driver.add(seq := make_seq("a", 100, 8, deadline_s=DUE_S))
    driver.step()
    assert 0 < seq.num_computed_tokens < seq.num_tokens
    pass_the_deadline(driver, seq)
    driver.run()
    expect_all_blocks_free(driver.scheduler)


def test_one_that_decodes_ends_at_its_deadline_and_what_it_has_told_stands() -> None:
    driver = Driver(make_scheduler())
    driver.add(seq := make_seq("a", 20, 50, deadline_s=DUE_S), make_seq("b", 20, 9))
    for _ in range(5):
        driver.step()
    pass_the_deadline(driver, seq)
    driver.run()
    assert driver.generated["a"] == generate("", make_seq("a", 20).token_ids, 5)
    assert driver.generated["b"] == generate("", make_seq("b", 20).token_ids, 9)
    expect_all_blocks_free(driver.scheduler)


@pytest.mark.parametrize("status", ["SWAPPING_OUT", "SWAPPED", "SWAPPING_IN", "WAITING"])
def test_a_victim_ends_at_its_deadline_wherever_it_is(status: str) -> None:
    """Both outgrow a pool of 6 blocks of 2, and b gives way. What is being copied is free when the copy has ended."""
    directions = {"SWAPPING_OUT": True, "SWAPPING_IN": False}

    def hold(transfer: Transfer) -> bool:
        return any(
            copying.transfer is transfer and copying.is_out == directions.get(status)
            for copying in driver.runner.copying
        )

    mode = PreemptionMode.RECOMPUTE if status == "WAITING" else SWAP
    scheduler = make_scheduler(
        6, 2, num_cpu_blocks=8, preemption_mode=mode, enable_prefix_caching=False, scheduling_policy="fcfs"
    )
    driver = Driver(scheduler, faults=CopyFaults(hold=hold))
    driver.add(make_seq("a", 3, 6), victim := make_seq("b", 3, 6, deadline_s=DUE_S))
    for _ in range(20):
        if victim.num_preemptions and victim.status is SequenceStatus[status]:
            break
        driver.step()
    assert victim.status is SequenceStatus[status]
    pass_the_deadline(driver, victim)
    is_moving = status in directions
    assert scheduler.kv.has_transfers == is_moving
    driver.runner.faults.hold = lambda transfer: False
    driver.run()
    assert driver.generated["a"] == generate("", make_seq("a", 3).token_ids, 6)
    expect_all_blocks_free(scheduler)


def test_the_blocks_of_one_whose_time_is_up_serve_the_next_in_the_same_step() -> None:
    driver = Driver(make_scheduler(num_blocks=4, block_size=4, enable_prefix_caching=False))
    driver.add(make_seq("a", 12, 4, deadline_s=DUE_S))
    driver.step()
    driver.add(make_seq("b", 12, 4))
    driver.step()
    assert "b" not in driver.num_tokens_by_id()
    driver.now = DUE_S
    driver.step()
    assert driver.num_tokens_by_id() == {"b": 12}


def test_what_was_complete_when_it_came_is_delivered_even_when_its_time_is_up() -> None:
    driver = Driver(make_scheduler())
    driver.add(make_seq("a", 4, 2, generated_token_ids=[7, 8], deadline_s=0.0))
    driver.step()
    assert driver.ends["a"].finish_reason is FinishReason.LENGTH


def learned(policy: str, **rest: object) -> Driver:
    """A driver whose scheduler has seen a step of 100 tokens take 0.5 s."""
    options = {"max_num_batched_tokens": 100, "scheduling_policy": policy} | rest
    driver = Driver(make_scheduler(**options))  # type: ignore[arg-type]
    driver.step_s = 0.5
    driver.add(make_seq("first", 100, 1))
    driver.step()
    return driver


def test_one_that_cannot_bring_a_token_in_time_is_dropped_before_it_costs_a_step() -> None:
    """200 tokens a second: 300 of them take 1.5 s, and 1.4 are left."""
    driver = learned("deadline")
    begin = driver.now + 1
    driver.add(make_seq("hopeless", 300, 5, deadline_s=begin + 1.4), make_seq("may do", 300, 5, deadline_s=begin + 1.6))
    driver.step()
    assert driver.ends["hopeless"].finish_reason is FinishReason.DEADLINE
    assert driver.num_tokens_by_id() == {"may do": 100}


def test_without_the_rule_the_deadline_alone_counts() -> None:
    driver = learned("fcfs")
    driver.add(make_seq("hopeless", 300, 5, deadline_s=driver.now + 2.4))
    driver.step()
    assert driver.num_tokens_by_id() == {"hopeless": 100}


def test_a_prompt_that_is_found_in_the_prefix_cache_is_not_hopeless() -> None:
    driver = learned("deadline")
    prompt = list(range(1, 301))
    driver.add(make_seq("before", prompt=prompt))
    driver.run()
    driver.add(make_seq("again", prompt=prompt, deadline_s=driver.now + 2.4))
    driver.step()
    assert driver.num_tokens_by_id() == {"again": 12}


def test_a_prompt_in_the_making_is_given_up_when_the_rest_would_take_too_long() -> None:
    """Half a second is lost before each step: with 300 of 500 tokens left 1.5 s are needed, and 1.4 are left."""
    driver = learned("deadline")
    begin = driver.now + 1
    driver.add(seq := make_seq("a", 500, 5, deadline_s=begin + 2.9))
    driver.step()
    assert not seq.is_finished
    driver.step()
    assert driver.num_tokens_by_id() == {"a": 100}
    assert driver.ends["a"].finish_reason is FinishReason.DEADLINE
    driver.run()
    expect_all_blocks_free(driver.scheduler)


def test_those_that_ended_before_their_deadline_are_forgotten() -> None:
    driver = Driver(make_scheduler())
    for number in range(400):
        driver.add(make_seq(f"s{number}", 2, 1, deadline_s=1e9))
        driver.step()
    assert len(driver.scheduler._roster.deadlines._heap) < 200
