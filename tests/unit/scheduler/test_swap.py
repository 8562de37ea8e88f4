"""Victims that go to the CPU tier and come back: step by step, whatever goes wrong, and what it is said to cost."""

from collections.abc import Callable

import pytest

from scheduler import (
    CacheConfig,
    FinishReason,
    PreemptionMode,
    Scheduler,
    SchedulerConfig,
    Sequence,
    SequenceStatus,
    Transfer,
    TransferResult,
)
from scheduler.errors import InvalidConfigError
from scheduler.invariants import check
from scheduler.kv_cache_manager import KVCacheManager
from scheduler.step_adder import StepAdder
from tests.unit.scheduler.fake_runner import CopyFaults, Driver, generate
from tests.unit.scheduler.makers import make_scheduler, make_seq

SWAP = PreemptionMode.SWAP


def held(transfer: Transfer) -> bool:
    return True


def let_go(transfer: Transfer) -> bool:
    return False


def two_that_outgrow_the_pool(faults: CopyFaults | None = None, **rest: object) -> tuple[Driver, Sequence]:
    """A pool of 6 blocks of 2: both need a fourth block when they have 7 tokens, and b gives way."""
    options = {"num_blocks": 6, "block_size": 2, "num_cpu_blocks": 8, "preemption_mode": SWAP} | rest
    driver = Driver(make_scheduler(**options), faults=faults)  # type: ignore[arg-type]
    driver.add(make_seq("a", 3, 6), victim := make_seq("b", 3, 6))
    return driver, victim


def step_until(driver: Driver, seq: Sequence, status: SequenceStatus) -> None:
    for _ in range(100):
        if seq.status is status:
            return
        driver.step()
    raise AssertionError(f"{seq} never comes to be {status.name}")


def expect_the_right_tokens_and_all_blocks_back(driver: Driver, *names: str) -> None:
    driver.run()
    for name in names:
        assert driver.generated[name] == generate("", make_seq(name, 3).token_ids, 6), name
    stats = driver.scheduler.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    assert (stats.num_used_cpu_blocks, stats.num_swapped, stats.num_transfers) == (0, 0, 0)


def test_the_victim_is_copied_out_and_in_and_goes_on_where_it_was() -> None:
    """The fourth block of a is free only when the copy has been made: a sits out one step, and no token is lost."""
    driver, victim = two_that_outgrow_the_pool(enable_prefix_caching=False)
    table = [
        # computed            out in  b is
        ({"a": 3, "b": 3}, 0, 0, "RUNNING"),
        ({"a": 1, "b": 1}, 0, 0, "RUNNING"),
        ({"a": 1, "b": 1}, 0, 0, "RUNNING"),
        ({"a": 1, "b": 1}, 0, 0, "RUNNING"),
        ({}, 3, 0, "SWAPPED"),
        ({"a": 1}, 0, 0, "SWAPPED"),
        ({"a": 1}, 0, 0, "SWAPPED"),
        ({}, 0, 3, "RUNNING"),
        ({"b": 1}, 0, 0, "RUNNING"),
        ({"b": 1}, 0, 0, "FINISHED"),
    ]
    for computed, num_out, num_in, status in table:
        driver.step()
        assert driver.last_output is not None
        assert driver.num_tokens_by_id() == computed
        assert sum(len(transfer.copies) for transfer in driver.last_output.swap_outs) == num_out
        assert sum(len(transfer.copies) for transfer in driver.last_output.swap_ins) == num_in
        assert victim.status.name == status
    expect_the_right_tokens_and_all_blocks_back(driver, "a", "b")
    end = driver.ends["b"].stats
    assert end is not None
    assert (end.num_preemptions, end.num_recomputed_tokens, end.swapped_bytes) == (1, 0, 12)
    stats = driver.scheduler.stats()
    assert (stats.num_preemptions_swap, stats.num_preemptions_recompute, stats.num_recomputed_tokens) == (1, 0, 0)
    assert (stats.num_swapped_out_blocks, stats.num_swapped_in_blocks) == (3, 3)
    assert (stats.swapped_out_bytes, stats.swapped_in_bytes) == (6, 6)


def test_what_the_device_still_has_at_swap_in_is_not_copied_in() -> None:
    driver, victim = two_that_outgrow_the_pool()
    driver.run()
    stats = driver.scheduler.stats()
    assert (stats.num_swapped_out_blocks, stats.num_swapped_in_blocks) == (3, 1), "two of three were cached still"
    assert victim.num_recomputed_tokens == 0


