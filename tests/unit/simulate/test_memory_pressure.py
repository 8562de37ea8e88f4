"""What a pool that is too small costs, on the costs of two known machines: the promises of docs/memory.md."""

import random
from dataclasses import replace
from typing import Any

import pytest

from ops.simulate.adapt import scaled, window, with_burst
from ops.simulate.burst import recovery
from ops.simulate.compare import compare_modes
from ops.simulate.cost import CostModel
from ops.simulate.presets import PRESETS, cost_model, figures_of
from ops.simulate.runs import EngineSizes, needed_blocks, share_of_need, simulate
from ops.simulate.traces import Trace, TraceRequest, read_trace
from tests.unit.simulate.test_simulation import quiet
from tests.unit.simulate.traces_at_hand import AZURE, MOONCAKE, public_trace

BLOCK_SIZE = 16


def growing_trace(num_requests: int = 120, gap_s: float = 0.04) -> Trace:
    """Short prompts and long replies, so that all who run grow at once."""
    generator = random.Random(20231116)
    now, requests = 0.0, []
    for index in range(num_requests):
        now += generator.expovariate(1 / gap_s)
        requests.append(TraceRequest(index, now, generator.randint(20, 120), generator.randint(100, 400)))
    return Trace("pagemill", tuple(requests))


def public(name: str, num_requests: int, speed_up: float) -> Trace:
    """A public trace's first requests, prompts shorter and replies longer: as they are, hardly any is preempted."""
    trace = window(read_trace(public_trace(name)), num_requests, None)
    lengths, replies = (0.5, 4) if name == AZURE else (0.1, 20)
    return scaled(trace, speed_up=speed_up, lengths=lengths, replies=replies)


def model_of(preset: str, **given: float) -> CostModel:
    return cost_model(figures_of(preset, dict(given)))


def too_small(trace: Trace, model: CostModel, share: float, **rest: Any) -> EngineSizes:
    """A pool of `share` of the need, and a CPU tier that holds all of the need."""
    sizes = EngineSizes(1, BLOCK_SIZE, 64, 6144, enable_prefix_caching=True, **rest)
    need = needed_blocks(trace, sizes, model, quiet)
    return replace(sizes, num_blocks=share_of_need(trace, sizes, need, share), num_swap_blocks=need)


def default_step_blocks(preset: str, model: CostModel) -> int:
    return int(PRESETS[preset].swap_step_mib * 2**20 / (model.kv_bytes * BLOCK_SIZE))


@pytest.mark.parametrize("name", [None, AZURE])
def test_a_pool_a_quarter_too_small_recomputes_nothing_and_preempts_no_more_than_blocks_are_missing(
    name: str | None,
) -> None:
    trace = growing_trace() if name is None else public(name, 100, speed_up=2)
    model = model_of("13b-a100")
    step_blocks = default_step_blocks("13b-a100", model)
    sizes = too_small(trace, model, 0.75, preemption_mode="swap", swap_step_blocks=step_blocks, write_behind_blocks=1)
    summary = simulate(trace, sizes, model, progress=quiet)[0].summary()
    assert summary["requests"] == len(trace.requests)
    assert summary["recomputed_tokens"] == summary["preemptions"]["recompute"] == 0
    assert 0 < summary["preemptions"]["swap"] <= summary["missing_blocks"]


@pytest.mark.parametrize("preset", ["13b-a100", "8b-h100"])
def test_the_swap_of_long_sequences_at_most_doubles_the_others_p99_between_tokens(preset: str) -> None:
    """Twelve that decode, and four of thousands of tokens that are swapped; nothing is written behind. Without the
    limit of a step's copies others wait three times as long and more.
    """
    short = [TraceRequest(index, 0.0, 100 + 7 * index, 1200) for index in range(12)]
    long = [TraceRequest(12 + index, 0.01 + 0.01 * index, 4000 + 500 * index, 900) for index in range(4)]
    trace, model = Trace("pagemill", (*short, *long)), model_of(preset)
    slowdowns = []
    for step_blocks in (0, default_step_blocks(preset, model)):
        sizes = too_small(trace, model, 0.75, preemption_mode="swap", swap_step_blocks=step_blocks)
        summary = simulate(trace, sizes, model, progress=quiet)[0].summary()
        assert summary["preemptions"]["swap"] == 3
        beside, without = (
            summary["latency_s"][f"inter_token_{which}_copies"]["p99"] for which in ("beside", "without")
        )
        slowdowns.append(beside / without)
    unlimited, limited = slowdowns
    assert unlimited > 3
    assert limited <= 2


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_throughput_is_back_within_200_steps_after_a_burst(mode: str) -> None:
    """More comes than the pool lets through, so that the rate before it is the best that there is."""
    trace, burst_s = with_burst(growing_trace(240, gap_s=0.1), 60)
    model = model_of("13b-a100")
    sizes = EngineSizes(400, BLOCK_SIZE, 64, 6144, True, num_swap_blocks=2_000, preemption_mode=mode)
    metrics, refused = simulate(trace, sizes, model, progress=quiet)
    summary, found = metrics.summary(), recovery(metrics, burst_s)
    assert refused == []
    assert sum(summary["preemptions"].values()) > 0
    assert found["steps_until_back"] <= 200
    assert found["after_200_steps_tokens_per_s"] >= 0.95 * found["before_tokens_per_s"]


@pytest.mark.parametrize(
    ("name", "preset", "link_gb_s"),
    [
        (None, "13b-a100", 5.0),
        (None, "8b-h100", 3.0),
        (AZURE, "13b-a100", 25.0),
        (MOONCAKE, "8b-h100", 50.0),
    ],
)
def test_auto_is_never_worse_than_the_better_fixed_mode_by_more_than_a_twentieth(
    name: str | None, preset: str, link_gb_s: float
) -> None:
    """Also on links that are so slow that it has to recompute, or to do either."""
    speed_up = 2.0 if name == AZURE else 1.0
    trace = growing_trace(80) if name is None else public(name, 70, speed_up)
    model = model_of(preset, link_gb_s=link_gb_s)
    sizes = too_small(trace, model, 0.5, swap_step_blocks=default_step_blocks(preset, model))
    found = compare_modes(trace, sizes, model, lambda stage: quiet)
    preempted = {mode: summary["preemptions"] for mode, summary in found["modes"].items()}
    assert preempted["swap"]["swap"] > 0
    assert preempted["recompute"]["recompute"] > 0
    assert min(found["auto_by_best"].values()) >= 0.95
