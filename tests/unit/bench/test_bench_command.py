"""The whole command on a tiny checkpoint, as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ops.bench.peers.catalog import BY_NAME
from ops.bench.report import DETAIL_COLUMNS, THROUGHPUT_COLUMNS
from tests.tiny_checkpoint import write_tiny_checkpoint

TIMEOUT_S = 200
STATIC, ONE_BY_ONE = BY_NAME["transformers"].label, BY_NAME["transformers"].alone


def run_bench(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ops.cli", "bench", *words],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def result(folder: Path) -> subprocess.CompletedProcess[str]:
    """A run of one alternation at batches 1 and 3, and its JSON in a file beside the checkpoint."""
    words = ["--quick", "--batches", "1,3", "--model", str(folder), "--num-threads", "1"]
    return run_bench(*words, "--cache-dir", str(folder / "cache"), "--json", str(folder / "bench.json"))


@pytest.fixture(scope="module")
def report(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert result.returncode == 0, result.stderr
    parsed: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return parsed


def test_the_tables_have_a_row_for_each_batch_and_engine(result: subprocess.CompletedProcess[str]) -> None:
    rows = [line.split("\t") for line in result.stdout.splitlines()[:-1]]
    assert list(THROUGHPUT_COLUMNS) in rows
    assert list(DETAIL_COLUMNS) in rows
    shown = [(row[0], row[1]) for row in rows if len(row) == len(THROUGHPUT_COLUMNS)][1:]
    assert shown == [("1", "pagemill"), ("1", ONE_BY_ONE), ("3", "pagemill"), ("3", STATIC), ("3", ONE_BY_ONE)]
    assert [row[0] for row in rows if len(row) == len(DETAIL_COLUMNS)][1:] == ["1", "3"]


def test_the_last_line_is_the_whole_result_as_json(report: dict[str, Any], folder: Path) -> None:
    assert json.loads((folder / "bench.json").read_text()) == report
    assert report["engine"]["dtype"] == report["peers"]["transformers"]["dtype"] == "float32"
    assert report["peers"]["transformers"]["threads"] == report["limits"]["threads"] == 1
    assert report["limits"]["read_bytes_per_s"] > 1e8
    assert report["limits"]["operations_per_s"] > 1e8
    assert [batch["batch"] for batch in report["batches"]] == [1, 3]
    for batch in report["batches"]:
        ours = batch["ours"]
        assert batch["requests"] == max(2, batch["batch"])
        assert len(ours["tokens_per_s"]["values"]) == 1
        assert ours["tokens_per_s"]["median"] > 0
        assert 0 < ours["kv_use"]["median"] <= 1
        assert 0 < ours["engine_host_share"]["median"] < ours["host_share"]["median"] < 1
        assert ours["bandwidth_share"]["median"] > 0
        assert ours["arithmetic_share"]["median"] > 0
        assert len(batch["disturbances"]) == 2


def test_a_quick_run_is_too_small_to_be_judged_by_the_house_s_bars(report: dict[str, Any]) -> None:
    assert report["bars"] == []


def test_both_sides_generated_the_same_tokens(report: dict[str, Any], result: subprocess.CompletedProcess[str]) -> None:
    assert report["is_token_check_passed"]
    assert [batch["token_check"]["verdict"] for batch in report["batches"]] == ["equal", "equal"]
    assert result.stderr.count("equal the peer's") == 2


def test_the_sides_slept_while_they_were_not_running(report: dict[str, Any]) -> None:
    """Processor time comes in ticks of 10 ms, so that a run this short is judged by seconds, not by shares."""
    for batch in report["batches"]:
        walls = [*batch["ours"]["wall_s"], *next(iter(batch["peers"].values()))["wall_s"]]
        for wall_s, disturbance in zip(walls, batch["disturbances"], strict=True):
            assert disturbance["idle_share"] * wall_s <= 0.03


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--batches", "1,x"], "use whole numbers from 1 with commas between them"),
        (["--model", "/nowhere"], "there is no model at /nowhere"),
        (["--json", "/nowhere/result.json"], "there is no folder /nowhere that can be written to"),
        (["--prompt-mean", "4000"], "lower --prompt-mean, --output-mean or their sigmas"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(folder: Path, words: list[str], line: str) -> None:
    result = run_bench("--model", str(folder), *words)
    assert result.returncode == 2
    assert line in result.stderr.splitlines()[-1]
    assert result.stdout == ""
