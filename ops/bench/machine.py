"""Facts about the machine that measures, and about who else uses it meanwhile."""

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Self

import psutil

from ops.bench.side import Side

PACKAGES: Final = ("pagemill", "torch", "transformers", "numba", "numpy")
# Instruction sets that decide how fast matrices are multiplied on a CPU.
CPU_FLAGS: Final = (
    *("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("avx_vnni", "amx_tile", "amx_bf16", "asimd", "bf16", "sve"),
)
CPUINFO: Final = Path("/proc/cpuinfo")
# Above this share of the machine the work of others shows in the figures.
BUSY_SHARE: Final = 0.05
# A side that sleeps uses less of a core than this.
AWAKE_SHARE: Final = 0.02
# Processor time is counted in ticks of about 10 ms: over less time than this a share means nothing.
MIN_JUDGED_S: Final = 1.0


def machine_facts() -> dict[str, Any]:
    """What a reader of the figures wants to know, JSON-able; looks at the load for one second."""
    model, flags = _cpu()
    return {
        "cpu": model,
        "cpu_flags": [flag for flag in CPU_FLAGS if flag in flags],
        "logical_cpus": psutil.cpu_count() or 0,
        "physical_cores": psutil.cpu_count(logical=False) or 0,
        "usable_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count() or 0,
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "load_average": list(psutil.getloadavg()),
        "busy_share": psutil.cpu_percent(interval=1.0) / 100,
        "thread_variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(("OMP_", "GOMP_", "MKL_"))
        },
    }


def _cpu() -> tuple[str, set[str]]:
    """Name and flags, as Linux tells them; elsewhere what Python knows."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine(), set()
    values: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        values.setdefault(name.strip().lower(), value.strip())
    flags = values.get("flags", values.get("features", ""))
    return values.get("model name", platform.machine()), set(flags.split())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What else the processors did while one side ran.

    others_share: of the machine, taken by processes that are none of the bench's. idle_share: of one core, taken by
    the sides that should have slept.
    """

    wall_s: float
    others_share: float
    idle_share: float


class DisturbanceMeter:
    """Measures a Disturbance over the block: `with DisturbanceMeter(running, all_sides) as meter`."""

    def __init__(self, running: Side, sides: Sequence[Side]) -> None:
        self._running = running
        self._sides = sides

    def __enter__(self) -> Self:
        self._before = self._look()
        return self

    def __exit__(self, *_: object) -> None:
        self._after = self._look()

    def _look(self) -> tuple[float, float, list[float]]:
        return time.perf_counter(), _busy_seconds(), [side.cpu_seconds() for side in self._sides]

    def result(self) -> Disturbance:
        """What was measured, once the block is over."""
        wall_s = self._after[0] - self._before[0]
        busy_s = self._after[1] - self._before[1]
        used = [after - before for before, after in zip(self._before[2], self._after[2], strict=True)]
        idle_s = sum(each for side, each in zip(self._sides, used, strict=True) if side is not self._running)
        return Disturbance(
            wall_s=wall_s,
            others_share=max(0.0, busy_s - sum(used)) / (wall_s * (psutil.cpu_count() or 1)),
            idle_share=idle_s / wall_s,
        )


def _busy_seconds() -> float:
    """Processor time of all cores that was not idle, since the machine started. Guests are counted in `user`."""
    times = psutil.cpu_times()._asdict()
    return float(sum(value for name, value in times.items() if name not in ("idle", "iowait", "guest", "guest_nice")))


def warnings_of(facts: dict[str, Any], disturbances: Sequence[Disturbance]) -> list[str]:
    """Lines that say why these figures are not to be trusted; none on an idle machine."""
    lines = []
    judged = [each for each in disturbances if each.wall_s >= MIN_JUDGED_S]
    if facts["busy_share"] > BUSY_SHARE:
        load = facts["load_average"][0]
        lines.append(f"the machine was {facts['busy_share']:.0%} busy before the bench began (load average {load:.1f})")
    others = max((each.others_share for each in judged), default=0.0)
    if others > BUSY_SHARE:
        lines.append(f"other processes took up to {others:.0%} of the machine during a run: measure on an idle one")
    awake = max((each.idle_share for each in judged), default=0.0)
    if awake > AWAKE_SHARE:
        lines.append(f"a side that should have slept took up to {awake:.0%} of a core while the other ran")
    return lines
