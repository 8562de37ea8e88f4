"""Arrivals, and the sweep over their rates."""

import json
import statistics
from itertools import pairwise
from pathlib import Path

import click
import pytest

from ops.bench.arrivals import BURST, PATTERNS, POISSON, TRACE, arrivals_of
from ops.bench.cli import main
from ops.bench.errors import BenchError
from ops.bench.rates import COLUMNS, summary_of
from tests.tiny_checkpoint import CONFIG
from tests.unit.bench.made import ours_run

RECORDED = [3.0, 3.0, 4.0, 8.0, 11.0]


def test_arrivals_are_a_function_of_pattern_rate_and_seed() -> None:
    assert arrivals_of(POISSON, 50, 2.0, seed=3) == arrivals_of(POISSON, 50, 2.0, seed=3)
    assert arrivals_of(POISSON, 50, 2.0, seed=3) != arrivals_of(POISSON, 50, 2.0, seed=4)
    assert arrivals_of(POISSON, 50, 4.0, seed=3) == pytest.approx(
        [each / 2 for each in arrivals_of(POISSON, 50, 2.0, seed=3)]
    )


def test_independent_arrivals_have_the_rate_and_exponential_gaps() -> None:
    times = arrivals_of(POISSON, 20_000, 5.0, seed=0)
    gaps = [after - before for before, after in pairwise(times)]
    assert times[0] == 0
    assert min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.05)


def test_bursts_come_at_once_and_have_the_same_rate() -> None:
    times = arrivals_of(BURST, 20_000, 5.0, seed=0, burst_size=8)
    bursts = sorted(set(times))
    assert [times.count(each) for each in bursts[:20]] == [8] * 20
    assert len(times) / times[-1] == pytest.approx(5.0, rel=0.1)


def test_recorded_times_are_stretched_by_one_factor() -> None:
    times = arrivals_of(TRACE, 5, 2.0, seed=0, recorded_s=RECORDED)
    assert times == pytest.approx([0.0, 0.0, 0.25, 1.25, 2.0])
    assert arrivals_of(TRACE, 2, 2.0, seed=0, recorded_s=RECORDED) == [0.0, 0.0]


def test_a_run_s_waiting_is_told_in_percentiles() -> None:
    found = summary_of(ours_run(20.0))
    assert found["ttft_s"] == pytest.approx({"p50": 0.25, "p95": 0.295, "p99": 0.299})
    assert (found["tokens_per_s"], found["wall_s"]) == (20.0, 1.0)


def test_a_sweep_serves_the_same_requests_at_each_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of random weights: a folder with a config.json is all that is needed."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    trace = tmp_path / "trace.csv"
    rows = "".join(f"2023-11-16 18:15:0{second}.0000000,100,30\n" for second in range(5))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    words: list[object] = ["rates", "--model", tmp_path, "--load-format", "dummy", "--cache-dir", tmp_path]
    words += ["--num-threads", 1, "--engine-mode", "inprocess", "--dtype", "float32", "--device", "cpu"]
    words += ["--rates", "10,40"]
    words += ["--num-requests", 5, "--workload", "azure", "--trace", trace, "--arrivals", "trace"]
    assert main([str(word) for word in (*words, "--json", tmp_path / "rates.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    assert json.loads((tmp_path / "rates.json").read_text()) == report
    assert lines[0].split("\t") == list(COLUMNS)
    options = report["options"]
    assert (options["load_format"], options["dtype"], options["device"]) == ("dummy", "float32", "cpu")
    assert [line.split("\t")[:2] for line in lines[1:-1]] == [["10", "pagemill"], ["40", "pagemill"]]
    assert main(["tables", str(tmp_path / "rates.json")]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in table] == ["| requests/s", "| ---", "| 10", "| 40", ""]
    for rate, least_s in zip(report["rates"], (0.4, 0.1), strict=True):
        found = rate["engines"]["pagemill"]
        # The last request comes after so long, and the sweep never waits for one before it.
        assert found["wall_s"] > least_s
        assert 0 < found["ttft_s"]["p50"] <= found["ttft_s"]["p95"] <= found["reply_s"]["p99"]
        assert found["tokens_per_s"] == pytest.approx(15 / found["wall_s"])


def test_what_can_not_be_swept_is_refused_before_anything_starts() -> None:
    with pytest.raises(BenchError, match="--arrivals trace needs --workload azure and --trace FILE"):
        main(["rates", "--arrivals", "trace"])
    with pytest.raises(click.BadParameter, match="there is no peer vlm: use transformers"):
        main(["rates", "--peers", "vlm"])


def test_every_pattern_begins_at_once_and_rises() -> None:
    for pattern in PATTERNS:
        times = arrivals_of(pattern, 5, 3.0, seed=1, burst_size=2, recorded_s=RECORDED)
        assert times[0] == 0
        assert times == sorted(times)
