"""How long work takes on the device, and what the device can do at most."""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

IS_REHEARSED = os.environ.get("PAGEMILL_GPU_CHECK") == "rehearse"
DEVICE = torch.device("cpu" if IS_REHEARSED else "cuda")


def sized(real: int, tiny: int) -> int:
    """A size of the measurement, or the one of a rehearsal."""
    return tiny if IS_REHEARSED else real


def wait() -> None:
    """For all that was launched."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def median_s(work: Callable[[int], object], num_runs: int = 20) -> float:
    """Seconds of the median run; `work` gets its number, so that it can take other memory each time.

    Measured on the device, between events, after three runs that are not counted.
    """
    num_runs = sized(num_runs, 2)
    for number in range(sized(3, 1)):
        work(number)
    wait()
    if DEVICE.type != "cuda":
        return statistics.median([_host_s(work, number) for number in range(num_runs)])
    events = [[_event() for _ in range(2)] for _ in range(num_runs)]
    for number, (begin, end) in enumerate(events):
        begin.record()
        work(number)
        end.record()
    wait()
    return statistics.median([float(begin.elapsed_time(end)) / 1e3 for begin, end in events])


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _host_s(work: Callable[[int], object], number: int) -> float:
    started = time.perf_counter()
    work(number)
    return time.perf_counter() - started


def copy_bytes_per_s() -> float:
    """Bytes read and written a second, by a copy far larger than any cache."""
    source = torch.empty(sized(2 << 30, 1 << 20), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_s(lambda _: target.copy_(source))


def products_per_s(dtype: torch.dtype) -> float:
    """Floating-point operations a second of a large square product."""
    size = sized(8192, 64)
    left, right = (torch.randn(size, size, device=DEVICE).to(dtype) for _ in range(2))
    return 2 * size**3 / median_s(lambda _: left @ right)