def test_blocks_that_are_being_copied_out_count_as_promised() -> None:
    """While the copies take their time the one in need waits, and nobody else is preempted for it."""
    driver = Driver(make_scheduler(num_blocks=9, block_size=2, num_cpu_blocks=8, preemption_mode=SWAP))
    driver.add(make_seq("a", 3, 6), make_seq("b", 3, 6), victim := make_seq("c", 3, 6))
    driver.runner.faults.hold = held
    step_until(driver, victim, SequenceStatus.SWAPPING_OUT)
    for _ in range(5):
        driver.step()
    stats = driver.scheduler.stats()
    assert (stats.num_preemptions_swap, stats.num_running, stats.num_transfers) == (1, 2, 1)
    assert stats.num_free_blocks + stats.num_cached_blocks == 0, "nothing of it is free before its copy has ended"
    driver.runner.faults.hold = let_go
    expect_the_right_tokens_and_all_blocks_back(driver, "a", "b", "c")


@pytest.mark.parametrize("state", ["SWAPPING_OUT", "SWAPPED", "SWAPPING_IN"])
@pytest.mark.parametrize("is_caching", [True, False])
def test_an_abort_in_any_state_of_a_swap_gives_both_tiers_everything_back(state: str, is_caching: bool) -> None:
    driver, victim = two_that_outgrow_the_pool(enable_prefix_caching=is_caching)
    status = SequenceStatus[state]
    in_flight = 0 if status is SequenceStatus.SWAPPED else 1
    if status is SequenceStatus.SWAPPING_IN:
        step_until(driver, victim, SequenceStatus.SWAPPED)
    if in_flight:
        driver.runner.faults.hold = held
    step_until(driver, victim, status)
    assert driver.scheduler.abort("b")
    assert not driver.scheduler.abort("b")
    check(driver.scheduler)
    assert driver.scheduler.stats().num_transfers == in_flight
    assert (driver.scheduler.stats().num_used_cpu_blocks > 0) == bool(in_flight), "the copy still needs both sides"
    driver.step()
    driver.runner.faults.hold = let_go
    expect_the_right_tokens_and_all_blocks_back(driver, "a")
    assert list(driver.ends) == ["a"]


def test_an_id_that_comes_again_while_its_copy_is_on_its_way_is_another_sequence() -> None:
    driver, victim = two_that_outgrow_the_pool()
    driver.runner.faults.hold = held
    step_until(driver, victim, SequenceStatus.SWAPPING_OUT)
    driver.scheduler.abort("b")
    driver.add(make_seq("b", 3, 6))
    driver.runner.faults.hold = let_go
    expect_the_right_tokens_and_all_blocks_back(driver, "a", "b")


def test_whoever_comes_while_copies_hold_blocks_waits_for_them_even_if_nothing_runs() -> None:
    driver, victim = two_that_outgrow_the_pool()
    driver.runner.faults.hold = held
    step_until(driver, victim, SequenceStatus.SWAPPING_OUT)
    driver.scheduler.abort("a")
    driver.add(make_seq("c", 8, 2))
    for _ in range(3):
        driver.step()
        assert driver.num_tokens_by_id() == {}
    driver.runner.faults.hold = let_go
    driver.run()
    assert driver.generated["c"] == generate("", make_seq("c", 8).token_ids, 2)
    assert driver.generated["b"] == generate("", make_seq("b", 3).token_ids, 6)


def test_work_is_left_until_the_last_copy_has_ended() -> None:
    driver, victim = two_that_outgrow_the_pool()
    driver.runner.faults.hold = held
    step_until(driver, victim, SequenceStatus.SWAPPING_OUT)
    driver.scheduler.abort("a")
    driver.scheduler.abort("b")
    driver.step()
    assert not driver.scheduler.has_unfinished
    assert driver.scheduler.has_work
    driver.runner.faults.hold = let_go
    driver.step()
    assert not driver.scheduler.has_work


def test_a_block_that_comes_back_damaged_is_recomputed_and_counted() -> None:
    driver, victim = two_that_outgrow_the_pool(CopyFaults(p_damaged=1.0), enable_prefix_caching=False)
    expect_the_right_tokens_and_all_blocks_back(driver, "a", "b")
    assert driver.scheduler.stats().num_damaged_blocks == 3
    assert victim.num_recomputed_tokens == 6


