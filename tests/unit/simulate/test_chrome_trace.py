"""The Chrome trace: events that a viewer accepts, and rows that tell what happened."""

import io
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ops.simulate.chrome_trace import ENGINE, REQUESTS
from ops.simulate.metrics import Metrics
from ops.simulate.runs import simulate
from tests.unit.simulate.test_simulation import SLOW, quiet, sizes
from tests.unit.simulate.traces_at_hand import made_trace

Events = list[dict[str, Any]]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Metrics, Events]:
    """A run under pressure, and its events."""
    trace = made_trace(Path(tmp_path_factory.mktemp("traces")), 40, seed=6, has_hashes=False)
    file = io.StringIO()
    metrics, _ = simulate(trace, sizes(12), SLOW, chrome_file=file, progress=quiet)
    return metrics, json.loads(file.getvalue())["traceEvents"]


def bars_of(events: Events) -> dict[tuple[int, int], Events]:
    rows: dict[tuple[int, int], Events] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append(event)
    return rows


def test_every_event_has_its_phase_time_and_row(traced: tuple[Metrics, Events]) -> None:
    for event in traced[1]:
        assert event["ph"] in {"M", "X", "C", "i"}
        assert event["name"]
        assert all(isinstance(event[key], int) and event[key] >= 0 for key in ("ts", "pid", "tid"))
        assert event["ph"] != "X" or event["dur"] >= 0
        assert event["ph"] != "i" or event["s"] == "t"


def test_bars_of_a_row_follow_one_another_without_gap_or_overlap(traced: tuple[Metrics, Events]) -> None:
    for (pid, _), bars in bars_of(traced[1]).items():
        for one, other in pairwise(bars):
            end = one["ts"] + one["dur"]
            assert end == other["ts"] if pid == REQUESTS else end <= other["ts"]


def test_each_request_has_a_row_of_its_own_that_begins_with_waiting_and_a_prefill(
    traced: tuple[Metrics, Events],
) -> None:
    rows = {tid: bars for (pid, tid), bars in bars_of(traced[1]).items() if pid == REQUESTS}
    named = {event["tid"] for event in traced[1] if event["ph"] == "M" and event["pid"] == REQUESTS} - {0}
    assert set(rows) == named == set(range(1, 41))
    assert all([bar["name"] for bar in bars[:2]] == ["waiting", "prefill"] for bars in rows.values())
    assert {bar["name"] for bars in rows.values() for bar in bars} == {
        *("waiting", "prefill", "decode", "lost (recompute)", "catch up")
    }


def test_each_preemption_is_a_mark_and_each_step_a_bar(traced: tuple[Metrics, Events]) -> None:
    metrics, events = traced
    summary = metrics.summary()
    marks = [event for event in events if event["ph"] == "i"]
    assert len(marks) == summary["preemptions"]["recompute"] > 0
    assert {mark["name"] for mark in marks} == {"preempted: recompute"}
    steps = bars_of(events)[ENGINE, 1]
    assert len(steps) == summary["steps"]
    assert sum(step["args"]["tokens"] for step in steps) == summary["computed_tokens"]
    assert max(event["args"]["owned"] for event in events if event["name"] == "KV blocks") == metrics.peak_blocks
