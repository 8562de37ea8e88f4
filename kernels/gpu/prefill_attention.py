"""Attention of the sequences that have several query rows: flat tiles of rows over the whole ragged batch.

grid (q-blocks, KV heads)    a q-block is BLOCK_Q consecutive positions of one sequence. Sequence s begins at q-block
                             query_starts[s] // BLOCK_Q + s, so that a binary search finds whose a q-block is, and
                             the grid depends on nothing but the number of tokens and of sequences
keys of a q-block            |-- before the window --|-- masked --|------ whole ------|-- masked --|
                               never read             the first row still sees them,    up to the diagonal
                                                      the last no longer
"""

import triton
import triton.language as tl

from kernels.gpu.attention_tile import LOG2_E, as_operand, attend_tile, with_sink


@triton.jit
def find_sequence(query_starts: tl.tensor, num_seqs: tl.tensor, q_block: tl.tensor, BLOCK_Q: tl.constexpr) -> tl.tensor:
    """The sequence whose q-blocks begin last at or before `q_block`."""
    left = 0
    right = num_seqs
    while left < right:
        middle = (left + right) // 2
        if tl.load(query_starts + middle) // BLOCK_Q + middle <= q_block:
            left = middle + 1
        else:
            right = middle
    return left - 1


@triton.jit
def key_bounds(
    first_position: tl.tensor,
    end_position: tl.tensor,
    window: tl.tensor,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
) -> tl.tensor:
    """(first_key, last_key, whole_begin, whole_end): keys that some row sees, and tiles that every row sees whole."""
    last_key = tl.maximum(end_position, 0)
    whole_end = tl.minimum(tl.maximum(first_position + 1, 0), last_key) // TILE
    first_key = 0 * last_key
    whole_begin = first_key
    if HAS_WINDOW:
        first_key = tl.maximum(first_position + 1 - window, 0)
        whole_end = tl.maximum(whole_end, first_key // TILE)
        whole_begin = tl.cdiv(tl.maximum(end_position - window, 0), TILE)
        whole_begin = tl.minimum(tl.maximum(whole_begin, first_key // TILE), whole_end)
    return first_key, last_key, whole_begin, whole_end


@triton.jit(do_not_specialize=["num_seqs", "max_keys", "window", "table_stride"])
def prefill_kernel(
    query: tl.tensor,
    cache: tl.tensor,
    tables: tl.tensor,
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    out: tl.tensor,
    sinks: tl.tensor,
    slopes: tl.tensor,
    num_seqs: tl.tensor,
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
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
) -> None:
    """One q-block of a sequence of two query rows or more, for HEADS query heads of one KV head."""
    block_q: tl.constexpr = BLOCK_M // HEADS
    parts: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    # The last q-blocks of a sequence see the most keys: begun last, they would run on alone.
    q_block = tl.num_programs(0) - 1 - tl.program_id(0)
    seq = find_sequence(query_starts, num_seqs, q_block, block_q)
    start = tl.load(query_starts + seq)
    query_len = tl.load(query_starts + seq + 1) - start
    first_row = (q_block - start // block_q - seq) * block_q
    if (first_row >= query_len) | (query_len < 2):
        return
    kv_head = tl.program_id(1) // parts
    context_len = tl.minimum(tl.load(context_lens + seq), max_keys)
    rows = tl.arange(0, BLOCK_M)
    lanes = tl.arange(0, D_PAD)
    row = first_row + rows // HEADS
    head = tl.program_id(1) % parts * HEADS + rows % HEADS
    is_row = (rows < block_q * HEADS) & (row < query_len) & (head < GROUP)
    head = (kv_head * GROUP + head).to(tl.int64)
    token = (start + row).to(tl.int64)
    is_element = is_row[:, None] & (lanes < HEAD_DIM)[None, :]
    query_at = query + token * query_stride + head * query_head_stride
    queries = tl.load(query_at[:, None] + lanes[None, :], mask=is_element, other=0.0)
    queries = as_operand(queries, queries)
    positions = context_len - query_len + row
    first_position = context_len - query_len + first_row
    end_position = tl.minimum(first_position + block_q, context_len)
    first_key, last_key, whole_begin, whole_end = key_bounds(first_position, end_position, window, TILE, HAS_WINDOW)
    slope = tl.zeros([BLOCK_M], tl.float32)
    if slopes is not None:
        slope = tl.load(slopes + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
    keys_at = cache + kv_head.to(tl.int64) * head_stride
    table = tables + seq.to(tl.int64) * table_stride
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    if HAS_WINDOW:
        for tile in range(first_key // TILE, whole_begin):
            acc, top, total = attend_tile(
                acc, top, total, queries, positions, slope, keys_at, table, tile, first_key, last_key, scale, cap,
                window, block_stride, value_stride, slot_stride, BLOCK_SIZE, HEAD_DIM, D_PAD, TILE, True, True,
                HAS_CAP, slopes is not None,
            )  # fmt: skip
    for tile in range(whole_begin, whole_end):
        acc, top, total = attend_tile(
            acc, top, total, queries, positions, slope, keys_at, table, tile, first_key, last_key, scale, cap,
            window, block_stride, value_stride, slot_stride, BLOCK_SIZE, HEAD_DIM, D_PAD, TILE, False, False,
            HAS_CAP, slopes is not None,
        )  # fmt: skip
    for tile in range(whole_end, tl.cdiv(last_key, TILE)):
        acc, top, total = attend_tile(
            acc, top, total, queries, positions, slope, keys_at, table, tile, first_key, last_key, scale, cap,
            window, block_stride, value_stride, slot_stride, BLOCK_SIZE, HEAD_DIM, D_PAD, TILE, True, HAS_WINDOW,
            HAS_CAP, slopes is not None,
        )  # fmt: skip

    if sinks is not None:
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32)
        keep, total = with_sink(top, total, sink)
        acc = acc * keep[:, None]
    acc = acc * (value_scale / tl.where(total > 0.0, total, 1.0))[:, None]
    out_at = out + token * out_stride + head * out_head_stride
    tl.store(out_at[:, None] + lanes[None, :], acc.to(out.dtype.element_ty), mask=is_element)
