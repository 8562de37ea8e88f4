"""Nobody waits for ever, and nobody is moved in and out for ever."""

import pytest

from scheduler import CacheConfig, FinishReason, Scheduler, SchedulerConfig, SequenceStatus
from scheduler.admission import MAX_PASSES
from scheduler.errors import DuplicateSequenceError, InvalidConfigError, PromptTooLongError
from scheduler.invariants import check
from tests.unit.scheduler.fake_runner import Driver, generate
from tests.unit.scheduler.makers import make_scheduler, make_seq


def test_prompts_that_can_never_fit_the_pool_are_refused_at_once_and_by_name() -> None:
    driver = Driver(make_scheduler(num_blocks=50, block_size=16))
    for number in range(5):
        with pytest.raises(PromptTooLongError, match=r"1002 tokens .* room for 800 .*KV cache 50 blocks of 16"):
            driver.scheduler.add(make_seq(f"s{number}", 1002, 1))
    assert not driver.scheduler.has_work
    driver.add(make_seq("small", 10, 5))
    driver.run()
    assert driver.ends["small"].finish_reason is FinishReason.LENGTH


def test_what_would_outgrow_the_pool_running_alone_is_refused_at_once() -> None:
    scheduler = make_scheduler(num_blocks=50, block_size=16)
    with pytest.raises(PromptTooLongError, match="700 tokens and 101 more are wanted"):
        scheduler.add(make_seq("a", 700, 101))
    driver = Driver(scheduler)
    driver.add(make_seq("b", 700, 100))
    driver.run()
    assert len(driver.generated["b"]) == 100


def test_the_context_limits_as_the_pool_does() -> None:
    scheduler = make_scheduler(num_blocks=50, block_size=16, max_model_len=100)
    with pytest.raises(PromptTooLongError, match=r"room for 100 .*context 100"):
        scheduler.add(make_seq("a", 90, 11))
    with pytest.raises(PromptTooLongError):
        scheduler.add(make_seq("a", 100, None))
    scheduler.add(make_seq("a", 90, 10))


@pytest.mark.parametrize(("max_model_len", "num_tokens"), [(40, 40), (4_000, 64)])
def test_without_max_tokens_a_sequence_gets_what_is_left(max_model_len: int, num_tokens: int) -> None:
    driver = Driver(make_scheduler(num_blocks=4, block_size=16, max_model_len=max_model_len))
    driver.add(make_seq("a", 30, None))
    driver.run()
    assert len(driver.generated["a"]) == num_tokens - 30
    assert driver.ends["a"].finish_reason is FinishReason.LENGTH


def test_an_id_is_taken_until_its_sequence_ends() -> None:
    driver = Driver(make_scheduler())
    driver.add(make_seq("a"))
    with pytest.raises(DuplicateSequenceError, match="sequence a is running or waiting"):
        driver.scheduler.add(make_seq("a"))
    driver.run()
    driver.scheduler.add(make_seq("a"))


def test_two_prompts_too_long_for_the_pool_together_take_turns_without_preemption() -> None:
    """Budget 64, two prompts of 300 tokens, 25 blocks of 16: the first chunk of the second would fit, the rest not."""
    driver = Driver(make_scheduler(num_blocks=25, block_size=16, max_num_batched_tokens=64))
    seqs = [make_seq("a", 300, 20), make_seq("b", 300, 20)]
    driver.add(*seqs)
    driver.run(max_steps=60)
    assert driver.scheduler.stats().num_preemptions_recompute <= 2
    assert driver.generated == {seq.seq_id: generate("", seq.token_ids[:300], 20) for seq in seqs}


