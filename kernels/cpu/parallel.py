"""Running a compiled body on several threads.

A body takes the address of its task block, int64 words:

    [0] next work item   [1] next thread number   [2 ...] the body's own arguments

Threads claim items with `fetch_add` on word 0 until none is left, so a slow core takes fewer of them. What an item
computes must not depend on the thread that runs it.

The threads are a team of our own (pool.py), as many as torch would use. Where its system calls are not known (macOS),
Python threads run the body: ctypes lets go of the interpreter during the call.
"""

import atexit
import ctypes
import os
import sys
import threading
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Final

from kernels.cpu import pool
from kernels.cpu.build import address

# A task block begins with the number of the next item; behind it stands that of the next thread.
NEXT_THREAD: Final = 8
# Byte offset of the first argument of a body in its task block.
ARGUMENTS: Final = 16

_EXIT_TIMEOUT_S: Final = 1.0


def run_body(body: int, arguments: tuple[int, ...], num_threads: int) -> None:
    """Run the body at this address with these arguments on up to `num_threads` threads; returns when all is done."""
    task = array("q", (0, 0, *arguments))  # in a fifth of the time that ctypes takes for it
    task_address = task.buffer_info()[0]
    if num_threads == 1:
        _as_function(body)(task_address)
    elif pool.SYS_FUTEX == 0 or not sys.platform.startswith("linux"):
        _run_on_python_threads(body, task_address, num_threads)
    else:
        _team().run(body, task_address, num_threads - 1)


@cache
def _as_function(body: int) -> Callable[[Any], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_int64)(body)


class Team:
    """Helper threads and the pool block through which leaders find them. Helpers sleep while nothing runs."""

    def __init__(self) -> None:
        # Never freed: a helper may look at it until the process is gone.
        libc = ctypes.CDLL(None)
        libc.calloc.restype = ctypes.c_void_p
        base = libc.calloc(pool.POOL_BYTES + 64, 1)
        self._block = base + -base % 64
        self._syscall = libc.syscall
        self._write(pool.SYSCALL, ctypes.cast(libc.syscall, ctypes.c_void_p).value or 0)
        self._lead = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(address("run_on_pool"))
        self._help = ctypes.CFUNCTYPE(None, ctypes.c_int64)(address("help_pool"))
        self._lock = threading.Lock()
        self._helpers: list[threading.Thread] = []

    def run(self, body: int, task_address: int, max_helpers: int) -> None:
        """Lead the body's task with up to `max_helpers` helpers; alone while another thread leads."""
        if not self._lock.acquire(blocking=False):
            _as_function(body)(task_address)
            return
        try:
            while len(self._helpers) < max_helpers:
                self._add_helper()
            self._lead(self._block, body, task_address, max_helpers)
        finally:
            self._lock.release()

    def _add_helper(self) -> None:
        name = f"pagemill-kernel-{len(self._helpers)}"
        thread = threading.Thread(target=self._help, args=(self._block,), name=name, daemon=True)
        thread.start()
        self._helpers.append(thread)

    def stop(self) -> None:
        """Send the helpers home; called once, when the interpreter ends."""
        self._write(pool.STOP, 1)
        signal = ctypes.c_int64.from_address(self._block + pool.SIGNAL)
        signal.value += 1
        self._syscall(
            ctypes.c_long(pool.SYS_FUTEX),
            ctypes.c_void_p(self._block + pool.SIGNAL),
            ctypes.c_int(pool.FUTEX_WAKE_PRIVATE),
            ctypes.c_int(len(self._helpers)),
            None,
        )
        for thread in self._helpers:
            thread.join(_EXIT_TIMEOUT_S)

    def _write(self, word: int, value: int) -> None:
        ctypes.c_int64.from_address(self._block + word).value = value


_team_lock = threading.Lock()


@cache
def _new_team(process_id: int) -> Team:
    """One team a process: threads do not outlive a fork."""
    del process_id
    team = Team()
    atexit.register(team.stop)
    return team


def _team() -> Team:
    with _team_lock:
        return _new_team(os.getpid())


@cache
def _python_threads(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="pagemill-kernel")


def _run_on_python_threads(body: int, task_address: int, num_threads: int) -> None:
    function = _as_function(body)
    waiting = [_python_threads(num_threads - 1).submit(function, task_address) for _ in range(num_threads - 1)]
    function(task_address)
    for helper in waiting:
        helper.result()
