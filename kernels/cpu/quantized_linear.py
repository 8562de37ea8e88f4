"""y = x Wᵀ + b over a weight of int8 in panels (quantized_tile.py), with x quantized row by row.

Words of the tasks: see kernels/quantized_linear.py.
"""

from typing import Any, Final

from numba import float32

from kernels.cpu.half import half_at
from kernels.cpu.helper import helper_for
from kernels.cpu.parallel import ARGUMENTS, NEXT_THREAD
from kernels.cpu.quantized_rows import quantize_row
from kernels.cpu.quantized_tile import BYTES, GROUP, HALF_BYTES, NUM_QUADS, QUADS_AT, Layout, product_over
from kernels.cpu.vector import LANES, VECTOR_BYTES, fetch_add, load_i32, load_i64, store_f32

(
    X, X_ROW, NUM_ROWS, QUANTIZED, QUANTIZED_ROW, NUM_GROUPS,
    W, W_PANEL, NUM_PANELS, MAX_PANELS, SHARES, BIAS, BIAS_PANEL, C, C_ROW, THREAD_BYTES,
) = range(ARGUMENTS, ARGUMENTS + 8 * 16, 8)  # fmt: skip


def quantize_rows(task: int) -> None:
    """Work item: one row."""
    x, x_row, num_rows = load_i64(task + X), load_i64(task + X_ROW), load_i64(task + NUM_ROWS)
    quantized, quantized_row = load_i64(task + QUANTIZED), load_i64(task + QUANTIZED_ROW)
    num_groups = load_i64(task + NUM_GROUPS)
    while True:
        row = fetch_add(task, 1)
        if row >= num_rows:
            break
        quantize_row(x + row * x_row, num_groups, quantized + row * quantized_row)


def linear_over(layout: Layout) -> Any:
    """The body of a linear layer over weights of a kind, for use inside bodies."""
    product = product_over(layout)

    @helper_for(layout.kind)
    def linear(task: int) -> None:
        num_rows, num_groups = load_i64(task + NUM_ROWS), load_i64(task + NUM_GROUPS)
        quantized, quantized_row = load_i64(task + QUANTIZED), load_i64(task + QUANTIZED_ROW)
        w, w_panel = load_i64(task + W), load_i64(task + W_PANEL)
        num_panels, max_panels, shares = (
            load_i64(task + NUM_PANELS),
            load_i64(task + MAX_PANELS),
            load_i64(task + SHARES),
        )
        bias, bias_panel = load_i64(task + BIAS), load_i64(task + BIAS_PANEL)
        c, c_row = load_i64(task + C), load_i64(task + C_ROW)
        thread_bytes = load_i64(task + THREAD_BYTES)
        size = max(1, min(max_panels, num_panels // shares))
        panel = fetch_add(task, size)
        if panel >= num_panels:
            return
        if thread_bytes != 0:
            x, x_row = load_i64(task + X), load_i64(task + X_ROW)
            quantized += fetch_add(task + NEXT_THREAD, 1) * thread_bytes
            for row in range(num_rows):
                quantize_row(x + row * x_row, num_groups, quantized + row * quantized_row)
        while panel < num_panels:
            product(
                quantized, quantized_row, num_rows, w + panel * w_panel, w_panel, min(size, num_panels - panel),
                bias + panel * bias_panel, bias_panel, c + panel * VECTOR_BYTES, c_row, num_groups,
            )  # fmt: skip
            size = max(1, min(max_panels, (num_panels - panel - size) // shares))
            panel = fetch_add(task, size)

    return linear


_linear: Final = linear_over(BYTES)


def quantized_linear(task: int) -> None:
    """Work item: a panel for all rows. A thread claims one of SHARES equal parts of what is left, at most MAX_PANELS.

    So it reads long runs of memory first, and at the end pieces so small that all threads end together.
    Where THREAD_BYTES is 0 the rows are quantized already; else each thread quantizes them for itself, so far apart.
    """
    _linear(task)


ROWS_W, ROWS_NUM_GROUPS, ROWS_IDS, ROWS_NUM_IDS, ROWS_OUT = range(ARGUMENTS, ARGUMENTS + 8 * 5, 8)
_BYTE: Final = 255
_GROUP_BYTES: Final = BYTES.group_bytes


def gather_quantized_rows(task: int) -> None:
    """Work item: one row of the weight out of its panel, as float32, GROUP * NUM_GROUPS of them."""
    w, num_groups = load_i64(task + ROWS_W), load_i64(task + ROWS_NUM_GROUPS)
    ids, num_ids = load_i64(task + ROWS_IDS), load_i64(task + ROWS_NUM_IDS)
    while True:
        item = fetch_add(task, 1)
        if item >= num_ids:
            break
        row = load_i64(ids + item * 8)
        lane = row % LANES
        group = w + row // LANES * num_groups * _GROUP_BYTES
        target = load_i64(task + ROWS_OUT) + item * num_groups * GROUP * 4
        for _ in range(num_groups):
            scale, minimum = half_at(group, lane), half_at(group + HALF_BYTES, lane)
            for quad in range(NUM_QUADS):
                word = load_i32(group + QUADS_AT + quad * VECTOR_BYTES + lane * 4)
                for shift in range(0, 32, 8):
                    store_f32(target, float32(word >> shift & _BYTE) * scale + minimum)
                    target += 4
            group += _GROUP_BYTES