def test_a_victim_for_which_the_tier_gets_no_memory_is_recomputed() -> None:
    driver, victim = two_that_outgrow_the_pool(CopyFaults(p_no_memory=1.0), enable_prefix_caching=False)
    expect_the_right_tokens_and_all_blocks_back(driver, "a", "b")
    assert driver.scheduler.stats().num_damaged_blocks == 0
    assert victim.num_recomputed_tokens == 6


@pytest.mark.parametrize("mode", [SWAP, PreemptionMode.AUTO])
def test_a_full_cpu_tier_means_recomputing_and_never_an_abort(mode: PreemptionMode) -> None:
    """A tier of 4 blocks, and many sequences that grow to 13."""
    driver = Driver(make_scheduler(64, 8, num_cpu_blocks=4, preemption_mode=mode, enable_prefix_caching=False))
    seqs = [make_seq(f"{number:02}", 8, 90) for number in range(40)]
    driver.add(*seqs)
    driver.run(max_steps=2_000)
    assert driver.generated == {seq.seq_id: generate("", seq.token_ids[:8], 90) for seq in seqs}
    assert {end.finish_reason for end in driver.ends.values()} == {FinishReason.LENGTH}
    stats = driver.scheduler.stats()
    assert stats.num_full_tier_recomputes == stats.num_preemptions_recompute > 0


def test_many_that_outgrow_the_pool_are_swapped_without_recomputing_a_token() -> None:
    driver = Driver(
        make_scheduler(64, 8, num_cpu_blocks=400, preemption_mode=SWAP, enable_prefix_caching=False),
        faults=CopyFaults(max_delay=3),
    )
    seqs = [make_seq(f"{number:02}", 8, 90) for number in range(40)]
    driver.add(*seqs)
    driver.run(max_steps=2_000)
    assert driver.generated == {seq.seq_id: generate("", seq.token_ids[:8], 90) for seq in seqs}
    stats = driver.scheduler.stats()
    assert stats.num_preemptions_swap > 0
    assert (stats.num_preemptions_recompute, stats.num_recomputed_tokens) == (0, 0)
    assert driver.runner.num_tokens == 40 * (8 + 89)
    counts = [end.stats.num_preemptions for end in driver.ends.values() if end.stats is not None]
    assert max(counts) <= 4


def test_a_sequence_can_be_told_to_give_way_but_for_the_leader() -> None:
    driver = Driver(make_scheduler(num_blocks=40, block_size=4, num_cpu_blocks=20, preemption_mode=SWAP))
    driver.add(make_seq("leader", 3, 6), victim := make_seq("b", 3, 6))
    assert not driver.scheduler.preempt("b"), "it does not run yet"
    driver.step()
    assert not driver.scheduler.preempt("leader")
    assert not driver.scheduler.preempt("nobody")
    assert driver.scheduler.preempt("b")
    assert victim.status is SequenceStatus.SWAPPING_OUT
    check(driver.scheduler)
    assert not driver.scheduler.preempt("b")
    expect_the_right_tokens_and_all_blocks_back(driver, "leader", "b")
    assert victim.num_preemptions == 1
    assert victim.num_recomputed_tokens == 0


def test_the_leader_is_never_swapped() -> None:
    driver = Driver(make_scheduler(num_blocks=12, block_size=4, num_cpu_blocks=20, preemption_mode=SWAP))
    leader = make_seq("leader", 4, 40, priority=-1)
    driver.add(leader)
    driver.step()
    driver.add(*(make_seq(f"s{number}", 4, 30, priority=number) for number in range(6)))
    driver.run()
    assert driver.scheduler.stats().num_preemptions_swap > 0
    assert leader.num_preemptions == 0


def swapped(kv: KVCacheManager, seq_id: str, num_tokens: int) -> Sequence:
    """A sequence that has computed all but the last of its tokens and lies in the CPU tier."""
    seq = make_seq(seq_id, num_tokens + 1)
    seq.max_num_tokens = 10_000
    assert kv.allocate_slots(seq, num_tokens) is not None
    seq.num_computed_tokens = num_tokens
    seq.num_preemptions = 1
    assert kv.try_begin_swap_out(seq)
    for transfer in kv.take_transfers()[0]:
        assert kv.end_transfer(TransferResult(transfer.transfer_id)) == [seq]
    return seq


