"""Kernels that `make kernels-aot` must not let pass: `python -m ops.kernels_aot --cases tests.kernel.failing_cases`."""

from typing import Final

import torch
import triton
import triton.language as tl

from kernels.gpu.case import Case, meta
from kernels.gpu.common import launch


@triton.jit
def spilling_kernel(x_ptr: tl.tensor, out_ptr: tl.tensor, LENGTH: tl.constexpr) -> None:
    """Holds more numbers at a time than its 32 threads have registers: each is needed after all have been read."""
    places = tl.arange(0, LENGTH)
    numbers = tl.load(x_ptr + places)
    total = tl.sum(numbers, axis=0)
    tl.store(out_ptr + places, numbers * total)


@triton.jit
def product_kernel(
    a_ptr: tl.tensor, b_ptr: tl.tensor, out_ptr: tl.tensor, steps: tl.tensor, SIZE: tl.constexpr
) -> None:
    """A product whose operands lie in shared memory, several steps of the loop ahead."""
    rows, columns = tl.arange(0, SIZE), tl.arange(0, SIZE)
    places = rows[:, None] * SIZE + columns[None, :]
    total = tl.zeros([SIZE, SIZE], tl.float32)
    for step in range(steps):
        offset = step * SIZE * SIZE
        total = tl.dot(tl.load(a_ptr + offset + places), tl.load(b_ptr + offset + places), total)
    tl.store(out_ptr + places, total)


@triton.jit
def sum_kernel(x_ptr: tl.tensor, out_ptr: tl.tensor, LENGTH: tl.constexpr) -> None:
    """No product of matrices."""
    tl.store(out_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, LENGTH)), axis=0))


@triton.jit
def wrong_kernel(x_ptr: tl.tensor) -> None:
    """Doesn't compile: 3 is no power of two."""
    tl.store(x_ptr + tl.arange(0, 3), 0.0)


def _spill() -> None:
    launch(spilling_kernel, (1,), meta(8192), meta(8192), LENGTH=8192, num_warps=1)


def _overflow() -> None:
    operand = meta((1 << 20,), dtype=torch.bfloat16)
    launch(product_kernel, (1,), operand, operand, meta(128 * 128), 64, SIZE=128, num_warps=8, num_stages=6)


CASES: Final = (
    Case("too many registers", _spill),
    Case("too much shared memory", _overflow),
    Case("no product", lambda: launch(sum_kernel, (1,), meta(64), meta(1), LENGTH=64), is_decode=True),
    Case("no power of two", lambda: launch(wrong_kernel, (1,), meta(3))),
    Case("no launch", lambda: None),
)