def test_small_ones_pass_a_big_head_and_the_big_one_still_runs() -> None:
    """270 blocks, 250 of them taken: the head needs 100; those behind it need 5 and 10, and more keep coming."""
    driver = Driver(make_scheduler(num_blocks=270, block_size=16, max_num_batched_tokens=6_000))
    driver.add(make_seq("running", 250 * 16 - 100, 100))
    driver.step()
    driver.add(head := make_seq("H", 100 * 16 - 10, 10))
    driver.add(make_seq("L", 5 * 16 - 8, 8), make_seq("W", 10 * 16 - 8, 8))
    driver.step()
    assert {"L", "W"} <= driver.num_tokens_by_id().keys()
    num_steps = num_passed = 0
    while head.status is SequenceStatus.WAITING:
        num_steps += 1
        assert num_steps < 200, "the head starves"
        driver.add(make_seq(f"w{num_steps}", 10 * 16 - 8, 8))
        num_passed = head.num_passes
        driver.step()
    assert 5 <= num_passed <= MAX_PASSES
    driver.run()
    assert len(driver.ends) == num_steps + 4


def test_a_head_that_was_passed_too_often_is_passed_no_more() -> None:
    """A big one runs for ever, as it seems: small ones flow past the head until the limit, then all wait for it."""
    driver = Driver(make_scheduler(num_blocks=40, block_size=4, max_num_seqs=4))
    driver.add(make_seq("running", 60, 60))
    driver.step()
    driver.add(head := make_seq("head", 110, 2))
    for number in range(3 * MAX_PASSES):
        driver.add(make_seq(f"small{number}", 1, 1))
    for _ in range(30):
        driver.step()
    assert head.num_passes == MAX_PASSES
    assert len(driver.ends) == MAX_PASSES
    assert len(driver.scheduler.waiting) == 1 + 2 * MAX_PASSES
    driver.run()
    assert len(driver.ends) == 2 + 3 * MAX_PASSES


def test_many_that_outgrow_the_pool_together_all_finish_with_bounded_preemptions() -> None:
    """40 sequences that grow from 1 to 13 blocks in a pool of 64: far more than fit, if admitted by what they have."""
    driver = Driver(make_scheduler(num_blocks=64, block_size=8, enable_prefix_caching=False))
    seqs = [make_seq(f"{number:02}", 8, 90) for number in range(40)]
    driver.add(*seqs)
    driver.run(max_steps=2_000)
    assert driver.generated == {seq.seq_id: generate("", seq.token_ids[:8], 90) for seq in seqs}
    counts = [end.stats.num_preemptions for end in driver.ends.values() if end.stats is not None]
    assert sum(counts) > 0
    assert max(counts) <= 4
    stats = driver.scheduler.stats()
    assert stats.num_preemptions_recompute == sum(counts)
    assert stats.num_recomputed_tokens <= driver.runner.num_tokens / 3


def test_the_leader_is_never_preempted() -> None:
    driver = Driver(make_scheduler(num_blocks=12, block_size=4))
    leader = make_seq("leader", 4, 40, priority=-1)
    driver.add(leader)
    driver.step()
    driver.add(*(make_seq(f"s{number}", 4, 30, priority=number) for number in range(6)))
    driver.run()
    assert driver.scheduler.stats().num_preemptions_recompute > 0
    assert leader.num_preemptions == 0


@pytest.mark.parametrize(
    ("config", "cache", "words"),
    [
        ((0, 1, 1), (1, 1), "max_model_len is 0"),
        ((1, 0, 1), (1, 1), "max_num_seqs is 0"),
        ((1, 1, -3), (1, 1), "max_num_batched_tokens is -3"),
        ((1, 1, 1), (0, 16), "0 blocks of 16"),
        ((1, 1, 1), (4, 0), "4 blocks of 0"),
    ],
)
def test_sizes_that_cannot_work_are_refused(config: tuple[int, int, int], cache: tuple[int, int], words: str) -> None:
    with pytest.raises(InvalidConfigError, match=words):
        Scheduler(SchedulerConfig(*config), CacheConfig(*cache))


def test_the_smallest_sizes_work() -> None:
    driver = Driver(make_scheduler(num_blocks=2, block_size=1, max_num_seqs=1, max_num_batched_tokens=1))
    driver.add(make_seq("a", 1, 1), make_seq("b", 1, None), make_seq("c", 1, 1))
    driver.run()
    assert {seq_id: len(token_ids) for seq_id, token_ids in driver.generated.items()} == {"a": 1, "b": 1, "c": 1}
    check(driver.scheduler)