@pytest.mark.parametrize(("num_blocks", "lengths"), [(32, (256, 240)), (512, (4096, 4080))])
def test_a_swap_in_leaves_room_to_decode_or_is_not_begun(num_blocks: int, lengths: tuple[int, int]) -> None:
    """Both would fit to the last block but one, and then neither could decode."""
    kv = KVCacheManager(CacheConfig(num_blocks, 16, 2 * num_blocks, enable_prefix_caching=False))
    first, second = (swapped(kv, f"s{length}", length) for length in lengths)
    adder = StepAdder(kv, 512)
    adder.open_admission([])
    assert adder.try_admit(first, is_alone=True)
    assert not adder.try_admit(second, is_alone=False)
    assert (first.status, second.status) == (SequenceStatus.SWAPPING_IN, SequenceStatus.SWAPPED)
    assert kv.num_available_blocks == num_blocks - len(first.block_table)


@pytest.mark.parametrize("is_later", [False, True])
@pytest.mark.parametrize(("num_blocks", "is_begun"), [(35, False), (36, True)])
def test_the_room_of_a_swap_in_is_not_given_to_the_next(num_blocks: int, is_begun: bool, is_later: bool) -> None:
    """The first takes 16 blocks and is promised 2 to go on; the second needs 16 and 2 to spare for its preemption."""
    kv = KVCacheManager(CacheConfig(num_blocks, 16, 64, enable_prefix_caching=False))
    first, second = swapped(kv, "a", 256), swapped(kv, "b", 240)
    adder = StepAdder(kv, 512)
    adder.open_admission([])
    assert adder.try_admit(first, is_alone=False)
    if is_later:
        adder = StepAdder(kv, 512)
        adder.open_admission([first])
    assert adder.try_admit(second, is_alone=False) == is_begun


def test_what_is_promised_to_one_on_its_way_in_is_not_given_to_a_newcomer() -> None:
    """b takes 3 of 6 blocks and will want one more; the newcomer finds its 2 blocks, but not one to spare."""
    driver, victim = two_that_outgrow_the_pool(enable_prefix_caching=False)
    step_until(driver, victim, SequenceStatus.SWAPPED)
    driver.runner.faults.hold = held
    step_until(driver, victim, SequenceStatus.SWAPPING_IN)
    driver.add(newcomer := make_seq("c", 3, 6))
    driver.step()
    assert newcomer.status is SequenceStatus.WAITING
    driver.runner.faults.hold = let_go
    expect_the_right_tokens_and_all_blocks_back(driver, "a", "b", "c")


def test_those_on_their_way_in_count_among_those_that_run() -> None:
    driver, victim = two_that_outgrow_the_pool(max_num_seqs=2, enable_prefix_caching=False)
    step_until(driver, victim, SequenceStatus.SWAPPED)
    driver.runner.faults.hold = held
    step_until(driver, victim, SequenceStatus.SWAPPING_IN)
    driver.add(make_seq("c", 1, 1), make_seq("d", 1, 1))
    driver.step()
    assert driver.num_tokens_by_id() == {"c": 1}
    driver.runner.faults.hold = let_go
    driver.run()


def test_what_is_kept_for_one_that_sits_out_is_not_taken_by_those_behind_it() -> None:
    """One block is free and four are leaving: enough for the first and the second, who lack three and one."""
    kv = KVCacheManager(CacheConfig(9, 4, 9, enable_prefix_caching=False))
    victim, first, second, third = (make_seq(name, 16) for name in "vabc")
    for seq, num_tokens in ((victim, 16), (first, 4), (second, 4), (third, 8)):
        assert kv.allocate_slots(seq, num_tokens) is not None
        seq.num_computed_tokens = num_tokens
    assert kv.try_begin_swap_out(victim)
    assert (kv.num_available_blocks, kv.num_leaving_blocks) == (1, 4)
    adder = StepAdder(kv, 100)
    assert not adder.try_serve(first, num_behind=0)
    assert adder.num_missing_blocks(first, num_behind=0) == 2
    assert adder.try_reserve(first, num_behind=0)
    adder.num_tokens_left = 4
    assert not adder.try_serve(second, num_behind=0), "the free block is kept for the first"
    assert adder.try_reserve(second, num_behind=0)
    adder.num_tokens_left = 8
    assert not adder.try_reserve(third, num_behind=0), "it lacks two, and one is left"
    assert adder.seqs == []


def test_one_that_is_swapped_comes_back_ahead_of_equal_newcomers() -> None:
    driver, victim = two_that_outgrow_the_pool()
    step_until(driver, victim, SequenceStatus.SWAPPED)
    driver.add(make_seq("equal", 3, 6), make_seq("urgent", 3, 6, priority=1))
    assert [seq.seq_id for seq in driver.scheduler.waiting] == ["urgent", "b", "equal"]
    expect_the_right_tokens_and_all_blocks_back(driver, "a", "b", "equal", "urgent")


