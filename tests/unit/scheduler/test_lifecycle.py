"""How a sequence ends: by itself, by its caller, by a failure; and that nothing of it stays."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from scheduler import FinishReason, ModelRunnerOutput, SchedulerOutput, Sequence, SequenceStatus
from scheduler.invariants import check
from tests.unit.scheduler.fake_runner import Driver, generate
from tests.unit.scheduler.makers import make_scheduler, make_seq


def expect_all_blocks_back(driver: Driver) -> None:
    """The runner has heard of every end, and the pool is as it was at the start."""
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    assert (stats.num_running, stats.num_waiting, stats.num_allocated_slots) == (0, 0, 0)
    assert not driver.scheduler.has_work


def queued(driver: Driver) -> None:
    """Added, but no step since."""


def prefilling(driver: Driver) -> None:
    driver.step()
    assert 0 < driver.scheduler.running[0].num_computed_tokens < 30


def decoding(driver: Driver) -> None:
    for _ in range(5):
        driver.step()
    assert driver.scheduler.running[0].num_generated_tokens > 0


@pytest.mark.parametrize("reach", [queued, prefilling, decoding])
def test_an_abort_gives_everything_back_in_any_state(reach: Callable[[Driver], None]) -> None:
    driver = Driver(make_scheduler(num_blocks=8, max_num_batched_tokens=10))
    driver.add(make_seq("a", 30, 50))
    reach(driver)
    assert driver.scheduler.abort("a")
    check(driver.scheduler)
    assert not driver.scheduler.has_unfinished
    expect_all_blocks_back(driver)
    assert driver.ends == {}


def test_an_abort_while_preempted_gives_everything_back() -> None:
    driver = Driver(make_scheduler(num_blocks=6, block_size=2))
    driver.add(make_seq("a", 3, 6), victim := make_seq("b", 3, 6))
    while victim.num_preemptions == 0:
        driver.step()
    assert driver.scheduler.abort("b")
    check(driver.scheduler)
    expect_all_blocks_back(driver)
    assert list(driver.ends) == ["a"]


@pytest.mark.parametrize("num_steps", [0, 1, 3, 6])
def test_an_abort_between_schedule_and_update_is_safe(num_steps: int) -> None:
    driver = Driver(make_scheduler(num_blocks=8, max_num_batched_tokens=10))
    driver.add(make_seq("a", 30, 50), make_seq("b", 5, 9))
    for _ in range(num_steps):
        driver.step()

    def abort(output: SchedulerOutput) -> None:
        assert "a" in output.chunks.seq_ids
        assert driver.scheduler.abort("a")

    outputs = driver.step(between=abort)
    assert "a" not in {output.seq_id for output in outputs}
    expect_all_blocks_back(driver)
    assert list(driver.ends) == ["b"]


def test_an_id_that_comes_again_while_its_aborted_step_runs_is_another_sequence() -> None:
    driver = Driver(make_scheduler())
    driver.add(make_seq("a", prompt=[1, 2, 3], max_tokens=5))
    again = make_seq("a", prompt=[7, 8], max_tokens=5)

    def replace(output: SchedulerOutput) -> None:
        driver.scheduler.abort("a")
        driver.scheduler.add(again)

    assert driver.step(between=replace) == []
    driver.run()
    assert driver.generated["a"] == generate("", [7, 8], 5)


def test_an_abort_at_the_very_start_twice_and_of_an_unknown_id_is_answered_not_raised() -> None:
    driver = Driver(make_scheduler())
    assert not driver.scheduler.abort("never added")
    seq = make_seq("a")
    driver.add(seq)
    assert driver.scheduler.abort("a")
    assert seq.status is SequenceStatus.FINISHED
    assert seq.finish_reason is FinishReason.ABORTED
    assert not driver.scheduler.abort("a")
    assert not driver.scheduler.has_work, "no row was made, so none is to be removed"
    driver.add(make_seq("b", max_tokens=1))
    driver.run()
    assert not driver.scheduler.abort("b"), "it has ended by itself"


def test_the_runner_hears_of_the_last_end_in_a_step_without_chunks() -> None:
    driver = Driver(make_scheduler())
    driver.add(make_seq("a", max_tokens=1))
    driver.step()
    assert not driver.scheduler.has_unfinished
    assert driver.scheduler.has_work
    assert driver.step() == []
    assert driver.last_output == SchedulerOutput(step=2, removed_ids=("a",))
    assert not driver.scheduler.has_work


def test_a_sequence_ends_at_eos_at_a_stop_token_or_at_its_length() -> None:
    """Each draws the same tokens; what they are told to end at differs."""
    tokens = generate("", [3, 1, 4], 12)
    eos, stop = tokens[7], tokens[4]
    assert eos not in tokens[:7]
    assert stop not in tokens[:4]
    table: list[tuple[str, FinishReason, int, dict[str, Any]]] = [
        # name,     ends with, after, told
        ("eos", FinishReason.EOS, 8, {}),
        ("stop", FinishReason.STOP, 5, {"stop_token_ids": (stop,)}),
        ("length", FinishReason.LENGTH, 3, {"max_tokens": 3}),
        ("both", FinishReason.EOS, 8, {"stop_token_ids": (eos,), "max_tokens": 8}),
        ("ignore", FinishReason.LENGTH, 12, {"ignore_eos": True, "max_tokens": 12}),
        ("ignore and stop", FinishReason.STOP, 8, {"ignore_eos": True, "stop_token_ids": (eos,)}),
    ]
    driver = Driver(make_scheduler(eos_token_ids=frozenset({eos})))
    for name, _, _, told in table:
        driver.add(make_seq(name, prompt=[3, 1, 4], **{"max_tokens": 40, **told}))
    driver.run()
    for name, reason, num_tokens, _ in table:
        assert driver.ends[name].finish_reason is reason, name
        assert driver.generated[name] == tokens[:num_tokens], name


def test_a_failed_row_ends_with_an_error_and_its_neighbours_go_on() -> None:
    driver = Driver(make_scheduler())
    driver.add(make_seq("good", prompt=list(range(40))), bad := make_seq("bad", prompt=[7] * 40))
    driver.step()
    driver.step(failing={"bad": "all logits are NaN"})
    end = driver.ends["bad"]
    assert (end.finish_reason, end.error, end.new_token_ids) == (FinishReason.ERROR, "all logits are NaN", ())
    assert end.stats is not None
    assert end.stats.num_generated_tokens == 1
    assert driver.scheduler.kv.find_prefix(make_seq("again", prompt=[7] * 40)) == [], "its blocks can't be trusted"
    assert bad.finish_reason is FinishReason.ERROR
    driver.run()
    assert driver.generated["good"] == generate("", range(40), 8)


def test_a_chunk_in_the_middle_of_a_prompt_can_fail_too() -> None:
    driver = Driver(make_scheduler(max_num_batched_tokens=20))
    driver.add(make_seq("a", 100))
    driver.step()
    driver.step(failing={"a": "the device is out of memory"})
    assert driver.ends["a"].finish_reason is FinishReason.ERROR
    expect_all_blocks_back(driver)


def test_a_resumed_sequence_goes_on_where_its_earlier_run_was_cut() -> None:
    tokens = generate("", [3, 1, 4], 12)
    driver = Driver(make_scheduler())
    driver.add(make_seq("a", prompt=[3, 1, 4], generated_token_ids=tokens[:5], max_tokens=12))
    driver.step()
    assert driver.num_tokens_by_id() == {"a": 8}
    driver.run()
    assert driver.generated["a"] == tokens[5:]
    end = driver.ends["a"].stats
    assert end is not None
    assert (end.num_prompt_tokens, end.num_generated_tokens, end.num_recomputed_tokens) == (3, 12, 0)


@pytest.mark.parametrize(
    ("generated", "reason"),
    [
        ([5, 6], FinishReason.LENGTH),
        ([5, 6, 7], FinishReason.LENGTH),
        ([9], FinishReason.EOS),
        ([8], FinishReason.STOP),
    ],
)
def test_a_resumed_sequence_that_lacks_nothing_ends_without_computing(
    generated: list[int], reason: FinishReason
) -> None:
    """The crash may have come between the last token and the end."""
    driver = Driver(make_scheduler(eos_token_ids=frozenset({9})))
    driver.add(make_seq("a", generated_token_ids=generated, max_tokens=2, stop_token_ids=(8,)))
    check(driver.scheduler)
    assert driver.scheduler.has_work
    (end,) = driver.step()
    assert (end.seq_id, end.new_token_ids, end.finish_reason) == ("a", (), reason)
    assert driver.runner.num_tokens == 0
    assert not driver.scheduler.has_work


def test_a_resumed_sequence_that_lacks_nothing_can_be_aborted() -> None:
    driver = Driver(make_scheduler())
    driver.add(make_seq("a", generated_token_ids=[1], max_tokens=1))
    assert driver.scheduler.abort("a")
    assert not driver.scheduler.has_work


def test_a_whole_prompt_repeated_and_preempted_computes_at_least_a_token_each_time() -> None:
    """Prompts of exactly k blocks, twice, then preempted and resumed out of their own cached blocks."""
    driver = Driver(make_scheduler(num_blocks=8, block_size=4))
    prompt = list(range(8))
    driver.add(first := make_seq("first", prompt=prompt, max_tokens=12))
    driver.step()
    driver.add(second := make_seq("second", prompt=prompt, max_tokens=12))
    driver.step()
    assert driver.num_tokens_by_id()["second"] == 4, "of the hit on both blocks, the second is computed again"
    driver.add(third := make_seq("third", prompt=prompt[::-1], max_tokens=12))
    driver.run()
    assert driver.scheduler.stats().num_preemptions_recompute > 0
    for seq in (first, second):
        assert driver.generated[seq.seq_id] == generate("", prompt, 12)
    assert driver.generated[third.seq_id] == generate("", prompt[::-1], 12)


def test_the_same_prompt_of_another_tenant_has_no_cached_tokens() -> None:
    prompt = list(range(40))
    driver = Driver(make_scheduler(), root_of=lambda seq_id: seq_id[0])
    driver.add(make_seq("a1", prompt=prompt, tenant="a"))
    driver.run()
    driver.add(make_seq("b1", prompt=prompt, tenant="b"), make_seq("a2", prompt=prompt, tenant="a"))
    driver.run()
    num_cached = {seq_id: end.stats.num_cached_tokens for seq_id, end in driver.ends.items() if end.stats is not None}
    assert num_cached == {"a1": 0, "b1": 0, "a2": 32}


def test_times_are_those_that_were_passed_in() -> None:
    driver = Driver(make_scheduler(max_num_seqs=1, max_num_batched_tokens=16))
    driver.add(make_seq("a", 16, 2, arrival_s=0.25), make_seq("b", 32, 2, arrival_s=0.5))
    driver.run()
    times = {}
    for seq_id, end in driver.ends.items():
        assert end.stats is not None
        times[seq_id] = (
            end.stats.arrival_s,
            end.stats.first_scheduled_s,
            end.stats.first_token_s,
            end.stats.finished_s,
        )
    assert times == {"a": (0.25, 1.0, 1.0, 2.0), "b": (0.5, 3.0, 4.0, 5.0)}


def test_a_finished_sequence_leaves_nothing_behind() -> None:
    driver = Driver(make_scheduler(num_blocks=8, max_num_batched_tokens=10))
    refs: list[weakref.ref[Sequence]] = []
    gc.disable()
    try:
        for number in range(20):
            driver.add(seq := make_seq(f"s{number}", 30, 3))
            refs.append(weakref.ref(seq))
            del seq
            if number % 4 == 0:
                driver.step()
                driver.scheduler.abort(f"s{number}")
        driver.run()
        assert [ref for ref in refs if ref() is not None] == [], "freed by reference counts alone, with no cycle left"
    finally:
        gc.enable()


def test_a_step_is_updated_once_and_before_the_next() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_seq("a"))
    output = scheduler.schedule(0.0)
    with pytest.raises(AssertionError, match="step 1 was scheduled, but never updated"):
        scheduler.schedule(0.0)
    scheduler.update(output, ModelRunnerOutput({"a": 1}), 0.0)
    with pytest.raises(AssertionError, match="step 1 is updated twice"):
        scheduler.update(output, ModelRunnerOutput({"a": 1}), 0.0)
