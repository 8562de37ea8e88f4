"""Running a compiled body on the threads that torch already has.

numba brings a thread pool of its own, and two pools on the same cores fight: each spins for a while after its work, in
the way of the other. So a body is a plain C function here, and runs on the pool of torch's OpenMP runtime through
GOMP_parallel, the entry point that compiled `#pragma omp parallel` code calls. Where that runtime has no such symbol
(libomp on macOS), Python threads run it: ctypes lets go of the interpreter during the call.

A body takes the address of its task block, int64 words:

    [0] next work item   [1] next thread number   [2 ...] the body's own arguments

Threads claim items with `fetch_add` on word 0 until none is left, so a slow core takes fewer of them. What an item
computes must not depend on the thread that runs it.
"""

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Final

NEXT_ITEM: Final = 0
NEXT_THREAD: Final = 8
# Byte offset of the first argument of a body in its task block.
ARGUMENTS: Final = 16

Body = Callable[[Any], None]


@cache
def _openmp_parallel() -> Any | None:
    """GOMP_parallel(function, data, num_threads, flags) of the OpenMP runtime that torch has loaded, or None."""
    try:
        function = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    function.restype = None
    return function


@cache
def _helpers(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads - 1, thread_name_prefix="pagemill-kernel")


def run_body(address: int, arguments: tuple[int, ...], num_threads: int) -> None:
    """Run the body at `address` with these arguments on up to `num_threads` threads; returns when all are done."""
    task = (ctypes.c_int64 * (2 + len(arguments)))(0, 0, *arguments)
    task_address = ctypes.addressof(task)
    if num_threads == 1:
        _as_function(address)(task_address)
        return
    parallel = _openmp_parallel()
    if parallel is not None:
        parallel(address, task_address, num_threads, 0)
        return
    body = _as_function(address)
    waiting = [_helpers(num_threads).submit(body, task_address) for _ in range(num_threads - 1)]
    body(task_address)
    for helper in waiting:
        helper.result()


@cache
def _as_function(address: int) -> Body:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
