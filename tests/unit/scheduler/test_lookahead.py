"""A step that is decided before the outcome of the one before it is known: step by step, what stands where."""

from typing import Any

import pytest

from scheduler import FinishReason, ModelRunnerOutput, PreemptionMode, SamplingParams, Scheduler, Sequence
from scheduler.family import Family
from scheduler.invariants import check
from scheduler.lookahead import Wait
from scheduler.output import SchedulerOutput, SequenceOutput
from scheduler.sequence import PLACEHOLDER, SequenceStatus
from tests.unit.chunks import chunk_rows
from tests.unit.scheduler.fake_runner import Driver, Lookahead, generate
from tests.unit.scheduler.makers import make_scheduler, make_seq

EOS = 7


def ahead_of(scheduler: Scheduler, now: float = 0.0) -> SchedulerOutput:
    """The next step, which can be decided."""
    output = scheduler.try_schedule_ahead(now)
    check(scheduler)
    assert output is not None, scheduler.lookahead.num_waits
    return output


def updated(
    scheduler: Scheduler, output: SchedulerOutput, sampled: dict[str, int], failed: dict[str, str] | None = None
) -> list[SequenceOutput]:
    outputs = scheduler.update(output, ModelRunnerOutput(sampled, failed or {}), 0.0)
    check(scheduler)
    return outputs


def begun(*seqs: Sequence, **sizes: Any) -> tuple[Scheduler, SchedulerOutput]:
    """A scheduler and its first step, which is in flight."""
    scheduler = make_scheduler(block_size=4, eos_token_ids=frozenset({EOS}), **sizes)
    for seq in seqs:
        scheduler.add(seq)
    return scheduler, scheduler.schedule(0.0)


def test_a_token_that_is_being_drawn_counts_as_known_until_it_is() -> None:
    seq = make_seq("a", 6)
    scheduler, first = begun(seq)
    assert chunk_rows(first.chunks) == [("a", 0, 6, True)]
    second = ahead_of(scheduler)
    assert chunk_rows(second.chunks) == [("a", 6, 1, True)]
    assert (seq.num_computed_tokens, seq.num_in_flight_tokens, seq.num_settled_tokens) == (6, 6, 0)
    assert (seq.num_tokens, seq.token_ids[-1]) == (7, PLACEHOLDER)
    assert scheduler.stats().num_running == 1
    (told,) = updated(scheduler, first, {"a": 40})
    assert told == SequenceOutput("a", (40,))
    assert (seq.num_computed_tokens, seq.num_in_flight_tokens, seq.generated_token_ids) == (6, 0, [40])
    third = ahead_of(scheduler)
    assert chunk_rows(third.chunks) == [("a", 7, 1, True)]
    assert seq.generated_token_ids == [40, PLACEHOLDER]
    updated(scheduler, second, {"a": 41})
    updated(scheduler, third, {"a": 42})
    assert seq.generated_token_ids == [40, 41, 42]


def test_a_piece_of_a_prompt_is_followed_by_the_next_piece() -> None:
    scheduler, first = begun(make_seq("a", 10), max_num_batched_tokens=4)
    second = ahead_of(scheduler)
    assert chunk_rows(second.chunks) == [("a", 4, 4, False)]
    assert updated(scheduler, first, {}) == []
    third = ahead_of(scheduler)
    assert chunk_rows(third.chunks) == [("a", 8, 2, True)]


def test_blocks_are_entered_into_the_prefix_cache_when_the_outcome_is_known() -> None:
    seq = make_seq("a", 8)
    scheduler, first = begun(seq)
    ahead_of(scheduler)
    assert (seq.num_sealed_blocks, len(scheduler.kv.prefix_cache or ())) == (0, 0)
    updated(scheduler, first, {"a": 40})
    assert (seq.num_sealed_blocks, len(scheduler.kv.prefix_cache or ())) == (2, 2)


