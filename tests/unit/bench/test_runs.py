"""Percentiles, spreads and ratios, and the account of a run."""

import math

import pytest

from ops.bench.errors import BenchError
from ops.bench.recorder import Recorder
from ops.bench.runs import PeerRun, percentile, ratios, spread
from scheduler.output import FinishReason, SchedulerStats, SequenceOutput
from tests.unit.bench.made import ours_run
from worker.engine import StepTimes


def peer_run(tokens_per_s: float) -> PeerRun:
    return PeerRun(wall_s=10.0, num_output_tokens=round(10 * tokens_per_s), num_steps=1, reply_s=[10.0], first_ids=[1])


def test_percentiles_lie_between_the_nearest_ranks() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, percent) for percent in (0, 50, 100)] == [1.0, 2.5, 4.0]
    assert percentile(values, 95) == pytest.approx(3.85)
    assert percentile([7.0], 95) == 7.0
    assert math.isnan(percentile([], 50))


def test_a_spread_is_median_and_range() -> None:
    found = spread([3.0, 1.0, 9.0])
    assert (found.median, found.low, found.high) == (3.0, 1.0, 9.0)


def test_ratios_pair_the_runs_of_one_alternation() -> None:
    """The machine became twice as slow after the first alternation: the ratio is the same."""
    ours = [ours_run(tokens_per_s=80.0), ours_run(tokens_per_s=40.0)]
    assert ratios(ours, [peer_run(20.0), peer_run(10.0)]) == [4.0, 4.0]


def stats(filled: int, allocated: int, hits: int = 0) -> SchedulerStats:
    return SchedulerStats(0, 0, 0, 99, 99, 0, filled, allocated, 0, 0, 0, 0, hits)


def token(seq_id: str, token_id: int, *, is_last: bool = False) -> SequenceOutput:
    return SequenceOutput(seq_id, (token_id,), FinishReason.LENGTH if is_last else None)


def test_a_run_of_three_requests_in_two_places_is_accounted_for() -> None:
    recorder = Recorder(3, started_s=10.0, before=StepTimes(5, 2.0, 1.0), num_hits_before=16)
    # Of the prompts, nothing is drawn yet; then 0 and 1 get tokens; 1 ends, so 2 comes in; a step without work is last.
    recorder.absorb(11.0, [], stats(8, 16, 16), StepTimes(6, 2.9, 1.8))
    recorder.absorb(12.0, [token("0", 7), token("1", 8, is_last=True)], stats(12, 16, 16), StepTimes(7, 3.8, 2.6))
    was_done = recorder.is_done
    recorder.absorb(14.0, [token("0", 9), token("2", 3)], stats(16, 32, 32), StepTimes(8, 5.7, 4.4))
    recorder.absorb(
        17.0, [token("0", 9, is_last=True), token("2", 4, is_last=True)], stats(0, 0, 32), StepTimes(9, 8.6, 7.0)
    )
    assert (was_done, recorder.is_done) == (False, True)
    run = recorder.run(batch=2)
    assert (run.wall_s, run.num_output_tokens, run.num_steps) == (7.0, 6, 4)
    assert run.tokens_per_s == pytest.approx(6 / 7)
    assert (run.step_s, run.forward_s) == pytest.approx((6.6, 6.0))
    assert run.host_share == pytest.approx(1 / 7)
    assert run.kv_use == pytest.approx((8 / 16 + 12 / 16 + 16 / 32) / 3)
    assert run.num_slots_read == 8 + 12 + 16
    assert run.num_prefix_hits == 16
    # Request 2 waits for a place until 12.0, when request 1 ends.
    assert run.ttft_s == [2.0, 2.0, 2.0]
    assert run.reply_s == [7.0, 2.0, 5.0]
    assert run.gap_s == [2.0, 3.0, 3.0]
    assert run.first_ids == [7, 9, 9]


def test_a_step_without_a_forward_pass_is_no_step() -> None:
    recorder = Recorder(1, started_s=0.0, before=StepTimes(1, 1.0, 1.0), num_hits_before=0)
    recorder.absorb(0.5, [], stats(0, 0), StepTimes(2, 1.1, 1.0))
    recorder.absorb(1.0, [token("0", 1, is_last=True)], stats(4, 16), StepTimes(3, 1.6, 1.5))
    run = recorder.run(batch=1)
    assert run.num_steps == 1
    assert run.kv_use == 0.25
    assert run.gap_s == []


def test_a_failed_request_ends_the_bench() -> None:
    recorder = Recorder(1, started_s=0.0, before=StepTimes(), num_hits_before=0)
    refusal = SequenceOutput("0", (), FinishReason.ERROR, error="the prompt is too long")
    with pytest.raises(BenchError, match="request 0 failed: the prompt is too long"):
        recorder.absorb(1.0, [refusal], stats(0, 0), StepTimes())
