"""`make gpu`: everything that needs a GPU, in one run of under eight minutes; one table and one JSON file.

    python -m tests.gpu.check [--out FOLDER] [--only STAGE,...] [--rehearse]

Needs torch, triton, transformers, numpy, safetensors, msgpack and pytest, no network and no checkpoint. Each stage is a
process with a time limit of its own: one that fails, hangs or crashes the device stops no other. Correctness first, in
as many processes at a time as there are stages of it, since a GPU that is shared only slows them; then the bench, one
after the other. Exit code 1: a stage has failed.

--rehearse runs the same code on the CPU at tiny sizes (with TRITON_INTERPRET=1 through Triton's interpreter), so that a
run on a GPU isn't the first one of any line. Its figures mean nothing.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.gpu.table import render

ROOT = Path(__file__).parents[2]
INI = Path(__file__).with_name("pytest.ini")
PACKAGES = ("torch", "triton", "transformers", "numpy", "safetensors", "msgpack", "pytest")
# A rehearsal has two slow cores and an interpreter, and no need to hurry.
REHEARSAL_FACTOR = 5


@dataclass(frozen=True, slots=True)
class Stage:
    """One process: pytest files (`tests`), or a measurement of tests/gpu/bench.py (`bench`)."""

    name: str
    limit_s: int
    tests: tuple[str, ...] = ()
    bench: str = ""


@dataclass(slots=True)
class Outcome:
    """What came of a stage. `figures` are those of a measurement; `words` say what failed."""

    name: str
    status: str
    seconds: float
    words: str = ""
    num_passed: int = 0
    num_failed: int = 0
    num_skipped: int = 0
    figures: dict[str, Any] = field(default_factory=dict)


CORRECTNESS = (
    Stage("kernels", 170, tests=("tests/gpu/test_kernels.py",)),
    Stage(
        "attention",
        170,
        tests=("tests/kernel/test_paged_attention_triton.py", "tests/kernel/test_paged_attention_triton_bounds.py"),
    ),
    Stage("attention options", 170, tests=("tests/kernel/test_paged_attention_triton_options.py",)),
    Stage("engine", 170, tests=("tests/gpu/test_engine.py",)),
    Stage("streams", 100, tests=("tests/gpu/test_streams.py",)),
)
BENCH = (
    Stage("decode attention", 45, bench="decode_attention"),
    Stage("prefill attention", 45, bench="prefill_attention"),
    Stage("swap", 40, bench="swap"),
    Stage("host share", 60, bench="host_share"),
    Stage("article", 110, bench="article"),
)
TOTAL_LIMIT_S = 470


def run_check(out: Path, only: set[str], *, is_rehearsed: bool) -> list[Outcome]:
    """Run the stages, and write each one's output to a file of its own below `out`."""
    ends_s = time.monotonic() + TOTAL_LIMIT_S * (REHEARSAL_FACTOR if is_rehearsed else 1)
    wanted = [stage for stage in (*CORRECTNESS, *BENCH) if not only or stage.name in only]
    together = [stage for stage in wanted if stage.tests]
    # On two cores the interpreter's stages would only wait for each other.
    with ThreadPoolExecutor(1 if is_rehearsed else max(1, len(together))) as pool:
        outcomes = list(pool.map(lambda stage: _run(stage, out, ends_s, is_rehearsed=is_rehearsed), together))
    alone = [stage for stage in wanted if stage.bench]
    return outcomes + [_run(stage, out, ends_s, is_rehearsed=is_rehearsed) for stage in alone]