def test_who_ends_by_a_token_has_one_row_for_nothing_and_its_blocks_are_free_for_the_step_after() -> None:
    """No block of it is in another's table as long as the step with that row was not begun."""
    seq = make_seq("a", 6)
    scheduler, first = begun(seq, make_seq("b", 6), num_blocks=6)
    held = set(seq.block_table.block_ids())
    second = ahead_of(scheduler)
    (a, b) = updated(scheduler, first, {"a": EOS, "b": 40})
    assert (a.finish_reason, a.new_token_ids, b.finish_reason) == (FinishReason.EOS, (EOS,), None)
    assert a.stats is not None
    assert a.stats.num_generated_tokens == 1
    scheduler.add(make_seq("c", 6))
    third = ahead_of(scheduler)
    assert second.chunks.seq_ids == ("a", "b")
    assert (third.removed_ids, [row.seq_id for row in third.new_rows]) == (("a",), ["c"])
    assert held & set(third.new_rows[0].block_ids)
    (told,) = updated(scheduler, second, {"a": 9, "b": 41})
    assert told.seq_id == "b"
    assert seq.generated_token_ids == [EOS]


def test_a_step_that_was_not_begun_is_made_without_those_that_have_ended() -> None:
    scheduler, first = begun(make_seq("a", 6), make_seq("b", 6))
    second = ahead_of(scheduler)
    updated(scheduler, first, {"a": EOS, "b": 40})
    second = scheduler.without_ended(second)
    assert chunk_rows(second.chunks) == [("b", 6, 1, True)]
    (told,) = updated(scheduler, second, {"b": 41})
    assert told == SequenceOutput("b", (41,))


def test_who_draws_its_last_token_is_not_scheduled_beyond_it() -> None:
    """It keeps its blocks and its row until the token is there."""
    seq = make_seq("a", 6, max_tokens=1)
    scheduler, first = begun(seq, make_seq("b", 6))
    second = ahead_of(scheduler)
    assert second.chunks.seq_ids == ("b",)
    assert (list(scheduler.ending), list(scheduler.running)) == (["a"], [scheduler.running[0]])
    assert (scheduler.stats().num_running, len(seq.block_table)) == (2, 2)
    (a, b) = updated(scheduler, first, {"a": 40, "b": 41})
    assert (a.new_token_ids, a.finish_reason, b.finish_reason) == ((40,), FinishReason.LENGTH, None)
    assert (seq.status, scheduler.ending) == (SequenceStatus.FINISHED, {})
    assert len(scheduler.kv.prefix_cache or ()) == 2, "its full block serves others, like that of b"


@pytest.mark.parametrize("max_tokens", [1, 8])
def test_a_cancel_in_flight_leaves_nothing_and_is_passed_over_twice(max_tokens: int) -> None:
    seq = make_seq("a", 6, max_tokens=max_tokens)
    scheduler, first = begun(seq, make_seq("b", 6))
    second = ahead_of(scheduler)
    assert scheduler.abort("a")
    check(scheduler)
    assert (len(seq.block_table), seq.generated_token_ids, scheduler.ending) == (0, [], {})
    assert [told.seq_id for told in updated(scheduler, first, {"a": 40, "b": 41})] == ["b"]
    third = ahead_of(scheduler)
    assert third.removed_ids == ("a",)
    assert [told.seq_id for told in updated(scheduler, second, {"a": 42, "b": 43})] == ["b"]


def test_who_fails_in_flight_ends_and_nothing_that_it_has_computed_is_found() -> None:
    seq = make_seq("a", 8)
    scheduler, first = begun(seq, make_seq("b", 8))
    second = ahead_of(scheduler)
    (a, _) = updated(scheduler, first, {"b": 40}, {"a": "no finite logit"})
    assert (a.finish_reason, a.error, a.new_token_ids) == (FinishReason.ERROR, "no finite logit", ())
    assert a.stats is not None
    assert a.stats.num_generated_tokens == 0
    assert scheduler.kv.find_prefix(make_seq("again", prompt=seq.token_ids[:8])) == []
    updated(scheduler, second, {"b": 41}, {"a": "no finite logit"})
    assert scheduler.abort("b")
    assert scheduler.kv.num_owned_blocks == 0


@pytest.mark.parametrize(("mode", "num_cpu_blocks"), [(PreemptionMode.RECOMPUTE, 0), (PreemptionMode.SWAP, 8)])
def test_where_somebody_would_have_to_give_way_the_outcome_is_waited_for(
    mode: PreemptionMode, num_cpu_blocks: int
) -> None:
    """Both come to want a third block at the same step, and one is free."""
    scheduler = make_scheduler(5, 4, num_cpu_blocks=num_cpu_blocks, preemption_mode=mode)
    seqs = [make_seq("a", 3), make_seq("b", 3)]
    driver = Driver(scheduler, lookahead=Lookahead.LAUNCHED)
    driver.add(*seqs)
    driver.run()
    assert scheduler.lookahead.num_waits[Wait.BLOCKS] > 0
    assert driver.num_looked_ahead > 0
    assert seqs[1].num_preemptions == 1
    for seq in seqs:
        assert driver.generated[seq.seq_id] == generate("", seq.token_ids[:3], 8)


