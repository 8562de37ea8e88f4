"""Whole simulations on small traces: totals, order, determinism, and the scheduler's invariants after every step."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ops.simulate.cost import CostModel
from ops.simulate.driver import SimulatedStep, Simulation
from ops.simulate.errors import SimulateError
from ops.simulate.metrics import Metrics
from ops.simulate.runs import EngineSizes, make_scheduler, needed_blocks, share_of_need, simulate
from ops.simulate.traces import Trace, TraceRequest, read_trace
from scheduler import FinishReason, Scheduler, invariants
from tests.unit.simulate.test_cost import MODEL
from tests.unit.simulate.traces_at_hand import made_trace, write_lines

# A decode alone takes a hundredth of a second here, so that requests pile up.
SLOW = CostModel(1e6, 100, 1e5, 10, 1e8, 1e9, 1e7, 1e-4)


def sizes(num_blocks: int, **rest: Any) -> EngineSizes:
    values = {"block_size": 16, "max_num_seqs": 32, "max_num_batched_tokens": 256, "enable_prefix_caching": True}
    return EngineSizes(num_blocks=num_blocks, **(values | rest))


def quiet(done: int, total: int) -> None:
    assert 0 <= done <= total


class Watcher:
    """An observer that checks what every step must keep."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.tokens: Counter[str] = Counter()
        self.arrivals: dict[str, float] = {}
        self.ends: dict[str, FinishReason] = {}
        self.num_preempted = 0
        self.now = 0.0

    def arrived(self, seq_id: str, request: TraceRequest) -> None:
        assert request.arrival_s <= self.now
        self.arrivals[seq_id] = request.arrival_s

    def stepped(self, step: SimulatedStep) -> None:
        invariants.check(self.scheduler)
        assert step.start_s >= self.now
        self.now = step.end_s
        self.num_preempted += len(step.preempted)
        for output in step.outputs:
            assert step.start_s >= self.arrivals[output.seq_id]
            self.tokens[output.seq_id] += len(output.new_token_ids)
            if output.finish_reason is not None:
                self.ends[output.seq_id] = output.finish_reason


def run_watched(trace: Trace, engine: EngineSizes) -> tuple[Watcher, Metrics, Simulation]:
    scheduler = make_scheduler(trace, engine, SLOW)
    watcher, metrics = Watcher(scheduler), Metrics(engine.block_size)
    simulation = Simulation(trace, scheduler, SLOW, [watcher, metrics])
    while simulation.advance():
        pass
    assert not scheduler.has_work
    return watcher, metrics, simulation


@pytest.mark.parametrize("has_hashes", [True, False])
def test_every_request_gets_exactly_its_output_tokens_under_pressure(tmp_path: Path, has_hashes: bool) -> None:
    trace = made_trace(tmp_path, 60, seed=1, has_hashes=has_hashes)
    watcher, metrics, simulation = run_watched(trace, sizes(150 if has_hashes else 12))
    summary = metrics.summary()
    assert simulation.refused == []
    assert watcher.tokens == {f"r{each.index}": each.num_output_tokens for each in trace.requests}
    assert set(watcher.ends.values()) == {FinishReason.LENGTH}
    assert summary["requests"] == len(watcher.ends) == 60
    assert summary["output_tokens"] == sum(each.num_output_tokens for each in trace.requests)
    assert summary["preemptions"] == {"recompute": watcher.num_preempted, "swap": 0}
    assert watcher.num_preempted > 0
    assert summary["recomputed_tokens"] > 0
    assert sum(each["preemptions"] for each in summary["over_time"]) == watcher.num_preempted
    assert (summary["prefix_hit_share"] > 0) == has_hashes


def test_what_is_computed_is_all_tokens_but_the_last_and_those_found_and_those_computed_again(tmp_path: Path) -> None:
    trace = made_trace(tmp_path, 40, seed=2, has_hashes=False)
    summary = run_watched(trace, sizes(12, enable_prefix_caching=False))[1].summary()
    once = sum(each.num_tokens - 1 for each in trace.requests)
    assert summary["computed_tokens"] == once + summary["recomputed_tokens"]
    assert summary["recompute_tax"] == summary["recomputed_tokens"] / summary["computed_tokens"]


