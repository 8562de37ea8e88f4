"""A prompt whose beginning lies in the CPU tier is copied in, and only the rest of it is computed."""

from typing import Any

import pytest

from scheduler import CacheConfig, PreemptionMode, Scheduler, SchedulerConfig, Sequence, SequenceStatus
from tests.unit.scheduler.fake_runner import Driver, generate
from tests.unit.scheduler.makers import make_seq

PROMPT = [7, *range(1, 30)]
SWAP = PreemptionMode.SWAP


def driver_with_a_prompt_in_the_tier(mode: PreemptionMode = SWAP, **rates: float) -> Driver:
    """12 blocks of 4. `old` was swapped with 8 of them and has ended; the device has forgotten what it held."""
    cache = CacheConfig(12, 4, 24, kv_block_bytes=4)
    driver = Driver(Scheduler(SchedulerConfig(48, preemption_mode=SWAP), cache), lambda seq_id: "")
    driver.add(make_seq("lead", 2, 8), old := make_seq("old", prompt=PROMPT, max_tokens=6))
    driver.step()
    driver.step()
    assert driver.scheduler.preempt("old")
    driver.run()
    assert old.is_finished
    driver.add(make_seq("other", 44, 2))
    driver.run()
    config = SchedulerConfig(48, preemption_mode=mode, **rates)  # type: ignore[arg-type]
    again = Driver(Scheduler(config, cache, driver.scheduler.kv), lambda seq_id: "")
    again.runner = driver.runner
    return again


def generated(driver: Driver, seq: Sequence) -> list[int]:
    driver.add(seq)
    driver.run()
    return driver.generated[seq.seq_id]


def test_the_blocks_are_swapped_in_and_counted_as_cached() -> None:
    driver = driver_with_a_prompt_in_the_tier()
    num_computed, before = driver.runner.num_tokens, driver.scheduler.stats()
    driver.add(seq := make_seq("new", prompt=PROMPT, max_tokens=4))
    driver.step()
    assert driver.last_output is not None
    assert driver.last_output.num_swapped_blocks == (0, 7)
    assert seq.status is SequenceStatus.RUNNING
    driver.run()
    assert driver.generated["new"] == generate("", PROMPT, 4)
    assert driver.runner.num_tokens - num_computed == len(PROMPT) - 28 + 3
    stats = driver.scheduler.stats()
    assert seq.num_cached_tokens == 28
    assert stats.prefix_tier_hit_tokens - before.prefix_tier_hit_tokens == 28
    assert stats.prefix_hit_tokens - before.prefix_hit_tokens == 28
    assert stats.prefix_queried_tokens - before.prefix_queried_tokens == len(PROMPT)
    assert stats.num_used_cpu_blocks == 0


def test_what_the_device_holds_is_taken_from_there() -> None:
    driver = driver_with_a_prompt_in_the_tier()
    generated(driver, make_seq("begins alike", prompt=PROMPT[:9], max_tokens=1))
    driver.add(seq := make_seq("new", prompt=PROMPT, max_tokens=4))
    driver.step()
    assert driver.last_output is not None
    assert driver.last_output.num_swapped_blocks == (0, 5)
    driver.run()
    assert driver.generated["new"] == generate("", PROMPT, 4)
    assert seq.num_cached_tokens == 28


@pytest.mark.parametrize(
    ("mode", "rates", "is_copied"),
    [
        (PreemptionMode.AUTO, {}, True),
        (PreemptionMode.AUTO, {"swap_bytes_per_s": 2.0, "prefill_tokens_per_s": 1.0}, True),
        (PreemptionMode.AUTO, {"swap_bytes_per_s": 1.0, "prefill_tokens_per_s": 2.0}, False),
        (SWAP, {"swap_bytes_per_s": 1.0, "prefill_tokens_per_s": 2.0}, True),
        (PreemptionMode.RECOMPUTE, {}, False),
    ],
)
def test_blocks_are_copied_where_that_costs_less_than_computing_them(
    mode: PreemptionMode, rates: dict[str, float], is_copied: bool
) -> None:
    driver = driver_with_a_prompt_in_the_tier(mode, **rates)
    assert generated(driver, make_seq("new", prompt=PROMPT, max_tokens=4)) == generate("", PROMPT, 4)
    assert (driver.scheduler.stats().prefix_tier_hit_tokens > 0) == is_copied


@pytest.mark.parametrize("other", [{"cache_salt": "b"}, {"adapter": "b"}, {"tenant": "b"}])
def test_the_tier_keeps_salts_adapters_and_tenants_apart(other: dict[str, Any]) -> None:
    driver = driver_with_a_prompt_in_the_tier()
    seq = make_seq("new", prompt=PROMPT, max_tokens=4, **other)
    assert generated(driver, seq) == generate("", PROMPT, 4)
    assert (seq.num_cached_tokens, driver.scheduler.stats().prefix_tier_hit_tokens) == (0, 0)


def test_damaged_blocks_are_computed_and_the_lookup_counts_once() -> None:
    driver = driver_with_a_prompt_in_the_tier()
    before = driver.scheduler.stats()
    driver.runner.faults.p_damaged = 1.0
    driver.add(seq := make_seq("new", prompt=PROMPT, max_tokens=4))
    driver.step()
    assert seq.status is SequenceStatus.WAITING
    driver.run()
    assert driver.generated["new"] == generate("", PROMPT, 4)
    stats = driver.scheduler.stats()
    assert stats.num_damaged_blocks > 0
    assert seq.num_cached_tokens == stats.prefix_hit_tokens - before.prefix_hit_tokens == 0
    assert stats.prefix_queried_tokens - before.prefix_queried_tokens == len(PROMPT)


def test_an_abort_on_the_way_in_leaves_nothing_behind() -> None:
    driver = driver_with_a_prompt_in_the_tier()
    driver.runner.faults.hold = lambda transfer: True
    driver.add(seq := make_seq("new", prompt=PROMPT, max_tokens=4))
    driver.step()
    assert seq.status is SequenceStatus.SWAPPING_IN
    driver.scheduler.abort("new")
    driver.runner.faults.hold = lambda transfer: False
    driver.run()
    stats = driver.scheduler.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    assert (stats.num_used_cpu_blocks, stats.num_swapped) == (0, 0)
