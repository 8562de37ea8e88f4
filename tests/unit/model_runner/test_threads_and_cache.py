"""Threads of a step, and the cache's memory."""

import ctypes
import errno
import mmap
import os
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from model import memory
from model.kv_cache import KVCache, kv_block_bytes
from model.memory import allocate, take_pages
from model.threads import num_physical_cores, set_num_threads
from tests.unit.model_runner.driver import tiny_config


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no CPU affinity")
def test_a_process_that_is_held_to_one_cpu_counts_one_core() -> None:
    """What the machine has beyond it is not ours."""
    allowed = os.sched_getaffinity(0)
    assert 1 <= num_physical_cores() <= len(allowed)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert num_physical_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_number_of_threads_that_is_named_is_set() -> None:
    """And the default never exceeds what torch was told."""
    before = torch.get_num_threads()
    try:
        assert set_num_threads(1) == torch.get_num_threads() == 1
        assert set_num_threads(None) == 1
    finally:
        set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_takes_the_bytes_that_are_said(dtype: torch.dtype) -> None:
    """So that the pool's size can be planned before it is made."""
    config = tiny_config()
    cache = KVCache(config, num_blocks=5, block_size=8, dtype=dtype, device=torch.device("cpu"))
    assert cache.blocks.shape == (5, 2, 2, 8, 2, 16)
    assert cache.blocks.dtype == dtype
    assert cache.block_bytes == kv_block_bytes(config, 8, dtype) == cache.blocks.nbytes // 5
    assert cache.cpu_tier is None


CPU = torch.device("cpu")
MIB = 1 << 20
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere zeros are written")


def resident_bytes(tensor: torch.Tensor) -> int:
    """How much of a tensor's memory is there, to within a page at each end: Linux keeps a word for each page."""
    page = os.sysconf("SC_PAGE_SIZE")
    first, last = tensor.data_ptr() // page, (tensor.data_ptr() + tensor.nbytes - 1) // page
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(8 * first)
        words = file.read(8 * (last - first + 1))
    return sum(words[at + 7] >> 7 for at in range(0, len(words), 8)) * page


def fresh(num_bytes: int) -> torch.Tensor:
    """Bytes that nobody has written yet: what an allocator hands out may have been there before."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def wait_until_resident(tensor: torch.Tensor) -> None:
    deadline = time.monotonic() + 60
    while resident_bytes(tensor) < tensor.nbytes:
        assert time.monotonic() < deadline, f"{resident_bytes(tensor)} of {tensor.nbytes} bytes are there"
        time.sleep(0.01)


@on_linux
@pytest.mark.parametrize("num_bytes", [1, 3 * MIB + 5], ids=["a byte", "some pages"])
def test_small_memory_is_all_there_when_it_was_taken(num_bytes: int) -> None:
    tensor = allocate((num_bytes,), torch.uint8, CPU)
    tensor[-1] = 7
    address = tensor.data_ptr()
    take_pages(tensor, 0)
    assert resident_bytes(tensor) >= num_bytes
    assert (tensor.data_ptr(), int(tensor[-1]), int(tensor.sum())) == (address, 7, 7)


@pytest.mark.parametrize("num_bytes", [1, 300, MIB, 5 * MIB])
def test_memory_begins_at_a_cache_line_and_is_zero(num_bytes: int) -> None:
    """Else each vector of a key lies in two lines, and attention takes a third longer."""
    tensor = allocate((num_bytes,), torch.uint8, CPU)
    assert tensor.data_ptr() % (64 if num_bytes < 2 * MIB else 2 * MIB) == 0
    assert (tensor.shape, int(tensor.count_nonzero())) == ((num_bytes,), 0)


@on_linux
def test_large_memory_comes_in_the_background_while_it_is_written_to() -> None:
    """What steps write meanwhile stays, wherever the pages come at that moment."""
    tensor = fresh(100 * MIB)
    assert resident_bytes(tensor) < tensor.nbytes // 2
    take_pages(tensor, 0)
    for at in range(0, len(tensor), MIB):
        tensor[at] = at // MIB
    wait_until_resident(tensor)
    assert tensor[::MIB].tolist() == list(range(100))
    assert int(tensor.count_nonzero()) == 99


def test_where_the_system_can_not_take_pages_zeros_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_madvise", lambda: None)
    tensor = fresh(100 * MIB)
    before = psutil.Process().memory_info().rss
    take_pages(tensor, 0)
    assert psutil.Process().memory_info().rss >= before + 90 * MIB
    assert not tensor.any()


def test_memory_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system says so at the third piece."""
    calls: list[int] = []

    def madvise(address: int, num_bytes: int, advice: int) -> int:
        calls.append(num_bytes)
        ctypes.set_errno(errno.ENOMEM)
        return 0 if len(calls) < 3 else -1

    monkeypatch.setattr(memory, "_madvise", lambda: madvise)
    with pytest.raises(MemoryError, match=f"unable to allocate {20 * MIB} bytes for the KV cache"):
        take_pages(allocate((20 * MIB,), torch.uint8, CPU), 1)
    assert len(calls) == 3