def test_the_same_trace_gives_the_same_figures(tmp_path: Path) -> None:
    trace = made_trace(tmp_path, 40, seed=3)
    first, again = (simulate(trace, sizes(150), SLOW, progress=quiet)[0].summary() for _ in range(2))
    assert json.dumps(first) == json.dumps(again)


def test_times_of_one_request_alone_are_sums_done_by_hand(tmp_path: Path) -> None:
    """Steps of 4 + 2 prompt tokens, then two decodes, with the weights read in 10 s and 0.2 s a token of context."""
    lines = [{"arrival_ms": 5000, "prompt_tokens": 6, "output_tokens": 3}]
    trace = read_trace(write_lines(tmp_path / "one", lines))
    engine = sizes(5, block_size=4, max_num_batched_tokens=4)
    summary = simulate(trace, engine, MODEL, progress=quiet)[0].summary()
    first_token_s = (10 + 0.8 + 0.5) + (10 + 1.2 + 0.5)
    assert summary["latency_s"]["ttft"]["p50"] == pytest.approx(first_token_s)
    assert summary["latency_s"]["end_to_end"]["p99"] == pytest.approx(first_token_s + 11.9 + 12.1)
    assert summary["latency_s"]["inter_token"]["p50"] == pytest.approx(12.0)
    assert summary["latency_s"]["queue"]["p95"] == 0
    assert (summary["steps"], summary["busy_share"], summary["recompute_tax"]) == (4, 1.0, 0.0)
    assert summary["kv"]["peak_blocks"] == 2


def test_the_clock_goes_on_to_the_next_arrival_where_nothing_is_to_be_done(tmp_path: Path) -> None:
    lines = [{"arrival_ms": at, "prompt_tokens": 6, "output_tokens": 3} for at in (0, 1_000_000)]
    trace = read_trace(write_lines(tmp_path / "two", lines))
    summary = simulate(trace, sizes(5), MODEL, progress=quiet)[0].summary()
    assert summary["latency_s"]["queue"]["p99"] == 0
    assert summary["simulated_s"] == pytest.approx(1000 + summary["latency_s"]["end_to_end"]["p50"])
    assert summary["over_time"][5]["kv_owned_share"] is None


def test_a_request_that_cannot_fit_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    lines = [{"arrival_ms": 0, "prompt_tokens": num, "output_tokens": 8} for num in (20, 200, 30)]
    trace = read_trace(write_lines(tmp_path / "trace", lines))
    metrics, refused = simulate(trace, sizes(4), MODEL, progress=quiet)
    assert refused == [1]
    assert metrics.num_finished == 2
    with pytest.raises(SimulateError, match="not one of 3 requests fits a pool of 1 blocks of 16 tokens"):
        simulate(trace, sizes(1), MODEL, progress=quiet)


def test_the_need_is_the_peak_of_a_run_in_which_nobody_is_preempted(tmp_path: Path) -> None:
    trace = made_trace(tmp_path, 60, seed=4, has_hashes=False)
    engine = sizes(1)
    need = needed_blocks(trace, engine, SLOW, quiet)
    ample = simulate(trace, sizes(10 * need), SLOW, progress=quiet)[0].summary()
    assert ample["kv"]["peak_blocks"] == need
    assert ample["preemptions"] == {"recompute": 0, "swap": 0}
    assert share_of_need(trace, engine, need, 0.75) == round(0.75 * need)
    assert share_of_need(trace, engine, need, 0.01) == -(-max(each.num_tokens for each in trace.requests) // 16)


def test_an_important_request_passes_those_that_wait(tmp_path: Path) -> None:
    lines = [{"arrival_ms": n, "prompt_tokens": 100, "output_tokens": 8, "priority": int(n == 9)} for n in range(10)]
    trace = read_trace(write_lines(tmp_path / "trace", lines))
    ends = list(run_watched(trace, sizes(8))[0].ends)
    assert ends.index("r9") < 3
