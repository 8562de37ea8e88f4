"""The script of `make gpu`: its stages stand alone, its table and its file say what came of them."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import check
from tests.gpu.check import Stage
from tests.gpu.table import BARS, render

ROOT = Path(__file__).parents[3]
GPU_TESTS = sorted((ROOT / "tests/gpu").glob("test_*.py"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where the check writes."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def stage(tmp_path: Path, name: str, code: str, limit_s: int = 60) -> Stage:
    path = tmp_path / f"test_{name}.py"
    path.write_text(code)
    return Stage(name, limit_s, tests=(str(path),))


def test_a_stage_that_fails_or_hangs_stops_no_other(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = (
        stage(tmp_path, "good", "def test_a():\n    assert True\n"),
        stage(tmp_path, "bad", "def test_a():\n    pass\ndef test_b():\n    assert 1 == 2\n"),
        stage(tmp_path, "dies", "import os\ndef test_a():\n    os._exit(7)\n"),
        stage(tmp_path, "hangs", "import time\ndef test_a():\n    time.sleep(1000)\n", limit_s=4),
        stage(tmp_path, "empty", "import pytest\n@pytest.mark.skip\ndef test_a():\n    pass\n"),
    )
    monkeypatch.setattr(check, "CORRECTNESS", stages)
    monkeypatch.setattr(check, "BENCH", (Stage("no such measurement", 60, bench="nothing"),))
    monkeypatch.setattr(check, "machine", lambda: {"device": "a double"})
    assert check.main(["--out", str(out)]) == 1
    report = json.loads((out / "gpu-check.json").read_text())
    found = {each["name"]: each for each in report["stages"]}
    assert {name: each["status"] for name, each in found.items()} == {
        "good": "passed",
        "bad": "failed",
        "dies": "failed",
        "hangs": "failed",
        "empty": "failed",
        "no such measurement": "failed",
    }
    assert (found["bad"]["num_passed"], found["bad"]["num_failed"], found["bad"]["words"]) == (1, 1, "test_b")
    assert found["dies"]["words"] == "exit code 7: see dies.log"
    assert found["hangs"]["words"] == "stopped after 4 s: see hangs.log"
    assert found["empty"]["words"] == "no test ran"
    table = (out / "gpu-check.txt").read_text()
    assert capsys.readouterr().out == table
    assert "KeyError: 'nothing'" in (out / "no-such-measurement.log").read_text()


def test_the_limits_of_all_stages_keep_to_eight_minutes() -> None:
    """Those of tests run at the same time, those of the bench one after the other."""
    longest = max(each.limit_s for each in check.CORRECTNESS) + sum(each.limit_s for each in check.BENCH)
    assert longest <= check.TOTAL_LIMIT_S < 8 * 60


def test_a_figure_is_told_beside_its_bar() -> None:
    stages: list[dict[str, Any]] = [
        {"name": bar.stage, "status": "passed", "seconds": 1.0, "words": "", "figures": {}} for bar in BARS[:3]
    ]
    stages[0]["figures"] = {"share_of_copy": 0.81}
    stages[1]["figures"] = {"share_of_products": 0.59}
    for each in stages:
        each |= {"num_passed": 0, "num_failed": 0, "num_skipped": 0}
    report = {"is_rehearsal": False, "machine": {"device": "H200"}, "stages": stages, "took_s": 3}
    lines = [line for line in render(report).splitlines() if "≥" in line or "≤" in line]
    assert [line.split()[-1] for line in lines] == ["kept", "MISSED", *["unmeasured"] * 4]
    assert "REHEARSAL" not in render(report)
    assert "REHEARSAL" in render(report | {"is_rehearsal": True})


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--only", "kernels,other"], "there is no stage other"), ([], "torch finds no CUDA device here")],
)
def test_what_can_t_be_run_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if not words and torch.cuda.is_available():
        pytest.skip("there is a device")
    with pytest.raises(SystemExit) as ended:
        check.main(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_every_file_of_tests_that_can_run_on_a_gpu_is_in_a_stage() -> None:
    """Those of tests/gpu, and those of the Triton attention, which take a device where there is one."""
    files = {*GPU_TESTS, *(ROOT / "tests/kernel").glob("test_paged_attention_triton*.py")}
    assert {ROOT / path for each in check.CORRECTNESS for path in each.tests} == files


@pytest.mark.parametrize("path", GPU_TESTS, ids=lambda path: path.name)
def test_every_test_that_needs_a_gpu_says_so(path: Path) -> None:
    """So `make test` selects none of them."""
    assigned = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign)]
    marks = [ast.unparse(node.value) for node in assigned if ast.unparse(node.targets[0]) == "pytestmark"]
    assert marks == ["pytest.mark.gpu"]


# What it lacks, some of which comes with others.
MISSING = "redis structlog pydantic pydantic_settings prometheus_client platformdirs psutil numba llvmlite rich click"


def test_the_check_and_the_engine_need_nothing_that_a_bare_machine_lacks() -> None:
    code = (
        "import sys, importlib\n"
        f"sys.modules.update(dict.fromkeys({MISSING.split()!r}))\n"
        "names = 'check table timing models bench test_kernels test_engine test_streams conftest'.split()\n"
        "for name in names: importlib.import_module('tests.gpu.' + name)\n"
        "import worker.engine_builder, worker.llm, model.graph_memory, kernels.cpu.code_cache\n"
        "from worker.memory import headroom\n"
        "assert headroom().num_bytes > 0\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rehearsal_runs_every_stage_on_the_cpu(out: Path) -> None:
    words = [sys.executable, "-m", "tests.gpu.check", "--rehearse", "--out", str(out)]
    subprocess.run(words, cwd=ROOT, check=False, timeout=880)
    report = json.loads((out / "gpu-check.json").read_text())
    statuses = {each["name"]: each["status"] for each in report["stages"]}
    for name in ("attention", "attention options"):  # by Triton's interpreter alone
        assert statuses.pop(name) in ("passed", "skipped")
    assert set(statuses.values()) == {"passed"}, statuses
    assert {each["name"] for each in report["stages"] if each["figures"]} == {each.name for each in check.BENCH}
