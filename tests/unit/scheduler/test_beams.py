"""Beams of one request: they share blocks, and come and go together, and end as if nothing had disturbed them."""

import random
from typing import Any

import pytest

from scheduler import FinishReason, PreemptionMode, SamplingParams, Sequence, SequenceStatus
from scheduler.errors import InvalidPromptError, InvalidSamplingParamsError, PromptTooLongError
from scheduler.output import Hypothesis
from tests.unit.scheduler.fake_runner import CopyFaults, Driver, search
from tests.unit.scheduler.makers import make_scheduler, make_seq

PROMPT = list(range(1, 42))
EOS = frozenset({3})


def make_search(seq_id: str = "b", width: int = 4, max_tokens: int = 20, **rest: Any) -> Sequence:
    prompt = rest.pop("prompt", PROMPT)
    names = ("priority", "deadline_s", "generated_token_ids")
    given = {name: rest.pop(name) for name in names if name in rest}
    return Sequence(seq_id, prompt, SamplingParams(beam_width=width, max_tokens=max_tokens, **rest), **given)


def expected(seq: Sequence) -> tuple[Hypothesis, ...]:
    prompt = seq.token_ids[: seq.num_prompt_tokens].tolist()
    return tuple(search("", prompt, seq.sampling, seq.max_num_tokens - seq.num_prompt_tokens, EOS))


def check_found(driver: Driver, *seqs: Sequence) -> None:
    for seq in seqs:
        assert driver.ends[seq.seq_id].hypotheses == expected(seq), seq
        assert driver.generated[seq.seq_id] == []


def make_driver(num_blocks: int = 200, faults: CopyFaults | None = None, **options: Any) -> Driver:
    return Driver(make_scheduler(num_blocks, 4, eos_token_ids=EOS, **options), faults=faults)


@pytest.mark.parametrize("width", [2, 3, 4, 16])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
def test_a_search_finds_what_the_arithmetic_says(width: int, early_stopping: Any, length_penalty: float) -> None:
    driver = make_driver(400)
    seq = make_search(width=width, n=2, early_stopping=early_stopping, length_penalty=length_penalty)
    driver.add(seq)
    driver.run()
    check_found(driver, seq)
    assert len(driver.ends["b"].hypotheses) == 2
    assert driver.ends["b"].finish_reason is driver.ends["b"].hypotheses[0].finish_reason


