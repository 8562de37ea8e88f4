"""Attention of the sequences that have one query row, their keys split over programs (flash-decoding), and the merge.

    keys of a sequence    |---- split ----|---- split ----|-- split --|     of equal length, at fixed positions
    grid (sequences, KV heads, splits)     a split without keys of its sequence ends at once; the last one of the grid
                                           takes all keys that are left, so none is lost where they are more than the
                                           batch was said to have
    partials              acc, top and total of each split, in float32; the merge takes them in order

Where splits are sized by the model alone, a row's sums are taken in one order whatever its batch. With one split there
is no merge, and the same bits: the merge of one split multiplies by 1.
"""

import triton
import triton.language as tl

from kernels.gpu.attention_tile import LOG2_E, as_operand, attend_tile, spoil_rows, with_sink


@triton.jit(do_not_specialize=["num_splits", "split_len", "max_query_len", "max_keys", "window", "table_stride"])
def decode_kernel(
    query: tl.tensor,
    cache: tl.tensor,
    tables: tl.tensor,
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    out: tl.tensor,
    stats: tl.tensor,
    sinks: tl.tensor,
    slopes: tl.tensor,
    num_splits: tl.tensor,
    split_len: tl.tensor,
    max_query_len: tl.tensor,
    max_keys: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    value_scale: tl.tensor,
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    out_stride: tl.tensor,
    out_head_stride: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    value_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
) -> None:
    """One split of a sequence of one query row, for HEADS query heads of one KV head.

    Without IS_SPLIT it writes the row of `out`. With it, `out` is float32 [num_seqs, num_heads, num_splits, HEAD_DIM]
    and `stats` float32 [num_seqs, num_heads, num_splits, 2]: acc, and top and total.
    """
    parts: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    seq = tl.program_id(0)
    kv_head = tl.program_id(1) // parts
    split = tl.program_id(2)
    start = tl.load(query_starts + seq)
    query_len = tl.load(query_starts + seq + 1) - start
    context_len = tl.minimum(tl.load(context_lens + seq), max_keys)
    first_key = split * split_len
    if HAS_WINDOW:
        first_key = tl.maximum(first_key, context_len - window)
    last_key = tl.where(split + 1 < num_splits, tl.minimum((split + 1) * split_len, context_len), context_len)
    is_idle = query_len != 1
    if IS_SPLIT:
        is_idle = is_idle | (first_key >= last_key)
    rows = tl.arange(0, ROWS)
    lanes = tl.arange(0, D_PAD)
    head = tl.program_id(1) % parts * HEADS + rows
    is_row = (rows < HEADS) & (head < GROUP)
    head = (kv_head * GROUP + head).to(tl.int64)
    is_element = is_row[:, None] & (lanes < HEAD_DIM)[None, :]
    out_at = out + start.to(tl.int64) * out_stride + head * out_head_stride
    if is_idle:
        if not IS_SPLIT:
            spoil_rows(out_at[:, None] + lanes[None, :], is_element, query_len, max_query_len, out_stride)
        return
    query_at = query + start.to(tl.int64) * query_stride + head * query_head_stride
    queries = tl.load(query_at[:, None] + lanes[None, :], mask=is_element, other=0.0)
    queries = as_operand(queries, queries)
    slope = tl.zeros([ROWS], tl.float32)
    if slopes is not None:
        slope = tl.load(slopes + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
    positions = context_len - 1 + 0 * rows
    keys_at = cache + kv_head.to(tl.int64) * head_stride
    table = tables + seq.to(tl.int64) * table_stride
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    # The one row sees all keys in range, so the mask on them is the window's, too.
    for tile in range(first_key // TILE, tl.cdiv(last_key, TILE)):
        acc, top, total = attend_tile(
            acc, top, total, queries, positions, slope, keys_at, table, tile, first_key, last_key, scale, cap,
            window, block_stride, value_stride, slot_stride, BLOCK_SIZE, HEAD_DIM, D_PAD, TILE, True, False,
            HAS_CAP, slopes is not None,
        )  # fmt: skip

    if IS_SPLIT:
        partial = (seq.to(tl.int64) * (tl.num_programs(1) // parts * GROUP) + head) * num_splits + split
        tl.store(out + partial[:, None] * HEAD_DIM + lanes[None, :], acc, mask=is_element)
        tl.store(stats + partial * 2, top, mask=is_row)
        tl.store(stats + partial * 2 + 1, total, mask=is_row)
    else:
        if sinks is not None:
            sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32)
            keep, total = with_sink(top, total, sink)
            acc = acc * keep[:, None]
        acc = acc * (value_scale / tl.where(total > 0.0, total, 1.0))[:, None]
        tl.store(out_at[:, None] + lanes[None, :], acc.to(out.dtype.element_ty), mask=is_element)


@triton.jit(do_not_specialize=["num_splits", "split_len", "max_query_len", "max_keys", "window"])
def merge_kernel(
    partials: tl.tensor,
    stats: tl.tensor,
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    out: tl.tensor,
    sinks: tl.tensor,
    num_splits: tl.tensor,
    split_len: tl.tensor,
    max_query_len: tl.tensor,
    max_keys: tl.tensor,
    window: tl.tensor,
    value_scale: tl.tensor,
    out_stride: tl.tensor,
    out_head_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
) -> None:
    """One head's row of `out` from the partials of those splits that have keys: the others were never written."""
    seq = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    start = tl.load(query_starts + seq)
    query_len = tl.load(query_starts + seq + 1) - start
    lanes = tl.arange(0, D_PAD)
    is_lane = (lanes < HEAD_DIM)[None, :]
    out_at = (out + start.to(tl.int64) * out_stride + head * out_head_stride + lanes)[None, :]
    if query_len != 1:
        spoil_rows(out_at, is_lane, query_len, max_query_len, out_stride)
        return
    context_len = tl.minimum(tl.load(context_lens + seq), max_keys)
    first_split = 0
    if HAS_WINDOW:
        first_split = tl.minimum(tl.maximum(context_len - window, 0) // split_len, num_splits - 1)
    end_split = tl.minimum(tl.cdiv(context_len, split_len), num_splits)
    base = (seq.to(tl.int64) * tl.num_programs(1) + head) * num_splits
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, D_PAD], tl.float32)
    for chunk in range(first_split // CHUNK, tl.cdiv(end_split, CHUNK)):
        splits = chunk * CHUNK + tl.arange(0, CHUNK)
        is_there = (splits >= first_split) & (splits < end_split)
        split_top = tl.load(stats + (base + splits) * 2, mask=is_there, other=float("-inf"))
        split_total = tl.load(stats + (base + splits) * 2 + 1, mask=is_there, other=0.0)
        is_element = is_there[:, None] & is_lane
        partial_at = partials + (base + splits)[:, None] * HEAD_DIM + lanes[None, :]
        partial = tl.load(partial_at, mask=is_element, other=0.0)
        new_top = tl.maximum(top, tl.max(split_top, 0))
        finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(split_top - finite_top)
        keep = tl.exp2(top - finite_top)
        total = total * keep + tl.sum(split_total * weights, 0)
        acc = acc * keep[:, None] + tl.sum(partial * weights[:, None], 0)[None, :]
        top = new_top
    if sinks is not None:
        keep, total = with_sink(top, total, tl.load(sinks + head).to(tl.float32))
        acc = acc * keep[:, None]
    acc = acc * (value_scale / tl.where(total > 0.0, total, 1.0))[:, None]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=is_lane)
