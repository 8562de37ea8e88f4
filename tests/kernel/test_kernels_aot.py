"""Compiling ahead of time finds what it is there to find. `make kernels-aot` itself compiles the product's kernels."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.promises import IS_TRITON_PROMISED

ROOT = Path(__file__).parents[2]


def compiled(*args: str) -> subprocess.CompletedProcess[str]:
    """The command's run, with the variable set that all tests have."""
    if find_spec("triton") is None and not IS_TRITON_PROMISED:
        pytest.skip("needs triton")
    return subprocess.run(
        [sys.executable, "-m", "ops.kernels_aot", *args],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def figures(run: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What its JSON line says."""
    parsed: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return parsed


@cache
def failing() -> subprocess.CompletedProcess[str]:
    return compiled("--cases", "tests.kernel.failing_cases", "--capability", "90", "--processes", "1")


@pytest.mark.parametrize(
    "line",
    [
        r"FAILED sm_90 too many registers: spilling_kernel spills \d+ bytes of its registers",
        r"FAILED sm_90 too much shared memory: product_kernel needs 384\.0 KiB of shared memory, a program may",
        r"FAILED sm_90 no product: no matrix instruction in sum_kernel",
        r"FAILED sm_90 no power of two: does not compile: .*arange's range must be a power of 2",
        r"FAILED sm_90 no launch: launches nothing",
    ],
)
def test_what_must_not_pass_is_told_in_a_line(line: str) -> None:
    run = failing()
    assert run.returncode == 1, run.stderr
    assert re.search(line, run.stderr), run.stderr


def test_nothing_else_is_found_and_the_other_figures_are_there() -> None:
    told = figures(failing())
    assert len(told["failures"]) == 5
    rows = {row["case"]: row for row in told["rows"]}
    assert rows["too much shared memory"]["num_matrix_instructions"] > 0
    assert rows["too much shared memory"]["spill_bytes"] == 0
    assert rows["no product"]["shared_bytes"] < 1024


@pytest.mark.slow
def test_kernels_that_are_right_pass_for_the_oldest_target() -> None:
    """As `make kernels-aot` shows in CI for all of them."""
    run = compiled("--cases", "kernels.gpu.rows", "--capability", "80", "--processes", "1")
    assert run.returncode == 0, run.stderr
    rows = figures(run)["rows"]
    assert {row["kernel"] for row in rows} == {"rms_norm_kernel", "silu_and_mul_kernel"}
    assert all(0 < row["num_registers"] <= 255 for row in rows)
