"""One tile of keys for one tile of query rows: what prefill and decode share.

    rows of a tile     position * HEADS + head: HEADS query heads of one KV head are rows of one product, so keys and
                       values are read once for all of them, and decode has rows enough for the matrix units
    state of a row     top, the largest score so far; total, Σ 2^(score - top); acc, Σ 2^(score - top) v

Scores are in units of log2 e, so that exp2 does. A tile of keys has a size apart from the blocks': each key finds its
block through the table. Masks stand on the loads: what isn't a key of this sequence is never read, since it may be NaN,
and 0 * NaN is NaN.
"""

import triton
import triton.language as tl

from kernels.gpu.common import UPCAST, dot

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def as_operand(x: tl.tensor, like: tl.tensor) -> tl.tensor:
    """`x` as the partner of `like` in a product: of its dtype, or of float32 under the interpreter."""
    return x.to(tl.float32) if UPCAST else x.to(like.dtype)


@triton.jit
def load_tile(pointers: tl.tensor, mask: tl.tensor, IS_WHOLE: tl.constexpr) -> tl.tensor:
    """What stands at the pointers, zeros where the mask is false; all of it where the tile is known to be whole."""
    return tl.load(pointers) if IS_WHOLE else tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def attend_tile(
    acc: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    queries: tl.tensor,
    positions: tl.tensor,
    slopes: tl.tensor,
    cache: tl.tensor,
    table: tl.tensor,
    tile: tl.tensor,
    first_key: tl.tensor,
    last_key: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    window: tl.tensor,
    block_stride: tl.tensor,
    value_stride: tl.tensor,
    slot_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
    IS_MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
) -> tl.tensor:
    """(acc, top, total) with the keys tile * TILE ... of first_key .. last_key - 1 added.

    queries [rows, D_PAD]; positions int32 [rows]: the last key that a row sees; slopes [rows]; cache: the keys of a
    layer and head; table: the sequence's row of the block table. Without IS_MASKED every row sees the whole tile.
    """
    keys = tile * TILE + tl.arange(0, TILE)
    lanes = tl.arange(0, D_PAD)
    in_range = (keys >= first_key) & (keys < last_key)
    is_whole: tl.constexpr = not IS_MASKED and HEAD_DIM == D_PAD
    if IS_MASKED:
        block = tl.load(table + keys // BLOCK_SIZE, mask=in_range, other=0)
        is_loaded = in_range[:, None] & (lanes < HEAD_DIM)[None, :]
    else:
        block = tl.load(table + keys // BLOCK_SIZE)
        is_loaded = (lanes < HEAD_DIM)[None, :]
    offsets = block.to(tl.int64) * block_stride + (keys % BLOCK_SIZE).to(tl.int64) * slot_stride
    pointers = cache + offsets[:, None] + lanes[None, :]
    k = load_tile(pointers, is_loaded, is_whole)
    scores = dot(queries, tl.trans(as_operand(k, queries)))
    factor = scale
    if HAS_CAP:
        # tanh |x| = (1 - e^-2|x|) / (1 + e^-2|x|), which overflows nowhere.
        power = tl.exp2(tl.abs(scores) * (-2.0 * scale / cap))
        capped = cap * LOG2_E * (1.0 - power) / (1.0 + power)
        scores = tl.where(scores < 0.0, -capped, capped)
        factor = 1.0
    if HAS_SLOPES:
        distance = (keys[None, :] - positions[:, None]).to(tl.float32)
        scores = scores * factor + slopes[:, None] * distance
        factor = 1.0
    if IS_MASKED:
        is_seen = in_range[None, :] & (keys[None, :] <= positions[:, None])
        if HAS_WINDOW:
            is_seen = is_seen & (keys[None, :] > positions[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    # A row that has seen no key has a top of -inf, and -inf - -inf is NaN.
    finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * factor - finite_top[:, None])
    keep = tl.exp2(top - finite_top)
    total = total * keep + tl.sum(weights, 1)
    v = load_tile(pointers + value_stride, is_loaded, is_whole)
    acc = acc * keep[:, None] + dot(as_operand(weights, queries), as_operand(v, queries))
    return acc, new_top, total


@triton.jit
def with_sink(top: tl.tensor, total: tl.tensor, sink: tl.tensor) -> tl.tensor:
    """(keep, total): the total with a sink's weight, and what acc is to be multiplied by."""
    new_top = tl.maximum(top, sink * LOG2_E)
    new_top = tl.where(new_top == float("-inf"), 0.0, new_top)
    keep = tl.exp2(top - new_top)
    return keep, total * keep + tl.exp2(sink * LOG2_E - new_top)


@triton.jit
def spoil_rows(
    place: tl.tensor, mask: tl.tensor, query_len: tl.tensor, max_query_len: tl.tensor, out_stride: tl.tensor
) -> None:
    """Store NaN in all rows of a sequence, from the pointers `place` on, if it has several and no prefill is launched.

    That computes such rows, but not in a batch that was said to have none: they would be whatever the memory holds.
    """
    if (query_len > 1) & (max_query_len < 2):
        for _ in range(query_len):
            spoiled = tl.full(place.shape, float("nan"), tl.float32).to(place.dtype.element_ty)
            tl.store(place, spoiled, mask=mask)
            place += out_stride
