"""Memory of the KV cache."""

import ctypes
import errno
import logging
import math
import os
import sys
import threading
from functools import cache
from typing import Any, Final

import numpy as np
import torch

from kernels.memory import HUGE_PAGE_BYTES

log = logging.getLogger("pagemill.model")

_LINE_BYTES: Final = 64
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
# One call's share: the address space is locked meanwhile, for 0.4 ms or so, and nobody can map memory.
_PIECE_BYTES: Final = 4 << 20
# From here on a thread takes the pages; less is there at once.
_THREAD_BYTES: Final = 64 << 20
# Linux 5.14: make the pages as a write does, and leave what they hold.
_MADV_POPULATE_WRITE: Final = 23
# What it answers where memory is missing; anything else says that there is no such call.
_TOO_LITTLE: Final = (errno.ENOMEM, errno.EFAULT)


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeroed memory. On the CPU it comes from numpy: pages are taken when first written, and are huge ones.

    torch.zeros would write all of it, seconds for a pool of gigabytes; `take_pages` takes them without. It starts
    at a cache line, a large one at a huge page: numpy's own start is 16 bytes behind one, where each vector lies in two
    lines, and attention takes 1.3 times as long.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    alignment = HUGE_PAGE_BYTES if num_bytes >= HUGE_PAGE_BYTES else _LINE_BYTES
    memory = torch.from_numpy(np.zeros(num_bytes + alignment, dtype=np.uint8))
    start = -memory.data_ptr() % alignment
    return memory[start : start + num_bytes].view(dtype).view(shape)


def take_pages(tensor: torch.Tensor, max_wait_s: float) -> None:
    """Take the memory of a contiguous tensor from the system, if it lies on the CPU: resident from now on.

    What isn't there after `max_wait_s` comes in the background; the tensor may be used meanwhile, since contents stay
    as they are. Where the system can't do that (before Linux 5.14), zeros are written before this returns, so nothing
    of worth may be in it yet.

    Raises MemoryError where there is too little.
    """
    if tensor.device.type != "cpu" or not tensor.numel():
        return
    taking = _Taking(tensor)
    if not taking.try_piece(_PAGE_BYTES):
        tensor.zero_()
    elif tensor.nbytes <= _THREAD_BYTES:
        taking.run()
    else:
        _run_in_thread(taking, max_wait_s)
    if taking.has_failed:
        raise MemoryError(f"unable to allocate {tensor.nbytes} bytes for the KV cache")


class _Taking:
    """Takes one tensor's pages, from the first to the last."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor  # kept as long as a thread works on it
        self._at = tensor.data_ptr() // _PAGE_BYTES * _PAGE_BYTES
        self._end = tensor.data_ptr() + tensor.nbytes
        self.has_failed = False

    def try_piece(self, num_bytes: int) -> bool:
        """Take the next piece; False where the system has no such call."""
        madvise = _madvise()
        if madvise is None:
            return False
        num_bytes = min(num_bytes, self._end - self._at)
        if madvise(self._at, num_bytes, _MADV_POPULATE_WRITE) == 0:
            self._at += num_bytes
            return True
        self.has_failed = ctypes.get_errno() in _TOO_LITTLE
        return self.has_failed

    def run(self) -> None:
        """Take all that is left, as far as the system goes along; what it refuses comes with the first write."""
        while self._at < self._end and self.try_piece(_PIECE_BYTES) and not self.has_failed:
            pass


def _run_in_thread(taking: _Taking, max_wait_s: float) -> None:
    is_waited_for = threading.Event()
    is_waited_for.set()

    def run() -> None:
        taking.run()
        if taking.has_failed and not is_waited_for.is_set():
            log.warning("too little memory is left for the whole KV cache: lower num_kv_blocks, or free some memory")

    thread = threading.Thread(target=run, name="pagemill-pages", daemon=True)
    thread.start()
    thread.join(max_wait_s)
    is_waited_for.clear()


@cache
def _madvise() -> Any | None:
    """madvise(address, length, advice) of the C library; None where MADV_POPULATE_WRITE isn't known."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None, use_errno=True).madvise
    except (AttributeError, OSError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