def test_all_beams_are_decoded_in_one_batch_and_share_the_prompt() -> None:
    """Of 16 full blocks 4 beams hold one copy; 4 sequences would hold 4."""
    driver = make_driver(enable_prefix_caching=False)
    seq = make_search(prompt=list(range(1, 67)), ignore_eos=True, max_tokens=12)
    driver.add(seq)
    driver.step()
    assert driver.num_tokens_by_id() == {"b": 66}
    for num_steps in range(1, 11):
        driver.step()
        assert sorted(driver.num_tokens_by_id().values()) == [1, 1, 1, 1]
        stats = driver.scheduler.stats()
        num_owned = stats.num_blocks - stats.num_free_blocks
        num_each = -(-(66 + num_steps) // 4)
        assert num_owned <= 16 + 4 * (num_each - 16)
        assert stats.num_saved_blocks == 4 * num_each - num_owned >= 3 * 16
    driver.run()
    check_found(driver, seq)
    last_stats = driver.ends["b"].stats
    assert last_stats is not None
    assert last_stats.num_saved_blocks >= 3 * 16
    stats = driver.scheduler.stats()
    assert stats.num_forks > 0
    assert stats.num_copied_blocks > 0
    assert stats.num_free_blocks == stats.num_blocks


def test_only_the_last_partial_block_is_copied_and_one_beam_keeps_it() -> None:
    driver = make_driver(enable_prefix_caching=False)
    seq = make_search(width=2, prompt=PROMPT[:6], ignore_eos=True, max_tokens=8)
    driver.add(seq)
    driver.step()
    assert seq.beams is not None
    assert {beam.block_table.block_ids() for beam in seq.beams} == {seq.block_table.block_ids()}
    driver.step()
    # Two write to the block of the prompt's last two tokens: one of them to a copy.
    assert driver.scheduler.stats().num_copied_blocks == 1
    driver.run()
    check_found(driver, seq)


def test_other_sequences_and_searches_run_beside() -> None:
    driver = make_driver(max_num_batched_tokens=24)
    seqs = [make_search(f"b{width}", width, prompt=PROMPT[width:]) for width in (2, 3, 5)]
    driver.add(make_seq("first"), *seqs, make_seq("last", 50, 30))
    driver.run()
    check_found(driver, *seqs)


@pytest.mark.parametrize("budget", [1, 2, 5])
def test_a_budget_below_the_width_takes_more_steps_and_changes_nothing(budget: int) -> None:
    driver = make_driver(max_num_batched_tokens=budget)
    seq = make_search(width=4)
    driver.add(seq)
    driver.run()
    check_found(driver, seq)


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
@pytest.mark.parametrize("is_caching", [True, False])
@pytest.mark.parametrize("width", [2, 4, 9])
def test_preempted_beams_find_what_undisturbed_ones_find(mode: PreemptionMode, is_caching: bool, width: int) -> None:
    faults = CopyFaults(random.Random(width), max_delay=3)
    driver = make_driver(num_cpu_blocks=300, preemption_mode=mode, enable_prefix_caching=is_caching, faults=faults)
    leader, seq = make_seq("leader", 8, 400), make_search(width=width, ignore_eos=True, max_tokens=30)
    driver.add(leader, seq)
    num_preempted = 0
    for step in range(200):
        driver.step()
        if seq.is_finished:
            break
        if step % 5 == 4 and driver.scheduler.preempt("b"):
            num_preempted += 1
    check_found(driver, seq)
    assert num_preempted >= 3
    stats, last = driver.scheduler.stats(), driver.ends["b"].stats
    assert last is not None
    assert last.num_preemptions == num_preempted
    if mode is PreemptionMode.SWAP:
        assert (stats.num_preemptions_swap, stats.num_recomputed_tokens) == (num_preempted, 0)
    else:
        assert stats.num_preemptions_recompute == num_preempted
        assert last.num_recomputed_tokens == stats.num_recomputed_tokens > 0


def run_to(driver: Driver, seq: Sequence, num_generated: int) -> None:
    while seq.num_generated_tokens < num_generated:
        driver.step()


def test_recompute_computes_no_token_twice_that_beams_share() -> None:
    driver = make_driver(enable_prefix_caching=False)
    seq = make_search(ignore_eos=True)
    driver.add(make_seq("leader", 8, 400), seq)
    run_to(driver, seq, 10)
    assert seq.beams is not None
    beams = [tuple(beam.token_ids) for beam in seq.beams]
    prefixes = {beam[:end] for beam in beams for end in range(1, len(beam) + 1)}
    num_blocks = len({block for beam in seq.beams for block in beam.block_table})
    assert driver.scheduler.preempt("b")
    computed = 0
    while seq.num_generated_tokens == 10:
        driver.step()
        computed += sum(num for seq_id, num in driver.num_tokens_by_id().items() if seq_id != "leader")
    assert computed == len(prefixes)
    assert len({block for beam in seq.beams for block in beam.block_table}) <= num_blocks + 4
    driver.run()
    check_found(driver, seq)


@pytest.mark.parametrize("is_caching", [True, False])
def test_swap_copies_a_shared_block_once(is_caching: bool) -> None:
    driver = make_driver(num_cpu_blocks=100, preemption_mode=PreemptionMode.SWAP, enable_prefix_caching=is_caching)
    seq = make_search(ignore_eos=True)
    driver.add(make_seq("leader", 8, 400), seq)
    run_to(driver, seq, 7)
    assert seq.beams is not None
    num_blocks = len({block for beam in seq.beams for block in beam.block_table})
    num_in_tables = sum(len(beam.block_table) for beam in seq.beams)
    assert num_blocks < num_in_tables
    assert driver.scheduler.preempt("b")
    driver.step()
    stats = driver.scheduler.stats()
    assert stats.num_swapped_out_blocks == num_blocks
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.num_swapped_in_blocks <= num_blocks
    assert (stats.num_swapped_in_blocks == num_blocks) != is_caching
    check_found(driver, seq)


def test_a_full_tier_is_a_recompute_and_a_damaged_copy_too() -> None:
    small = make_driver(num_cpu_blocks=8, preemption_mode=PreemptionMode.SWAP)
    bad = make_driver(
        num_cpu_blocks=80,
        preemption_mode=PreemptionMode.SWAP,
        enable_prefix_caching=False,
        faults=CopyFaults(random.Random(5), max_delay=2, p_damaged=0.3),
    )
    for driver in (small, bad):
        seq = make_search(ignore_eos=True)
        driver.add(make_seq("leader", 8, 400), seq)
        run_to(driver, seq, 6)
        assert driver.scheduler.preempt("b")
        driver.run()
        check_found(driver, seq)
    assert small.scheduler.stats().num_full_tier_recomputes == 1
    assert bad.scheduler.stats().num_damaged_blocks > 0


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_searches_in_a_pool_that_holds_one_of_them_all_end(mode: PreemptionMode) -> None:
    driver = make_driver(40, num_cpu_blocks=100, preemption_mode=mode)
    seqs = [make_search(f"b{i}", 4, prompt=[i, *PROMPT[:20]], ignore_eos=True, max_tokens=30) for i in range(4)]
    driver.add(*seqs, make_seq("other", 20, 60))
    driver.run()
    check_found(driver, *seqs)
    stats = driver.scheduler.stats()
    assert stats.num_preemptions_swap + stats.num_preemptions_recompute > 0


def test_a_pool_that_cannot_hold_the_beams_refuses_them_with_numbers() -> None:
    scheduler = make_scheduler(num_blocks=34, block_size=4)
    with pytest.raises(PromptTooLongError, match=r"4 beams of 41 prompt tokens and up to 23 .* hold 34 blocks") as no:
        make_scheduler(num_blocks=33, block_size=4).add(make_search(max_tokens=23))
    assert "has 33: use fewer beams or a smaller max_tokens" in str(no.value)
    scheduler.add(make_search(max_tokens=23))
    with pytest.raises(InvalidSamplingParamsError, match="beam_width is 5, but at most 4 sequences run at once"):
        make_scheduler(max_num_seqs=4).add(make_search(width=5))
    with pytest.raises(InvalidPromptError, match="beams rewrite their past: start it over"):
        scheduler.add(make_search("again", generated_token_ids=[4, 5]))
    assert scheduler.num_unfinished == 1


def test_the_largest_search_that_is_taken_on_ends() -> None:
    driver = make_driver(34, enable_prefix_caching=False)
    seq = make_search(max_tokens=23, ignore_eos=True)
    driver.add(seq)
    driver.run()
    check_found(driver, seq)


def test_beams_count_as_so_many_sequences() -> None:
    driver = make_driver(max_num_seqs=8)
    seqs = [make_search(f"b{i}", 4, prompt=[i, *PROMPT], ignore_eos=True, max_tokens=9) for i in range(3)]
    driver.add(*seqs)
    for _ in range(4):
        driver.step()
    assert [seq.seq_id for seq in driver.scheduler.running] == ["b0", "b1"]
    driver.run()
    check_found(driver, *seqs)


def bring_to(driver: Driver, seq: Sequence, state: str) -> None:
    """Let a search come into a state of its life; recomputing, not all beams have come back."""
    driver.runner.faults.hold = lambda transfer: True
    if state == "waiting":
        return
    driver.step()
    if state == "prompt":
        return
    run_to(driver, seq, 5)
    if state == "decoding":
        return
    assert driver.scheduler.preempt("b")
    driver.step()
    if state == "recomputing":
        assert seq.beams is not None
        assert any(len(beam.block_table) == 0 for beam in seq.beams)
        return
    if state == "swapping out":
        return
    driver.runner.faults.hold = lambda transfer: False
    while seq.status is not SequenceStatus.SWAPPED:
        driver.step()
    if state == "swapped":
        return
    driver.runner.faults.hold = lambda transfer: True
    driver.step()


STATES = ["waiting", "prompt", "decoding", "swapping out", "swapped", "swapping in", "recomputing"]


def abort(driver: Driver) -> None:
    assert driver.scheduler.abort("b")


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("end", ["abort", "deadline", "abort in a step"])
def test_a_search_can_end_in_every_state(state: str, end: str) -> None:
    mode = PreemptionMode.RECOMPUTE if "recomput" in state else PreemptionMode.SWAP
    driver = make_driver(num_cpu_blocks=100, preemption_mode=mode, enable_prefix_caching=False)
    seq = make_search(ignore_eos=True, deadline_s=500.0)
    driver.add(make_seq("leader", 8, 400, priority=1), seq)
    bring_to(driver, seq, state)
    if "swap" in state:
        assert seq.status is SequenceStatus[state.upper().replace(" ", "_")]
    if end == "deadline":
        driver.now = 600.0
        driver.step()
        assert driver.ends["b"].finish_reason is FinishReason.DEADLINE
        assert driver.ends["b"].hypotheses == ()
    elif end == "abort":
        abort(driver)
    else:
        driver.step(between=lambda output: abort(driver))
    driver.runner.faults.hold = lambda transfer: False
    assert seq.is_finished
    driver.run()
    stats = driver.scheduler.stats()
    assert (stats.num_free_blocks, stats.num_used_cpu_blocks) == (stats.num_blocks, 0)


def test_a_beam_that_fails_fails_the_search() -> None:
    driver = make_driver()
    seq = make_search(ignore_eos=True)
    driver.add(seq)
    run_to(driver, seq, 4)
    assert seq.beams is not None
    other = next(beam for beam in seq.beams if beam is not seq)
    (output,) = driver.step({other.seq_id: "no number to choose from"})
    assert (output.seq_id, output.finish_reason, output.error) == ("b", FinishReason.ERROR, "no number to choose from")
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks


def test_a_tenant_pays_for_all_beams() -> None:
    driver = make_driver(scheduling_policy="fair")
    seq = make_search(ignore_eos=True, max_tokens=10)
    driver.add(make_seq("leader", 8, 400), seq)
    run_to(driver, seq, 9)
    fair = driver.scheduler.policy.fair
    assert fair is not None
    assert fair.used[""] >= 8 + len(PROMPT) + 8 * 4
    driver.run()
    check_found(driver, seq)
