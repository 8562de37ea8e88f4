"""Prompts that lie in the CPU tier as a whole: copying them in must leave room to decode."""

import pytest

from scheduler import CacheConfig, FinishReason, PreemptionMode, Scheduler, SchedulerConfig
from tests.unit.scheduler.fake_runner import CopyFaults, Driver, generate
from tests.unit.scheduler.makers import make_seq

BLOCK_SIZE = 16
NUM_NEW_TOKENS = 40


def driver_with_prompts_in_the_tier(num_blocks: int, prompts: list[list[int]]) -> Driver:
    """All prompts were computed, swapped and have ended; then the device has held something else in every block."""
    config = SchedulerConfig(
        num_blocks * BLOCK_SIZE, max_num_batched_tokens=10_000, preemption_mode=PreemptionMode.SWAP
    )
    cache = CacheConfig(num_blocks, BLOCK_SIZE, 2 * num_blocks, kv_block_bytes=BLOCK_SIZE)
    driver = Driver(Scheduler(config, cache), faults=CopyFaults(max_delay=2))
    for number, prompt in enumerate(prompts):
        driver.add(make_seq(f"lead{number}", 2, 9), make_seq(f"old{number}", prompt=prompt, max_tokens=4))
        driver.step()
        driver.step()
        assert driver.scheduler.preempt(f"old{number}")
        driver.run()
    driver.add(make_seq("flush", num_blocks * BLOCK_SIZE - 1, 1))
    driver.run()
    return driver


@pytest.mark.parametrize(("num_blocks", "lengths"), [(32, (256, 240)), (512, (4096, 4080))])
def test_two_that_fill_the_pool_from_the_cpu_tier_do_not_keep_one_another_from_decoding(
    num_blocks: int, lengths: tuple[int, int]
) -> None:
    """16 + 15 of 32 blocks would leave one, and then neither could go on. One is let in, then the other."""
    prompts = [[length, *range(1, length)] for length in lengths]
    driver = driver_with_prompts_in_the_tier(num_blocks, prompts)
    before = driver.scheduler.stats()
    seqs = [make_seq(f"new{number}", prompt=prompt, max_tokens=NUM_NEW_TOKENS) for number, prompt in enumerate(prompts)]
    driver.add(*seqs)
    driver.run(max_steps=4 * NUM_NEW_TOKENS)
    for seq, prompt in zip(seqs, prompts, strict=True):
        assert driver.generated[seq.seq_id] == generate("", prompt, NUM_NEW_TOKENS)
        assert driver.ends[seq.seq_id].finish_reason is FinishReason.LENGTH
        assert seq.num_preemptions == 0
    stats = driver.scheduler.stats()
    num_full = [(length - 1) // BLOCK_SIZE * BLOCK_SIZE for length in lengths]
    assert stats.prefix_tier_hit_tokens - before.prefix_tier_hit_tokens == sum(num_full)
    assert stats.num_free_blocks + stats.num_cached_blocks == num_blocks
    assert (stats.num_used_cpu_blocks, stats.num_transfers) == (0, 0)