def test_what_lies_in_the_cpu_tier_is_not_copied_out_again() -> None:
    """Two prompts that share 4 of 5 blocks: the second takes a block with it. A third time, nothing is left to copy."""
    kv = KVCacheManager(CacheConfig(30, 4, 30))
    common = list(range(16))
    seqs = [make_seq(name, prompt=[*common, number, 1, 2, 3, 4]) for number, name in enumerate("ab")]
    for seq in seqs:
        kv.take_prefix(seq, kv.find_prefix(seq))
        assert kv.allocate_slots(seq, 20 - seq.num_computed_tokens) is not None
        seq.num_computed_tokens = 20
        kv.seal_full_blocks(seq)
    first, second = seqs
    assert [block.ref_cnt for block in first.block_table] == [2, 2, 2, 2, 1]
    assert (kv.num_blocks_to_copy(first), kv.num_blocks_to_copy(second)) == ((5, 1), (5, 1))
    assert kv.try_begin_swap_out(first)
    (whole,) = kv.take_transfers()[0]
    assert len(whole.copies) == 5
    assert kv.num_blocks_to_copy(second) == (1, 1)
    assert [block.ref_cnt for block in second.block_table] == [2, 2, 2, 2, 1], "the other's copy and second own them"
    assert kv.num_leaving_blocks == 1
    assert kv.try_begin_swap_out(second)
    (rest,) = kv.take_transfers()[0]
    assert len(rest.copies) == 1
    assert kv.end_transfer(TransferResult(rest.transfer_id)) == [], "the blocks it shares are still on their way"
    assert kv.end_transfer(TransferResult(whole.transfer_id)) == [first, second]
    assert kv.num_available_blocks == 30
    assert kv.swap is not None
    assert kv.swap.pool.num_free == 30 - 6
    assert not kv.swap_in(first, kv.find_prefix(first)), "all of it is still on the device"
    assert kv.try_begin_swap_out(first)
    assert first.status is SequenceStatus.SWAPPED
    assert kv.take_transfers() == ((), ())


def test_a_failed_copy_fails_all_that_share_it() -> None:
    kv = KVCacheManager(CacheConfig(30, 4, 30))
    seqs = [make_seq(name, prompt=[*range(16), number]) for number, name in enumerate("ab")]
    for seq in seqs:
        kv.take_prefix(seq, kv.find_prefix(seq))
        assert kv.allocate_slots(seq, 16 - seq.num_computed_tokens) is not None
        seq.num_computed_tokens = 16
        kv.seal_full_blocks(seq)
        assert kv.try_begin_swap_out(seq)
    (transfer,) = kv.take_transfers()[0]
    ready = kv.end_transfer(TransferResult(transfer.transfer_id, (transfer.copies[2].dst,)))
    assert ready == seqs
    assert [seq.status for seq in seqs] == [SequenceStatus.WAITING] * 2
    assert kv.swap is not None
    assert kv.swap.pool.num_free == 30
    assert kv.swap.index is not None
    assert len(kv.swap.index.find(seqs[0])) == 2, "what came before the block that failed is good"


def test_what_a_failed_sequence_computed_is_forgotten_in_both_tiers() -> None:
    driver, victim = two_that_outgrow_the_pool()
    step_until(driver, victim, SequenceStatus.SWAPPED)
    step_until(driver, victim, SequenceStatus.RUNNING)
    driver.step(failing={"b": "all logits are NaN"})
    assert driver.ends["b"].finish_reason is FinishReason.ERROR
    again = make_seq("b", prompt=victim.token_ids.tolist())
    swap = driver.scheduler.kv.swap
    assert swap is not None
    assert swap.index is not None
    assert driver.scheduler.kv.find_prefix(again) == swap.index.find(again) == []
    expect_the_right_tokens_and_all_blocks_back(driver, "a")


def test_the_cpu_tier_keeps_tenants_and_salts_apart() -> None:
    kv = KVCacheManager(CacheConfig(30, 4, 30))
    for name in ("tenant", "cache_salt", "adapter"):
        seq = make_seq("a", prompt=list(range(9)), **{name: "t"})  # type: ignore[arg-type]
        assert kv.allocate_slots(seq, 8) is not None
        seq.num_computed_tokens = 8
        kv.seal_full_blocks(seq)
        assert kv.num_blocks_to_copy(seq)[0] == 2
        assert kv.try_begin_swap_out(seq)


