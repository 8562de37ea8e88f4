"""What all Triton kernels share: the one way to launch them, the device's size, products of matrices."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch
import triton
import triton.language as tl

from kernels.dispatch import IS_INTERPRETED

# Streaming multiprocessors where no device can be asked: those of an H100 or H200.
DEFAULT_NUM_SMS: Final = 132

# True under the interpreter, where operands in bfloat16 have to be float32 before a product.
UPCAST: Final = tl.constexpr(IS_INTERPRETED)

Grid = tuple[int, ...]
Launcher = Callable[..., None]


def _run(kernel: Any, grid: Grid, *args: Any, **options: Any) -> None:
    device = args[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[grid](*args, **options)
    else:
        kernel[grid](*args, **options)


_launcher: Launcher = _run


def launch(kernel: Any, grid: Grid, *args: Any, **options: Any) -> None:
    """Run a jit function over a grid of programs; a grid without programs launches nothing.

    args[0] is a tensor on the device that runs it; `options` are its constants (`tl.constexpr`), num_warps, num_stages.
    Runs on torch's current stream and doesn't wait for it.
    """
    if 0 not in grid:
        _launcher(kernel, grid, *args, **options)


@contextmanager
def launching_by(launcher: Launcher) -> Iterator[None]:
    """Hand every launch inside the block to `launcher(kernel, grid, *args, **options)`, which may only compile it."""
    global _launcher  # noqa: PLW0603 - one process-wide hook is the point
    previous, _launcher = _launcher, launcher
    try:
        yield
    finally:
        _launcher = previous


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below `number` >= 1: the length that `tl.arange` needs."""
    return 1 << (number - 1).bit_length()


@cache
def num_sms(device: torch.device) -> int:
    """How many programs of one per multiprocessor run at a time on this device."""
    if device.type != "cuda":
        return DEFAULT_NUM_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def dot(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """a @ b in float32, for operands of one dtype. On a GPU float32 operands are not rounded to TF32."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")
