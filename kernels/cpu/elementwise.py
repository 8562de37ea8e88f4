"""Row-wise bodies: RMSNorm, the gated activation, rotary embedding with the write into the KV cache."""

from math import sqrt

from kernels.cpu.helper import helper
from kernels.cpu.parallel import ARGUMENTS
from kernels.cpu.vector import (
    VECTOR_BYTES,
    add,
    fetch_add,
    fma,
    load,
    load_f32,
    load_f64,
    load_i64,
    mul,
    reduce_add,
    sigmoid,
    splat,
    store,
    store_f32,
    sub,
)

(
    NORM_X, NORM_X_ROW, NORM_RESIDUAL, NORM_RESIDUAL_ROW, NORM_WEIGHT, NORM_OUT, NORM_ROWS, NORM_HIDDEN, NORM_EPS,
    NORM_ROWS_PER_ITEM,
) = range(ARGUMENTS, ARGUMENTS + 8 * 10, 8)  # fmt: skip


def rms_norm(task: int) -> None:
    """Work item: rows_per_item rows. Where a residual is given (address not 0), x is added to it first."""
    x_row, residual_row = load_i64(task + NORM_X_ROW), load_i64(task + NORM_RESIDUAL_ROW)
    has_residual = load_i64(task + NORM_RESIDUAL) != 0
    weight, hidden, eps = load_i64(task + NORM_WEIGHT), load_i64(task + NORM_HIDDEN), load_f64(task + NORM_EPS)
    num_rows, rows_per_item = load_i64(task + NORM_ROWS), load_i64(task + NORM_ROWS_PER_ITEM)
    row_bytes = hidden * 4
    while True:
        first = fetch_add(task, 1) * rows_per_item
        if first >= num_rows:
            break
        for row in range(first, min(first + rows_per_item, num_rows)):
            source = load_i64(task + NORM_X) + row * x_row
            squares = splat(0.0)
            if has_residual:
                residual = load_i64(task + NORM_RESIDUAL) + row * residual_row
                for offset in range(0, row_bytes, VECTOR_BYTES):
                    value = add(load(residual + offset), load(source + offset))
                    store(residual + offset, value)
                    squares = fma(value, value, squares)
                source = residual
            else:
                for offset in range(0, row_bytes, VECTOR_BYTES):
                    value = load(source + offset)
                    squares = fma(value, value, squares)
            factor = splat(1.0 / sqrt(reduce_add(squares) / hidden + eps))
            target = load_i64(task + NORM_OUT) + row * row_bytes
            for offset in range(0, row_bytes, VECTOR_BYTES):
                store(target + offset, mul(mul(load(source + offset), factor), load(weight + offset)))


(
    SILU_X, SILU_X_ROW, SILU_OUT, SILU_ROWS, SILU_SIZE, SILU_ROWS_PER_ITEM,
) = range(ARGUMENTS, ARGUMENTS + 8 * 6, 8)  # fmt: skip


def silu_and_mul(task: int) -> None:
    """Work item: rows_per_item rows of gate * sigmoid(gate) * up."""
    x_row, num_rows = load_i64(task + SILU_X_ROW), load_i64(task + SILU_ROWS)
    row_bytes, rows_per_item = load_i64(task + SILU_SIZE) * 4, load_i64(task + SILU_ROWS_PER_ITEM)
    while True:
        first = fetch_add(task, 1) * rows_per_item
        if first >= num_rows:
            break
        for row in range(first, min(first + rows_per_item, num_rows)):
            source = load_i64(task + SILU_X) + row * x_row
            target = load_i64(task + SILU_OUT) + row * row_bytes
            for offset in range(0, row_bytes, VECTOR_BYTES):
                gate = load(source + offset)
                store(target + offset, mul(mul(gate, sigmoid(gate)), load(source + row_bytes + offset)))


