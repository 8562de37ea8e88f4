"""`make kernels-aot`: every Triton kernel compiled for GPUs that aren't there: `python -m ops.kernels_aot`.

Each case of `kernels/gpu` is launched as the product launches it, on tensors without memory, and compiled for each
target. Prints a table and one JSON line. Exits with 1, and a line for each failure on stderr, where something doesn't
compile, spills registers, needs more shared memory than a program of the target may have, where a decode case holds no
matrix instruction, or where no case launches a kernel. Triton caches what it compiles in ~/.triton.
"""

import importlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any, Final

import click

from ops.params import COUNT
from ops.tables import print_table

# Shared memory that one program may have, KiB, by compute capability: A100, L4 and RTX 4090, H100 and H200, B200.
SHARED_LIMIT_KIB: Final = {80: 163, 89: 99, 90: 227, 100: 227}
COLUMNS: Final = ("target", "case", "kernel", "registers", "spilled bytes", "shared KiB", "matrix instructions")


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel of one case, as compiled for one target."""

    target: str
    case: str
    kernel: str
    num_registers: int
    spill_bytes: int
    shared_bytes: int
    num_matrix_instructions: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What compiling one case for one target gave: its kernels, and what is wrong with them."""

    rows: tuple[Row, ...]
    failures: tuple[str, ...]


def compile_one(module: str | None, index: int, capability: int) -> Outcome:
    """Compile case number `index` of the module, or of all of kernels/gpu. In a process of its own."""
    from kernels.gpu.ahead_of_time import compile_case

    case = cases_of(module)[index]
    target = f"sm_{capability}"
    try:
        compiled = compile_case(case, capability)
    except Exception as error:  # whatever a compiler raises is a finding
        reason = " ".join(str(error).split())
        return Outcome((), (f"{target} {case.name}: does not compile: {type(error).__name__}: {reason}",))
    rows = tuple(Row(target, case.name, **asdict(kernel)) for kernel in compiled)
    return Outcome(rows, tuple(failures_of(rows, target, case.name, capability, is_decode=case.is_decode)))


def failures_of(rows: Sequence[Row], target: str, case: str, capability: int, *, is_decode: bool) -> list[str]:
    """One line for each thing that is wrong with the kernels of a case."""
    if not rows:
        return [f"{target} {case}: launches nothing"]
    failures, limit = [], SHARED_LIMIT_KIB[capability]
    for row in rows:
        if row.spill_bytes:
            failures.append(f"{target} {case}: {row.kernel} spills {row.spill_bytes} bytes of its registers")
        if row.shared_bytes > limit << 10:
            failures.append(
                f"{target} {case}: {row.kernel} needs {row.shared_bytes / 1024:.1f} KiB of shared memory,"
                f" a program may have {limit}"
            )
    if is_decode and not any(row.num_matrix_instructions for row in rows):
        failures.append(f"{target} {case}: no matrix instruction in {', '.join(row.kernel for row in rows)}")
    return failures


def cases_of(module: str | None) -> list[Any]:
    """The cases of one module, or of all of kernels/gpu."""
    from kernels.gpu.ahead_of_time import all_cases

    return all_cases() if module is None else list(importlib.import_module(module).CASES)


def uncovered(rows: Sequence[Row]) -> list[str]:
    """A line for each kernel of kernels/gpu that no case launched."""
    from kernels.gpu.ahead_of_time import all_kernels

    return [f"no case launches {name}" for name in sorted(all_kernels() - {row.kernel for row in rows})]


@click.command(help=__doc__.replace("`", ""))
@click.option(
    "--capability",
    "capabilities",
    multiple=True,
    type=click.Choice([str(capability) for capability in SHARED_LIMIT_KIB]),
    help="Compile for this compute capability, 10 * major + minor; may be repeated. Default: all.",
)
@click.option("--cases", "module", help="Compile the CASES of this module instead, for instance kernels.gpu.rows.")
@click.option("--processes", default=2, show_default=True, type=COUNT, help="Compile in this many.")
def main(capabilities: tuple[str, ...], module: str | None, processes: int) -> None:
    if find_spec("triton") is None:
        raise click.UsageError("needs triton, which the dev extra brings on Linux x86-64")
    os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels can't be compiled; processes started here inherit it
    wanted = [int(capability) for capability in capabilities] or list(SHARED_LIMIT_KIB)
    jobs = [
        (module, index, capability)
        for index, case in enumerate(cases_of(module))
        for capability in wanted
        if capability in case.targets
    ]
    started = time.monotonic()
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        outcomes = list(pool.map(compile_one, *zip(*jobs, strict=True)))
    rows = [row for outcome in outcomes for row in outcome.rows]
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    if module is None:
        failures += uncovered(rows)
    report(rows, failures, time.monotonic() - started)
    sys.exit(1 if failures else 0)


def report(rows: Sequence[Row], failures: Sequence[str], seconds: float) -> None:
    """The table and the JSON line to stdout, failures to stderr."""
    cells = [
        (row.target, row.case, row.kernel, row.num_registers, row.spill_bytes, f"{row.shared_bytes / 1024:.1f}",
         row.num_matrix_instructions)
        for row in rows
    ]  # fmt: skip
    print_table(f"{len(rows)} kernels compiled in {seconds:.0f} s", COLUMNS, cells)
    figures = {"seconds": round(seconds, 1), "failures": list(failures), "rows": [asdict(row) for row in rows]}
    print(json.dumps(figures, ensure_ascii=False))
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)


if __name__ == "__main__":
    main()
