"""The online softmax of a query tile: its rows' maxima, sums and outputs, tile by tile and split by split.

Each row has a pair (maximum, sum) of float32 at `stats` and head_dim elements at `out`, all under that maximum. They
stand position after position, and within one the heads of the group.
"""

from typing import Final

from kernels.cpu.attention_fetch import fetch_until
from kernels.cpu.helper import helper
from kernels.cpu.vector import (
    LANES,
    VECTOR_BYTES,
    add,
    exp,
    first_lanes,
    fma,
    lanes_from,
    load,
    load_f32,
    maximum,
    mul,
    reduce_add,
    reduce_max,
    splat,
    store,
    store_f32,
    sub,
)

KEY_TILE: Final = 32
# How many parts of the next tile a row fetches, and how many rows do.
PARTS_OF_ROW, ROWS_WITH_PARTS = 2, 3
MINUS_INFINITY: Final = float("-inf")


@helper
def softmax_tile(
    scores: int, num_rows: int, group: int, first_valid: int, window: int, count: int, stats: int, out: int,
    head_dim: int, fetch: int, part: int,
) -> None:  # fmt: skip
    """Turn rows of scores into weights under the new maximum; rescale sums and outputs to it.

    Row r sees the last `window` of the first (first_valid + r // group) keys of the tile, of which there are `count`.
    """
    num_panels = (count + LANES - 1) // LANES
    for row in range(num_rows):
        if row < ROWS_WITH_PARTS:
            fetch_until(fetch, part + (row + 1) * PARTS_OF_ROW)
        line, stat = scores + row * KEY_TILE * 4, stats + row * 8
        valid = min(first_valid + row // group, count)
        hidden = max(0, first_valid + row // group - window)
        if valid <= hidden:
            for panel in range(num_panels):
                store(line + panel * VECTOR_BYTES, splat(0.0))
            continue
        top = splat(MINUS_INFINITY)
        for panel in range(num_panels):
            score = first_lanes(load(line + panel * VECTOR_BYTES), valid - panel * LANES, MINUS_INFINITY)
            score = lanes_from(score, hidden - panel * LANES, MINUS_INFINITY)
            store(line + panel * VECTOR_BYTES, score)
            top = maximum(top, score)
        old_maximum = load_f32(stat)
        new_maximum = max(old_maximum, reduce_max(top))
        if new_maximum > old_maximum:
            factor = exp(sub(splat(old_maximum), splat(new_maximum)))
            store_f32(stat, new_maximum)
            store_f32(stat + 4, load_f32(stat + 4) * reduce_max(factor))
            for offset in range(row * head_dim * 4, (row + 1) * head_dim * 4, VECTOR_BYTES):
                store(out + offset, mul(load(out + offset), factor))
        sums, highest = splat(0.0), splat(new_maximum)
        for panel in range(num_panels):
            weight = exp(sub(load(line + panel * VECTOR_BYTES), highest))
            store(line + panel * VECTOR_BYTES, weight)
            sums = add(sums, weight)
        store_f32(stat + 4, load_f32(stat + 4) + reduce_add(sums))


@helper
def clear(stats: int, out: int, num_rows: int, head_dim: int) -> None:
    """Begin anew: rows that have seen no key."""
    for row in range(num_rows):
        store_f32(stats + row * 8, MINUS_INFINITY)
        store_f32(stats + row * 8 + 4, 0.0)
    for offset in range(0, num_rows * head_dim * 4, VECTOR_BYTES):
        store(out + offset, splat(0.0))


@helper
def merge(stats: int, out: int, split_stats: int, split_out: int, num_rows: int, head_dim: int) -> None:
    """Add one split's sums and outputs to the running ones, both brought to the larger maximum."""
    for row in range(num_rows):
        stat, other = stats + row * 8, split_stats + row * 8
        if load_f32(other + 4) == 0.0:  # a row that sees no key of this split
            continue
        new_maximum = max(load_f32(stat), load_f32(other))
        highest = splat(new_maximum)
        keep, take = exp(sub(splat(load_f32(stat)), highest)), exp(sub(splat(load_f32(other)), highest))
        store_f32(stat, new_maximum)
        store_f32(stat + 4, load_f32(stat + 4) * reduce_max(keep) + load_f32(other + 4) * reduce_max(take))
        for offset in range(row * head_dim * 4, (row + 1) * head_dim * 4, VECTOR_BYTES):
            store(out + offset, fma(load(split_out + offset), take, mul(load(out + offset), keep)))
