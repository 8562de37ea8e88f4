"""How many threads compute a step: one a physical core, for a sibling thread adds no arithmetic units."""

import os
from pathlib import Path

import torch

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def num_physical_cores() -> int:
    """Physical cores that this process may run on; logical ones where the system doesn't tell them apart."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cpus = os.sched_getaffinity(0)
    cores = set()
    for cpu in cpus:
        try:
            cores.add(Path(_TOPOLOGY.format(cpu)).read_text())
        except OSError:
            return len(cpus)
    return len(cores)


def set_num_threads(num_threads: int | None) -> int:
    """Set the threads of torch, on which the compiled kernels run too, for this process; returns their number.

    None: one a physical core, or fewer where torch was told so (OMP_NUM_THREADS).
    """
    if num_threads is None:
        num_threads = min(torch.get_num_threads(), num_physical_cores())
    torch.set_num_threads(num_threads)
    return num_threads
