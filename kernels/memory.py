"""Large tensors in huge pages: with pages of 2 MiB a stream over weights waits less for address translation."""

import ctypes
import sys
from functools import cache
from typing import Any, Final

import torch

HUGE_PAGE_BYTES: Final = 2 << 20
MADV_HUGEPAGE: Final = 14


@cache
def _madvise() -> Any | None:
    """madvise(address, length, advice) of the C library, or None where huge pages are not asked for this way."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (AttributeError, OSError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def empty_in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An uninitialised contiguous CPU tensor; from 2 MiB on it starts at a huge page, and the kernel is asked for them.

    The request is advice: where it is refused, ordinary pages serve. Memory is taken as it is touched.
    """
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    advise = _madvise()
    if num_bytes < HUGE_PAGE_BYTES or advise is None:
        return torch.empty(shape, dtype=dtype)
    memory = torch.empty(num_bytes + HUGE_PAGE_BYTES, dtype=torch.uint8)
    offset = -memory.data_ptr() % HUGE_PAGE_BYTES
    advise(memory.data_ptr() + offset, num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, MADV_HUGEPAGE)
    return memory[offset : offset + num_bytes].view(dtype).view(shape)