def test_taking_an_assumption_back_changes_nothing() -> None:
    """Each has eight tokens in two blocks when the ninth is drawn; one block is free for the step after."""
    seqs = [make_seq("a", 3), make_seq("b", 3)]
    scheduler, output = begun(*seqs, num_blocks=5)
    while seqs[0].num_tokens < 8:
        updated(scheduler, output, {"a": 40, "b": 41})
        output = scheduler.schedule(0.0)
    before = [(seq.token_ids.tolist(), seq.num_computed_tokens, seq.num_in_flight_tokens) for seq in seqs]
    assert scheduler.try_schedule_ahead(0.0) is None
    check(scheduler)
    assert [(seq.token_ids.tolist(), seq.num_computed_tokens, seq.num_in_flight_tokens) for seq in seqs] == before
    assert (list(scheduler.running), scheduler.ending) == (seqs, {})
    assert scheduler.lookahead.num_waits == {Wait.BLOCKS: 1}
    assert len(updated(scheduler, output, {"a": 42, "b": 43})) == 2


def test_what_depends_on_the_outcome_is_waited_for() -> None:
    family = Family()
    sampling = SamplingParams(beam_width=2, max_tokens=4)
    cases = {
        Wait.FAMILY: [make_seq("a", 6, family=family), make_seq("b", 6)],
        Wait.BEAMS: [Sequence("a", [1, 2, 3], sampling), make_seq("b", 6)],
        Wait.DEADLINE: [make_seq("a", 6, deadline_s=5.0), make_seq("b", 6)],
        Wait.LAST_TOKENS: [make_seq("a", 6, max_tokens=1), make_seq("b", 6, max_tokens=1)],
    }
    for wait, seqs in cases.items():
        scheduler, _ = begun(*seqs)
        assert scheduler.try_schedule_ahead(5.0) is None, wait
        assert scheduler.lookahead.num_waits == {wait: 1}
    scheduler, first = begun(make_seq("a", 6))
    scheduler.abort("a")
    updated(scheduler, first, {"a": 1})
    scheduler.schedule(0.0)
    assert scheduler.try_schedule_ahead(0.0) is None
    assert scheduler.lookahead.num_waits == {Wait.NOTHING_COMPUTED: 1}


def test_a_deadline_that_passes_in_a_step_still_tells_the_token_of_that_step() -> None:
    driver = Driver(make_scheduler(), lookahead=Lookahead.LAUNCHED)
    seq = make_seq("a", 6, deadline_s=4.5)
    driver.add(seq, make_seq("b", 6))
    driver.run()
    assert driver.ends["a"].finish_reason is FinishReason.DEADLINE
    assert driver.ends["a"].stats is not None
    assert driver.ends["a"].stats.num_generated_tokens == len(driver.generated["a"]) > 0


@pytest.mark.parametrize("lookahead", [Lookahead.PLANNED, Lookahead.LAUNCHED])
def test_all_rows_are_in_use_when_one_draws_its_last_token_and_nobody_gets_a_row_too_many(lookahead: Lookahead) -> None:
    driver = Driver(make_scheduler(max_num_seqs=3), lookahead=lookahead)
    seqs = [make_seq(f"{number}", 5 + number, max_tokens=1 + number % 4) for number in range(12)]
    driver.add(*seqs)
    most = 0
    while driver.scheduler.has_work:
        driver.step()
        most = max(most, len(driver.runner.rows))
    assert most == 3
    assert all(driver.ends[seq.seq_id].finish_reason is FinishReason.LENGTH for seq in seqs)


def test_only_one_step_is_decided_ahead() -> None:
    scheduler, _ = begun(make_seq("a", 6))
    ahead_of(scheduler)
    with pytest.raises(AssertionError, match="2 steps are in flight"):
        scheduler.try_schedule_ahead(0.0)
    with pytest.raises(AssertionError, match="never updated"):
        scheduler.schedule(0.0)