def _run(stage: Stage, out: Path, ends_s: float, *, is_rehearsed: bool) -> Outcome:
    limit_s = min(stage.limit_s * (REHEARSAL_FACTOR if is_rehearsed else 1), ends_s - time.monotonic())
    name = stage.name.replace(" ", "-")
    if limit_s <= 1:
        return Outcome(stage.name, "failed", 0.0, "there was no time left for it")
    report = out / f"{name}.{'xml' if stage.tests else 'json'}"
    report.unlink(missing_ok=True)
    if stage.tests:
        words = ["-m", "pytest", "-c", str(INI), f"--junitxml={report}", *(str(ROOT / path) for path in stage.tests)]
    else:
        words = ["-m", "tests.gpu.bench", stage.bench, str(report)]
    environment = os.environ | {
        "PAGEMILL_GPU_CHECK": "rehearse" if is_rehearsed else "run",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # a bare machine has none
        "PYTHONUNBUFFERED": "1",
    }
    _say(f"{stage.name}: begun")
    started = time.monotonic()
    with (out / f"{name}.log").open("wb") as log:
        # A session of its own, so that what it has started ends with it.
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
    outcome = Outcome(stage.name, "passed", time.monotonic() - started)
    _read(outcome, report, is_tests=bool(stage.tests))
    if is_rehearsed and code == 0 and outcome.num_skipped and not outcome.num_passed:
        outcome.status, outcome.words = "skipped", "needs a GPU, or TRITON_INTERPRET=1 and PAGEMILL_KERNELS=triton"
    if code != 0 or outcome.status == "failed":
        outcome.status = "failed"
        ended = f"stopped after {limit_s:.0f} s" if code is None else f"exit code {code}"
        outcome.words = outcome.words or f"{ended}: see {name}.log"
    _say(f"{stage.name}: {outcome.status} after {outcome.seconds:.0f} s")
    return outcome


def _read(outcome: Outcome, report: Path, *, is_tests: bool) -> None:
    if not report.exists():
        return
    if not is_tests:
        outcome.figures = json.loads(report.read_text())
        return
    failed = []
    for case in ET.parse(report).getroot().iter("testcase"):  # noqa: S314 - pytest of this process has written it
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(str(case.get("name")))
        elif case.find("skipped") is not None:
            outcome.num_skipped += 1
        else:
            outcome.num_passed += 1
    outcome.num_failed = len(failed)
    if failed:
        outcome.words = ", ".join(failed[:3]) + (f" and {len(failed) - 3} more" if len(failed) > 3 else "")
    elif not outcome.num_passed:
        outcome.status, outcome.words = "failed", "no test ran"


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def machine() -> dict[str, Any]:
    """What it ran on."""
    facts: dict[str, Any] = {"python": platform.python_version(), "system": platform.platform()}
    for name in PACKAGES:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = None
    import torch

    facts["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {"device": properties.name, "memory_gib": round(properties.total_memory / (1 << 30), 1)}
        facts["capability"] = f"{properties.major}.{properties.minor}"
    return facts


def main(argv: list[str] | None = None) -> int:
    """Run, write OUT/gpu-check.txt and OUT/gpu-check.json, print the table."""
    parser = argparse.ArgumentParser(prog="make gpu", description="Everything that needs a GPU, in one run.")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "gpu-check"), help="where it writes")
    parser.add_argument("--only", default="", help="names of stages, with commas between")
    parser.add_argument("--rehearse", action="store_true", help="the same code on the CPU, at tiny sizes")
    options = parser.parse_args(argv)
    only = {name.strip() for name in options.only.split(",") if name.strip()}
    unknown = only - {stage.name for stage in (*CORRECTNESS, *BENCH)}
    if unknown:
        parser.error(f"there is no stage {', '.join(sorted(unknown))}")
    facts = machine()
    if "device" not in facts and not options.rehearse:
        parser.error("torch finds no CUDA device here: --rehearse runs the same code on the CPU")
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    outcomes = run_check(options.out, only, is_rehearsed=options.rehearse)
    report = {
        "bench": "gpu-check",
        "is_rehearsal": options.rehearse,
        "machine": facts,
        "stages": [asdict(outcome) for outcome in outcomes],
        "took_s": round(time.monotonic() - started, 1),
    }
    table = render(report)
    (options.out / "gpu-check.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.out / "gpu-check.txt").write_text(table)
    sys.stdout.write(table)
    return 1 if any(outcome.status == "failed" for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
