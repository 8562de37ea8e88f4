"""A team of threads for bodies, whose leader never waits for a thread that has not begun to help.

An OpenMP region ends when every thread of the team has come and gone. On a machine that also runs other processes a
thread may have to wait some milliseconds for a core, and a decode step is hundreds of regions. Here the leader works
alone until helpers come, closes the region when no item is left, and waits only for those that are inside.

The pool block, int64 words in a cache line of their own each:

    STATE     epoch << 32 | is open << 31 | entered << 16 | inside      all changes of it are atomic
    BODY, TASK, MAX_HELPERS      of the open region, written before it opens
    SIGNAL    counts regions; idle helpers sleep on its low half (futex)
    SLEEPERS  how many may be asleep
    STOP      not 0: helpers leave
    SYSCALL   address of the C library's syscall()

A helper enters by a compare-and-swap of STATE, which fails if the region has closed or another has opened since it
read the words above. Linux on x86-64 and ARM64.
"""

import platform
from typing import Any, Final

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from kernels.cpu.helper import helper
from kernels.cpu.vector import I32, I64, call_llvm, fetch_add, load_i64, pointer, store_i64

STATE, BODY, TASK, MAX_HELPERS, SIGNAL, SLEEPERS, STOP, SYSCALL = range(0, 8 * 64, 64)
POOL_BYTES: Final = 8 * 64

INSIDE_MASK: Final = 0xFFFF
ENTERED_ONE: Final = 1 << 16
ENTERED_MASK: Final = 0x7FFF
IS_OPEN: Final = 1 << 31
EPOCH_SHIFT: Final = 32

# Looks at STATE before a helper goes to sleep: 0.1 ms or so, more than lies between two kernels of one step.
NUM_SPINS: Final = 16000
# Looks of the leader at those inside before it offers its core to them.
NUM_SPINS_BEFORE_YIELD: Final = 200

_MACHINE: Final = platform.machine()
# Numbers of the system calls futex and sched_yield.
SYS_FUTEX, SYS_SCHED_YIELD = {"x86_64": (202, 24), "aarch64": (98, 124)}.get(_MACHINE, (0, 0))
FUTEX_WAIT_PRIVATE: Final = 128
FUTEX_WAKE_PRIVATE: Final = 129


@intrinsic  # type: ignore[untyped-decorator]
def _compare_and_swap(typingctx: Any, address: Any, expected: Any, desired: Any) -> Any:
    """True if the word at the address was `expected` and is `desired` now."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        address_value, expected_value, desired_value = values
        place = pointer(builder, address_value, I64)
        pair = builder.cmpxchg(place, expected_value, desired_value, "seq_cst", "seq_cst")
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _load_atomic(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return builder.load_atomic(pointer(builder, values[0], I64), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _pause(typingctx: Any) -> Any:
    """Tell the core that this is a waiting loop."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        if _MACHINE == "x86_64":
            call_llvm(builder, "llvm.x86.sse2.pause", ir.VoidType())
        elif _MACHINE == "aarch64":
            call_llvm(builder, "llvm.aarch64.hint", ir.VoidType(), ir.Constant(I32, 1))
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _call_body(typingctx: Any, body: Any, task: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), [values[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _call_system(typingctx: Any, function: Any, number: Any, a: Any, b: Any, c: Any) -> Any:
    """syscall(number, a, b, c, NULL)."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        function_value, number_value, a_value, b_value, c_value = values
        kind = ir.FunctionType(I64, [I64], var_arg=True)
        operation, value = (builder.trunc(v, I32) for v in (b_value, c_value))
        arguments = [number_value, a_value, operation, value, ir.Constant(I64, 0)]
        return builder.call(builder.inttoptr(function_value, kind.as_pointer()), arguments)

    return types.int64(*[types.int64] * 5), codegen


def run_on_pool(pool: int, body: int, task: int, max_helpers: int) -> None:
    """Lead one region: returns when all items of the task are done. One leader at a time."""
    store_i64(pool + BODY, body)
    store_i64(pool + TASK, task)
    store_i64(pool + MAX_HELPERS, max_helpers)
    fetch_add(pool + STATE, IS_OPEN)
    fetch_add(pool + SIGNAL, 1)
    if _load_atomic(pool + SLEEPERS) > 0:
        _call_system(load_i64(pool + SYSCALL), SYS_FUTEX, pool + SIGNAL, FUTEX_WAKE_PRIVATE, max_helpers)
    _call_body(body, task)
    # Close: no helper enters any more, and the next region has another epoch.
    state = fetch_add(pool + STATE, -IS_OPEN) - IS_OPEN
    spins = 0
    while state & INSIDE_MASK:
        spins += 1
        if spins % NUM_SPINS_BEFORE_YIELD == 0:
            _call_system(load_i64(pool + SYSCALL), SYS_SCHED_YIELD, 0, 0, 0)
        _pause()
        state = _load_atomic(pool + STATE)
    # Only the leader is left, so this changes nothing under anyone: nobody has entered, epoch + 1.
    store_i64(pool + STATE, ((state >> EPOCH_SHIFT) + 1) << EPOCH_SHIFT)


@helper
def _help_once(pool: int, state: int) -> bool:
    """Enter the region that `state` shows open, if there is room, and work in it; False if that failed."""
    body, task, max_helpers = load_i64(pool + BODY), load_i64(pool + TASK), load_i64(pool + MAX_HELPERS)
    if (state >> 16) & ENTERED_MASK >= max_helpers:
        return False
    if not _compare_and_swap(pool + STATE, state, state + ENTERED_ONE + 1):
        return False
    _call_body(body, task)
    fetch_add(pool + STATE, -1)
    return True


def help_pool(pool: int) -> None:
    """What a helper thread does all its life: help in each region once, sleep where none opens for a while."""
    last_epoch = -1
    spins = 0
    while _load_atomic(pool + STOP) == 0:
        signal = _load_atomic(pool + SIGNAL)
        state = _load_atomic(pool + STATE)
        if state & IS_OPEN and state >> EPOCH_SHIFT != last_epoch:
            if _help_once(pool, state):
                last_epoch = state >> EPOCH_SHIFT
            spins = 0
            _pause()
            continue
        spins += 1
        _pause()
        if spins >= NUM_SPINS:
            fetch_add(pool + SLEEPERS, 1)
            _call_system(load_i64(pool + SYSCALL), SYS_FUTEX, pool + SIGNAL, FUTEX_WAIT_PRIVATE, signal)
            fetch_add(pool + SLEEPERS, -1)
            spins = 0
