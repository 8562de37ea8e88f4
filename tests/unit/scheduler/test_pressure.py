"""A pool a quarter too small for its load: what swapping costs, and that a burst leaves no mark."""

import random
from dataclasses import dataclass

import pytest

from scheduler import CacheConfig, PreemptionMode, SamplingParams, Scheduler, SchedulerConfig, Sequence
from tests.unit.scheduler.fake_runner import VOCAB_SIZE, CopyFaults, Driver, generate

BLOCK_SIZE = 16
SWAP, RECOMPUTE = PreemptionMode.SWAP, PreemptionMode.RECOMPUTE


@dataclass(frozen=True)
class Arrival:
    """A request of a made-up trace, and the step in which it arrives."""

    step: int
    prompt: tuple[int, ...]
    num_new_tokens: int


def made_trace(seed: int, num_arrivals: int = 80) -> list[Arrival]:
    """Short prompts and long replies, lognormal with medians of 12 and 120 tokens: all grow at once. Two a step."""
    rng = random.Random(seed)
    trace = []
    for number in range(num_arrivals):
        num_prompt = min(400, int(rng.lognormvariate(2.5, 0.8)) + 1)
        num_new = min(400, int(rng.lognormvariate(4.8, 0.5)) + 1)
        trace.append(Arrival(number // 2, tuple(rng.randrange(VOCAB_SIZE) for _ in range(num_prompt)), num_new))
    return trace


def make_driver(num_blocks: int, num_cpu_blocks: int = 0, mode: PreemptionMode = RECOMPUTE, delay: int = 0) -> Driver:
    config = SchedulerConfig(1_000, max_num_batched_tokens=256, preemption_mode=mode)
    cache = CacheConfig(num_blocks, BLOCK_SIZE, num_cpu_blocks, enable_prefix_caching=False, kv_block_bytes=BLOCK_SIZE)
    return Driver(Scheduler(config, cache), faults=CopyFaults(random.Random(1), delay))


def replay(driver: Driver, trace: list[Arrival]) -> int:
    """Run the trace to its end; the most blocks that were owned after a step."""
    most = step = 0
    while step <= trace[-1].step or driver.scheduler.has_work:
        for number, arrival in enumerate(trace):
            if arrival.step == step:
                sampling = SamplingParams(max_tokens=arrival.num_new_tokens, ignore_eos=True)
                driver.add(Sequence(f"{number}", arrival.prompt, sampling, arrival_s=driver.now))
        driver.step()
        step += 1
        most = max(most, driver.scheduler.kv.num_owned_blocks)
    for number, arrival in enumerate(trace):
        assert driver.generated[f"{number}"] == generate("", arrival.prompt, arrival.num_new_tokens)
    return most


@pytest.mark.parametrize("delay", [0, 4])
def test_a_pool_a_quarter_too_small_swaps_without_recomputing(delay: int) -> None:
    trace = made_trace(seed=20260301)
    most = replay(make_driver(10_000), trace)
    driver = make_driver(most * 3 // 4, most, SWAP, delay)
    replay(driver, trace)
    stats = driver.scheduler.stats()
    assert 0 < stats.num_preemptions_swap <= stats.num_missing_blocks
    assert (stats.num_preemptions_recompute, stats.num_recomputed_tokens) == (0, 0)
    assert driver.runner.num_tokens == sum(len(arrival.prompt) + arrival.num_new_tokens - 1 for arrival in trace)
    recomputing = make_driver(most * 3 // 4)
    replay(recomputing, trace)
    stats = recomputing.scheduler.stats()
    assert 0 < stats.num_preemptions_recompute <= stats.num_missing_blocks
    assert recomputing.runner.num_tokens == driver.runner.num_tokens + stats.num_recomputed_tokens
    assert stats.num_recomputed_tokens > 0


@pytest.mark.parametrize(("mode", "delay"), [(SWAP, 0), (SWAP, 4), (RECOMPUTE, 0)])
def test_throughput_is_back_within_two_hundred_steps_after_a_burst(mode: PreemptionMode, delay: int) -> None:
    """Twelve at a time; then sixty more at once, in a pool that holds some twenty; then twelve at a time again."""
    rng = random.Random(7)
    driver = make_driver(100, 400 if mode is SWAP else 0, mode, delay)
    num_added = 0

    def add(num_seqs: int) -> None:
        nonlocal num_added
        for _ in range(num_seqs):
            prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(5, 15))]
            sampling = SamplingParams(max_tokens=rng.randint(60, 120), ignore_eos=True)
            driver.add(Sequence(f"{num_added}", prompt, sampling, arrival_s=driver.now))
            num_added += 1

    def tokens_per_step(num_steps: int) -> float:
        num_tokens = 0
        for _ in range(num_steps):
            add(12 - driver.scheduler.num_unfinished)
            num_tokens += sum(len(output.new_token_ids) for output in driver.step())
        return num_tokens / num_steps

    tokens_per_step(60)
    before = tokens_per_step(150)
    add(60)
    tokens_per_step(200)
    stats = driver.scheduler.stats()
    assert stats.num_preemptions_swap + stats.num_preemptions_recompute > 0
    assert tokens_per_step(150) >= 0.95 * before