(
    ROPE_QKV, ROPE_QKV_ROW, ROPE_COS_SIN, ROPE_POSITIONS, ROPE_SLOTS, ROPE_CACHE, ROPE_BLOCK_STRIDE, ROPE_VALUE_OFFSET,
    ROPE_SLOT_STRIDE, ROPE_BLOCK_SIZE, ROPE_HEADS, ROPE_KV_HEADS, ROPE_HEAD_DIM, ROPE_ROTARY_DIM, ROPE_OUT, ROPE_ROWS,
    ROPE_ROWS_PER_ITEM,
) = range(ARGUMENTS, ARGUMENTS + 8 * 17, 8)  # fmt: skip


@helper
def _copy(source: int, target: int, num_bytes: int) -> None:
    offset = 0
    while offset + VECTOR_BYTES <= num_bytes:
        store(target + offset, load(source + offset))
        offset += VECTOR_BYTES
    while offset < num_bytes:
        store_f32(target + offset, load_f32(source + offset))
        offset += 4


@helper
def _rotate(source: int, target: int, cos: int, half_bytes: int, head_bytes: int) -> None:
    """One head: (low, high) → (low cos - high sin, high cos + low sin), then what is not rotated."""
    sin, offset = cos + half_bytes, 0
    while offset + VECTOR_BYTES <= half_bytes:
        low, high = load(source + offset), load(source + half_bytes + offset)
        c, s = load(cos + offset), load(sin + offset)
        store(target + offset, sub(mul(low, c), mul(high, s)))
        store(target + half_bytes + offset, add(mul(high, c), mul(low, s)))
        offset += VECTOR_BYTES
    while offset < half_bytes:
        low_1, high_1 = load_f32(source + offset), load_f32(source + half_bytes + offset)
        c_1, s_1 = load_f32(cos + offset), load_f32(sin + offset)
        store_f32(target + offset, low_1 * c_1 - high_1 * s_1)
        store_f32(target + half_bytes + offset, high_1 * c_1 + low_1 * s_1)
        offset += 4
    _copy(source + 2 * half_bytes, target + 2 * half_bytes, head_bytes - 2 * half_bytes)


def rope_and_write(task: int) -> None:
    """Work item: rows_per_item tokens."""
    num_heads, num_kv_heads = load_i64(task + ROPE_HEADS), load_i64(task + ROPE_KV_HEADS)
    head_bytes, half_bytes = load_i64(task + ROPE_HEAD_DIM) * 4, load_i64(task + ROPE_ROTARY_DIM) * 2
    block_size, num_rows = load_i64(task + ROPE_BLOCK_SIZE), load_i64(task + ROPE_ROWS)
    rows_per_item, value_offset = load_i64(task + ROPE_ROWS_PER_ITEM), load_i64(task + ROPE_VALUE_OFFSET)
    while True:
        first = fetch_add(task, 1) * rows_per_item
        if first >= num_rows:
            break
        for row in range(first, min(first + rows_per_item, num_rows)):
            heads = load_i64(task + ROPE_QKV) + row * load_i64(task + ROPE_QKV_ROW)
            cos = load_i64(task + ROPE_COS_SIN) + load_i64(load_i64(task + ROPE_POSITIONS) + row * 8) * half_bytes * 2
            target = load_i64(task + ROPE_OUT) + row * num_heads * head_bytes
            for head in range(num_heads):
                _rotate(heads + head * head_bytes, target + head * head_bytes, cos, half_bytes, head_bytes)
            slot = load_i64(load_i64(task + ROPE_SLOTS) + row * 8)
            if slot < 0:
                continue
            block, offset = slot // block_size, slot % block_size
            place = load_i64(task + ROPE_CACHE) + block * load_i64(task + ROPE_BLOCK_STRIDE)
            place += offset * load_i64(task + ROPE_SLOT_STRIDE)
            keys = heads + num_heads * head_bytes
            for head in range(num_kv_heads):
                _rotate(keys + head * head_bytes, place + head * head_bytes, cos, half_bytes, head_bytes)
            _copy(keys + num_kv_heads * head_bytes, place + value_offset, num_kv_heads * head_bytes)
