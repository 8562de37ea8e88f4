"""Sequences of one prompt: computed once, shared, copied before a write, and nobody's fate but one's own."""

import pytest

from scheduler import PreemptionMode, SamplingParams, Scheduler, Sequence, SequenceStatus
from scheduler.errors import InvalidPromptError
from scheduler.family import Family, choice_seed
from tests.unit.scheduler.fake_runner import Driver, generate
from tests.unit.scheduler.makers import make_scheduler, make_seq

PROMPT = list(range(1, 42))


def make_family(num: int, prompt: list[int] = PROMPT, max_tokens: int = 12, name: str = "f") -> list[Sequence]:
    """Members that go on after a token of their own each, but for the first: so each generates other tokens."""
    family = Family()
    return [
        Sequence(
            f"{name}{index}",
            prompt,
            SamplingParams(max_tokens=max_tokens),
            generated_token_ids=(60 + index,) * min(index, 1),
            family=family,
        )
        for index in range(num)
    ]


def check_tokens(driver: Driver, seqs: list[Sequence]) -> None:
    for seq in seqs:
        num_given = seq.num_tokens - seq.num_prompt_tokens - len(driver.generated[seq.seq_id])
        begin = seq.token_ids[: seq.num_prompt_tokens + num_given]
        assert driver.generated[seq.seq_id] == generate("", begin, seq.num_tokens - len(begin)), seq


def test_a_prompt_is_computed_once_and_its_full_blocks_are_shared() -> None:
    """Of 10 blocks and a half 10 are shared by four, without a prefix cache, and each has its own last one."""
    driver = Driver(make_scheduler(num_blocks=40, block_size=4, enable_prefix_caching=False))
    seqs = make_family(4, list(range(1, 43)))
    driver.add(*seqs)
    driver.step()
    assert driver.num_tokens_by_id() == {"f0": 42}
    driver.step()
    assert driver.num_tokens_by_id() == {"f0": 1, "f1": 1, "f2": 1, "f3": 1}
    stats = driver.scheduler.stats()
    num_owned = stats.num_blocks - stats.num_free_blocks
    assert (num_owned, stats.num_saved_blocks) == (10 + 4, 3 * 10)
    assert (stats.num_forks, stats.num_copied_blocks) == (3, 3)
    tables = [seq.block_table.block_ids() for seq in driver.scheduler.running]
    assert len({table[:10] for table in tables}) == 1
    assert len({table[10] for table in tables}) == 4
    driver.run()
    check_tokens(driver, seqs)


def test_of_a_prompt_of_whole_blocks_the_last_is_copied_for_those_that_draw_their_first_token_from_it() -> None:
    driver = Driver(make_scheduler(num_blocks=60, block_size=4, enable_prefix_caching=False))
    family = Family()
    seqs = [Sequence(f"f{i}", PROMPT[:40], SamplingParams(max_tokens=9), family=family) for i in range(4)]
    driver.add(*seqs)
    driver.step()
    driver.step()
    assert driver.num_tokens_by_id() == {"f0": 1, "f1": 1, "f2": 1, "f3": 1}
    stats = driver.scheduler.stats()
    assert (stats.num_saved_blocks, stats.num_copied_blocks) == (3 * 9, 3)
    driver.run()
    assert driver.generated == {seq.seq_id: generate("", PROMPT[:40], 9) for seq in seqs}


def test_a_prompt_in_pieces_is_waited_for_and_others_pass_meanwhile() -> None:
    driver = Driver(make_scheduler(num_blocks=40, block_size=4, max_num_batched_tokens=16))
    driver.add(*make_family(3))
    driver.add(make_seq("other", 4))
    computed: dict[str, int] = {}
    for _ in range(4):
        driver.step()
        for seq_id, num in driver.num_tokens_by_id().items():
            computed[seq_id] = computed.get(seq_id, 0) + num
    assert computed["f0"] >= len(PROMPT)
    assert computed["other"] >= 4
    assert computed["f1"] == computed["f2"] == 1
    driver.run()


def test_if_the_first_is_aborted_another_computes_the_prompt() -> None:
    driver = Driver(make_scheduler(num_blocks=40, block_size=4, max_num_batched_tokens=16, enable_prefix_caching=False))
    seqs = make_family(3)
    driver.add(*seqs)
    driver.step()
    driver.scheduler.abort("f0")
    driver.run()
    check_tokens(driver, seqs[1:])
    stats = driver.scheduler.stats()
    assert (stats.num_forks, stats.num_saved_blocks, stats.num_free_blocks) == (1, 0, 40)


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
@pytest.mark.parametrize("is_caching", [True, False])
def test_families_in_a_pool_too_small_for_them_get_their_tokens(mode: PreemptionMode, is_caching: bool) -> None:
    scheduler = make_scheduler(
        num_blocks=24, block_size=4, num_cpu_blocks=60, preemption_mode=mode, enable_prefix_caching=is_caching
    )
    driver = Driver(scheduler)
    seqs = [seq for name in "abc" for seq in make_family(5, PROMPT[: 20 + ord(name) % 3], 40, name)]
    driver.add(*seqs)
    num_saved = 0
    while scheduler.has_work:
        driver.step()
        num_saved = max(num_saved, scheduler.stats().num_saved_blocks)
    check_tokens(driver, seqs)
    stats = scheduler.stats()
    assert num_saved >= 3 * 5
    assert stats.num_forks > 0
    assert stats.num_preemptions_swap + stats.num_preemptions_recompute > 0
    assert (stats.num_preemptions_swap > 0) == (mode is PreemptionMode.SWAP)


def test_who_comes_back_without_blocks_forks_again() -> None:
    driver = Driver(make_scheduler(num_blocks=60, block_size=4, enable_prefix_caching=False))
    seqs = make_family(2)
    driver.add(*seqs)
    for _ in range(3):
        driver.step()
    assert driver.scheduler.preempt("f1")
    assert seqs[1].status is SequenceStatus.WAITING
    driver.step()
    # 41 of its tokens are the prompt, which the other still holds; its own are computed again.
    assert driver.num_tokens_by_id()["f1"] == seqs[1].num_tokens - len(PROMPT) - 1
    driver.run()
    check_tokens(driver, seqs)
    assert driver.scheduler.stats().num_forks == 2


def test_a_family_of_different_prompts_or_tenants_is_refused() -> None:
    scheduler = make_scheduler()
    family = Family()
    scheduler.add(Sequence("a", [1, 2], SamplingParams(), family=family))
    for prompt, tenant in (([1, 3], ""), ([1, 2, 3], ""), ([1, 2], "t")):
        with pytest.raises(InvalidPromptError, match="b has another prompt than a"):
            scheduler.add(Sequence("b", prompt, SamplingParams(), tenant=tenant, family=family))
    assert scheduler.num_unfinished == 1
    drop_all(scheduler)
    assert family.members == []


def drop_all(scheduler: Scheduler) -> None:
    for seq in [*scheduler.running, *scheduler.waiting]:
        scheduler.abort(seq.seq_id)


def test_choice_seeds_are_a_function_of_seed_and_index_and_the_first_is_the_seed_itself() -> None:
    assert choice_seed(7, 0) == 7
    assert choice_seed(7, 1) == 2174948161648732372
    seeds = {choice_seed(seed, index) for seed in range(50) for index in range(16)}
    assert len(seeds) == 50 * 16
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert choice_seed(-3, 1) != choice_seed(3, 1)
