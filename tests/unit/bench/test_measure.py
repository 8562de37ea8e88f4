"""Who runs when, what is checked, and what disturbs."""

import os
import time
from dataclasses import asdict
from typing import Any

import pytest

from ops.bench.errors import BenchError
from ops.bench.machine import Disturbance, DisturbanceMeter, machine_facts, warnings_of
from ops.bench.measure import Measurement, PeerSide
from ops.bench.peers.catalog import BY_NAME
from ops.bench.runs import PeerRun
from ops.bench.workload import Lengths
from tests.unit.bench.made import ours_run

LENGTHS = [Lengths(5, 2), Lengths(7, 3), Lengths(40, 8)]


class ScriptedSide:
    """A side that answers at once, and writes down in `calls` what it was told."""

    def __init__(self, name: str, calls: list[tuple[str, str, Any]], **answers: Any) -> None:
        self._name = name
        self._calls = calls
        self._answers = answers
        self.used_s = 0.0

    def ask(self, do: str, **arguments: Any) -> Any:
        self._calls.append((self._name, do, arguments))
        if do in self._answers:
            return self._answers[do]
        if do == "prepare":
            return {}
        num_output = sum(each[1] for each in arguments["requests"])
        ids = list(range(arguments["requests"][0][1]))
        if self._name == "ours":
            return asdict(ours_run(num_output, first_ids=ids))
        return asdict(PeerRun(1.0, num_output, 1, [1.0] * len(arguments["requests"]), ids))

    def cpu_seconds(self) -> float:
        return self.used_s


def measurement(ours: ScriptedSide, peer: ScriptedSide | None, said: list[str] | None = None) -> Measurement:
    return Measurement(
        ours,
        [] if peer is None else [PeerSide(BY_NAME["transformers"], peer)],
        vocab_size=100,
        block_size=16,
        dtype="float32",
        seed=0,
        num_alternations=3,
        say=(said if said is not None else []).append,
    )


def test_ours_and_the_peer_take_turns_on_the_same_requests_after_a_warm_up() -> None:
    calls: list[tuple[str, str, Any]] = []
    said: list[str] = []
    result = measurement(ScriptedSide("ours", calls), ScriptedSide("peer", calls), said).run_batch(2, LENGTHS)
    assert [(name, do) for name, do, _ in calls] == [
        *(("ours", "prepare"), ("ours", "run"), ("peer", "prepare"), ("peer", "run")),
        *[("ours", "run"), ("peer", "run")] * 3,
    ]
    assert calls[0][2] == {"batch": 2, "num_kv_blocks": 3 + 1}
    assert calls[2][2] == {"batch": 2, "num_kv_tokens": 40 + 8}
    runs = [arguments["requests"] for _, do, arguments in calls if do == "run"]
    assert runs[::2] == runs[1::2]
    lengths = [[(len(ids), num_output) for ids, num_output in run] for run in runs[::2]]
    assert lengths[0] == [(5, 2), (7, 3), (32, 4)]
    assert lengths[1:] == [[(5, 2), (7, 3), (40, 8)]] * 3
    # Ids are other ones in each alternation, so that nothing is found in a cache.
    assert len({tuple(run[2][0]) for run in runs[::2]}) == 4
    assert all(arguments["batch"] == 2 for name, _, arguments in calls if name == "peer")
    assert (len(result.ours), len(result.peers["transformers"]), len(result.disturbances)) == (3, 3, 6)
    assert result.check is not None
    assert (result.check.verdict, result.check.num_tokens) == ("equal", 2)
    assert said == [f"batch 2, {n} of 3: ours 13.0 tokens/s, transformers 13.0" for n in (1, 2, 3)]


def test_without_a_peer_ours_runs_alone_and_nothing_is_checked() -> None:
    calls: list[tuple[str, str, Any]] = []
    result = measurement(ScriptedSide("ours", calls), None).run_batch(1, LENGTHS)
    assert [do for _, do, _ in calls] == ["prepare", "run", "run", "run", "run"]
    assert (len(result.ours), result.peers, result.check) == (3, {}, None)


@pytest.mark.parametrize(
    ("gaps", "verdict"), [([0.0, 0.0], "equal"), ([0.0, 0.0009], "tie"), ([0.0, 0.0011], "different")]
)
def test_other_tokens_than_the_peer_s_are_judged_by_its_logits(gaps: list[float], verdict: str) -> None:
    calls: list[tuple[str, str, Any]] = []
    theirs = asdict(PeerRun(1.0, 13, 1, [1.0] * 3, [0, 9]))
    peer = ScriptedSide("peer", calls, run=theirs, judge=gaps)
    check = measurement(ScriptedSide("ours", calls), peer).run_batch(2, LENGTHS).check
    assert check is not None
    assert check.verdict == verdict
    judged = next(arguments for _, do, arguments in calls if do == "judge")
    assert judged["ids"] == [0, 1]
    assert list(judged["prompt_ids"]) == list(next(a for _, do, a in calls[4:] if do == "run")["requests"][0][0])
    if verdict != "equal":
        assert (check.position, check.gap) == (1, gaps[1])


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"num_output_tokens": 3}, "the engine made 3 tokens instead of"),
        ({"num_prefix_hits": 16}, "16 prompt tokens came from the prefix cache"),
    ],
)
def test_a_run_that_does_not_count_ends_the_bench(answer: dict[str, int], why: str) -> None:
    run = asdict(ours_run(9)) | answer
    ours = ScriptedSide("ours", [], run=run)
    with pytest.raises(BenchError, match=why):
        measurement(ours, None).run_batch(1, [Lengths(5, 4), Lengths(5, 4), Lengths(5, 1)])


def test_the_meter_tells_the_sleeping_side_s_work_from_the_running_one_s() -> None:
    running, idle = ScriptedSide("ours", []), ScriptedSide("peer", [])
    with DisturbanceMeter(running, [running, idle]) as meter:
        started, before = time.perf_counter(), sum(os.times()[:2])
        while sum(os.times()[:2]) - before < 0.1:  # a tenth of a second of work that no side owns up to
            pass
        running.used_s, idle.used_s = 0.0, 0.05
        wall_s = time.perf_counter() - started
    found = meter.result()
    assert 0 < found.idle_share <= 0.05 / wall_s
    assert 0 <= found.others_share <= 1.01


def test_a_busy_machine_and_a_side_awake_are_warned_of_and_an_idle_machine_is_not() -> None:
    idle = {"busy_share": 0.01, "load_average": [0.1, 0.1, 0.1]}
    assert warnings_of(idle, [Disturbance(9.0, 0.01, 0.0), Disturbance(0.02, 1.0, 0.5)]) == []
    busy = {"busy_share": 0.6, "load_average": [3.2, 1.0, 1.0]}
    lines = warnings_of(busy, [Disturbance(9.0, 0.01, 0.0), Disturbance(1.5, 0.3, 0.5)])
    assert [line.split(":")[0] for line in lines] == [
        "the machine was 60% busy before the bench began (load average 3.2)",
        "other processes took up to 30% of the machine during a run",
        "a side that should have slept took up to 50% of a core while the other ran",
    ]


def test_the_machine_s_facts_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    facts = machine_facts()
    assert facts["usable_cpus"] >= 1
    assert facts["memory_bytes"] > 1 << 28
    assert {"pagemill", "torch", "transformers"} <= set(facts["versions"])
    assert facts["thread_variables"]["OMP_WAIT_POLICY"] == "passive"
    assert len(facts["load_average"]) == 3
    assert 0 <= facts["busy_share"] <= 1