@pytest.mark.parametrize(
    ("mode", "swap_bytes_per_s", "prefill_tokens_per_s", "num_swapped"),
    [
        (PreemptionMode.AUTO, 2.1, 1.0, 1),
        (PreemptionMode.AUTO, 1.9, 1.0, 0),
        (PreemptionMode.AUTO, None, 1.0, 1),
        (PreemptionMode.AUTO, 1.0, None, 1),
        (PreemptionMode.SWAP, 0.1, 9.0, 1),
        (PreemptionMode.RECOMPUTE, 9.0, 0.1, 0),
    ],
)
def test_auto_takes_the_cheaper_way_for_the_victim(
    mode: PreemptionMode, swap_bytes_per_s: float | None, prefill_tokens_per_s: float | None, num_swapped: int
) -> None:
    """The victim has 6 tokens in 3 full blocks of 2 bytes: 12 bytes both ways, or 6 tokens."""
    rates = {"swap_bytes_per_s": swap_bytes_per_s, "prefill_tokens_per_s": prefill_tokens_per_s}
    config = SchedulerConfig(100, preemption_mode=mode, **rates)  # type: ignore[arg-type]
    cache = CacheConfig(6, 2, 8, enable_prefix_caching=False, kv_block_bytes=2)
    driver = Driver(Scheduler(config, cache))
    driver.add(make_seq("a", 3, 6), make_seq("b", 3, 6))
    expect_the_right_tokens_and_all_blocks_back(driver, "a", "b")
    stats = driver.scheduler.stats()
    assert (stats.num_preemptions_swap, stats.num_preemptions_recompute) == (num_swapped, 1 - num_swapped)
    assert stats.num_full_tier_recomputes == 0


def test_copies_pair_neighbours_with_neighbours() -> None:
    """The device blocks of a sequence are in no order; copied to blocks in their order, they go in one piece."""
    kv = KVCacheManager(CacheConfig(9, 4, 9, enable_prefix_caching=False))
    first, second = make_seq("a", 40), make_seq("b", 40)
    for seq in (first, second, second, first, second):
        assert kv.allocate_slots(seq, 4) is not None
        seq.num_computed_tokens += 4
    assert second.block_table.block_ids() == (1, 2, 4)
    kv.free(first)
    third = make_seq("c", 40)
    assert kv.allocate_slots(third, 16) is not None
    third.num_computed_tokens = 16
    assert third.block_table.block_ids() == (0, 3, 5, 6)
    assert kv.try_begin_swap_out(second)
    (transfer,) = kv.take_transfers()[0]
    assert [(copy.src, copy.dst) for copy in transfer.copies] == [(1, 0), (2, 1), (4, 2)]


def test_swapping_without_a_tier_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="preemption_mode is swap, but the CPU tier has no blocks"):
        make_scheduler(preemption_mode=SWAP)


@pytest.mark.parametrize("name", ["swap_bytes_per_s", "prefill_tokens_per_s"])
def test_rates_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(InvalidConfigError, match=f"{name} is 0"):
        SchedulerConfig(100, **{name: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda scheduler, seq: scheduler.kv.swap.pool.allocate(1), "blocks are not 8"),
        (lambda scheduler, seq: seq.cpu_table.clear(), "but holds 0 in the CPU tier"),
        (lambda scheduler, seq: setattr(seq, "num_transfers", 2), "transfers are awaited by"),
        (lambda scheduler, seq: setattr(seq, "num_swapped_tokens", 9), "b.*is on its way with 5 blocks, but holds 3"),
        (lambda scheduler, seq: setattr(seq, "has_row", True), "b.*is on its way, but has a row"),
        (lambda scheduler, seq: scheduler.kv.swap.flights.clear(), "blocks are not 6"),
        (lambda scheduler, seq: scheduler.moving.clear(), "but 2 are unfinished"),
    ],
)
def test_damage_to_the_cpu_tier_is_seen(damage: Callable[[Scheduler, Sequence], object], words: str) -> None:
    driver, victim = two_that_outgrow_the_pool()
    driver.runner.faults.hold = held
    step_until(driver, victim, SequenceStatus.SWAPPING_OUT)
    check(driver.scheduler)
    damage(driver.scheduler, victim)
    with pytest.raises(AssertionError, match=words):
        check(driver.scheduler)
