"""Where nothing hits, the prefix cache follows only samples; and who wants no part of it has none."""

import random
from zlib import crc32

import pytest

from scheduler import CacheConfig, PreemptionMode, Scheduler, SchedulerConfig, Sequence
from scheduler.hit_sampling import MIN_HIT_RATE, SAMPLED_SHARE, WINDOW, HitSampler
from scheduler.kv_cache_manager import KVCacheManager
from tests.unit.scheduler.fake_runner import Driver, generate
from tests.unit.scheduler.makers import make_seq

PROMPT = [*range(1, 20)]


def hash_of_tokens(parent_hash: int, tokens: bytes) -> int:
    """The same in every process, unlike Python's, so that the samples are the same ones."""
    return crc32(tokens)


def make_driver(window: int = 20, num_cpu_blocks: int = 0) -> Driver:
    """64 blocks of 4, and a sampler that judges after `window` sequences."""
    mode = PreemptionMode.SWAP if num_cpu_blocks else PreemptionMode.AUTO
    config = SchedulerConfig(48, preemption_mode=mode, write_behind_blocks=8)
    cache = CacheConfig(64, 4, num_cpu_blocks, kv_block_bytes=4)
    scheduler = Scheduler(config, cache, KVCacheManager(cache, hash_of_tokens))
    scheduler.kv.sampler = HitSampler(window=window)
    return Driver(scheduler)


def serve(driver: Driver, seq: Sequence) -> Sequence:
    driver.add(seq)
    driver.run()
    assert driver.generated[seq.seq_id] == generate("", seq.token_ids[: seq.num_prompt_tokens], 3)
    return seq


def distinct(rng: random.Random, name: str) -> Sequence:
    return make_seq(name, prompt=[rng.randrange(2**30) for _ in range(19)], max_tokens=3)


def sampling_driver() -> Driver:
    """After 20 prompts that have nothing in common."""
    driver, rng = make_driver(), random.Random(4)
    for number in range(20):
        assert not driver.scheduler.kv.sampler.is_sampling
        serve(driver, distinct(rng, f"first-{number}"))
    assert driver.scheduler.kv.sampler.is_sampling
    return driver


def test_where_nothing_hits_about_one_beginning_in_eight_is_entered() -> None:
    driver, rng = sampling_driver(), random.Random(5)
    seqs = [serve(driver, distinct(rng, f"{number}")) for number in range(400)]
    num_entered = sum(seq.num_sealed_blocks > 0 or bool(seq.is_followed) for seq in seqs)
    assert 0.3 * 400 / SAMPLED_SHARE < num_entered < 3 * 400 / SAMPLED_SHARE
    assert driver.scheduler.kv.sampler.is_sampling


def test_what_was_not_followed_is_not_found_and_not_counted() -> None:
    driver, rng = sampling_driver(), random.Random(6)
    while (seq := serve(driver, distinct(rng, f"{rng.random()}"))).is_followed:
        pass
    before = driver.scheduler.stats()
    again = serve(driver, make_seq("again", prompt=seq.token_ids[:19], max_tokens=3))
    assert again.num_cached_tokens == 0
    assert driver.scheduler.stats().prefix_queried_tokens == before.prefix_queried_tokens


def test_all_are_followed_again_when_samples_begin_to_hit() -> None:
    """Twenty-four beginnings by turns: four of them are samples, which hit, and that is enough to see it."""
    driver, rng = sampling_driver(), random.Random(7)
    prompts = [[rng.randrange(2**30) for _ in range(19)] for _ in range(24)]
    for number in range(300):
        serve(driver, make_seq(f"s{number}", prompt=prompts[number % len(prompts)], max_tokens=3))
        if not driver.scheduler.kv.sampler.is_sampling:
            break
    assert not driver.scheduler.kv.sampler.is_sampling
    seq = serve(driver, distinct(rng, "new"))
    assert seq.is_followed
    assert serve(driver, make_seq("again", prompt=seq.token_ids[:19], max_tokens=3)).num_cached_tokens == 16


def test_a_preempted_one_is_entered_even_if_it_was_not_followed() -> None:
    driver, rng = sampling_driver(), random.Random(8)
    serve_first = make_seq("lead", 2, 12)
    driver.add(serve_first)
    driver.step()
    name = 0
    while True:
        seq = distinct(rng, f"{name}")
        driver.add(seq)
        driver.step()
        if not seq.is_followed:
            break
        driver.scheduler.abort(f"{name}")
        name += 1
    assert seq.num_sealed_blocks == 0
    assert driver.scheduler.preempt(seq.seq_id)
    driver.run()
    assert seq.num_recomputed_tokens < 4


@pytest.mark.parametrize("num_cpu_blocks", [0, 64])
def test_one_that_opts_out_finds_nothing_and_is_not_found(num_cpu_blocks: int) -> None:
    driver = make_driver(num_cpu_blocks=num_cpu_blocks)
    serve(driver, make_seq("first", prompt=PROMPT, max_tokens=3))
    before = driver.scheduler.stats()
    alone = serve(driver, make_seq("alone", prompt=PROMPT, max_tokens=3, use_prefix_cache=False))
    secret = [5, *PROMPT]
    serve(driver, make_seq("secret", prompt=secret, max_tokens=3, use_prefix_cache=False))
    assert driver.scheduler.stats().prefix_queried_tokens == before.prefix_queried_tokens
    curious = serve(driver, make_seq("curious", prompt=secret, max_tokens=3))
    assert (alone.num_cached_tokens, curious.num_cached_tokens) == (0, 0)


def test_one_that_opts_out_is_swapped_like_any_other_and_leaves_nothing_in_the_tier() -> None:
    driver = make_driver(num_cpu_blocks=64)
    driver.add(make_seq("lead", 2, 12), seq := make_seq("b", prompt=PROMPT, max_tokens=3, use_prefix_cache=False))
    driver.step()
    assert driver.scheduler.preempt("b")
    driver.run()
    assert driver.generated["b"] == generate("", PROMPT, 3)
    assert (seq.num_preemptions, seq.num_recomputed_tokens) == (1, 0)
    assert serve(driver, make_seq("curious", prompt=PROMPT, max_tokens=3)).num_cached_tokens == 0


def test_the_numbers_that_the_product_uses_leave_a_cache_alone_that_hits_one_token_in_a_hundred() -> None:
    sampler, seq = HitSampler(), make_seq("a", 1_000)
    for number in range(4 * WINDOW):
        sampler.observe(seq, 1_000 if number % 100 == 0 else 0)
        assert not sampler.is_sampling
    assert MIN_HIT_RATE < 0.01
