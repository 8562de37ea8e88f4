"""The Triton attention against its float64 twin: shapes, borders, foreign memory. On CUDA, or by the interpreter."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from kernels.paged_attention import AttentionMetadata, paged_attention
from tests.kernel.batches import Batch, error, pick
from tests.kernel.triton_attention import (
    DEVICE,
    HAS_CUDA,
    MIXED,
    TOLERANCE,
    attend,
    expected,
    make_batch,
    needs_triton,
    triton_alone,
)

__all__ = ["triton_alone"]

pytestmark = [needs_triton, pytest.mark.usefixtures("triton_alone")]

FP32 = TOLERANCE[torch.float32]
# Each dtype with head sizes that are a power of two and that are not; float32 with all.
HEAD_DIMS = [
    *((head_dim, torch.float32) for head_dim in (16, 64, 80, 96, 128, 256)),
    *((head_dim, torch.float16) for head_dim in (64, 80, 256)),
    *((head_dim, torch.bfloat16) for head_dim in (64, 96)),
]


@pytest.mark.parametrize(("head_dim", "dtype"), HEAD_DIMS)
def test_a_mixed_batch_equals_the_twin_at_every_head_size(head_dim: int, dtype: torch.dtype) -> None:
    batch = make_batch(MIXED, num_heads=4, num_kv_heads=2, head_dim=head_dim, dtype=dtype)
    result = attend(batch)
    assert result.dtype is dtype
    assert error(result, expected(batch)) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(3, 3), (9, 3), (8, 2), (7, 1), (8, 1), (16, 1), (32, 1), (40, 1)]
)
def test_a_mixed_batch_equals_the_twin_at_every_group_size(num_heads: int, num_kv_heads: int) -> None:
    batch = make_batch(MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=16)
    assert error(attend(batch), expected(batch)) < FP32


@pytest.mark.parametrize("block_size", [1, 5, 8, 16, 32, 64])
def test_a_mixed_batch_equals_the_twin_at_every_block_size(block_size: int) -> None:
    batch = make_batch(MIXED, num_heads=6, num_kv_heads=2, block_size=block_size, head_dim=16)
    assert error(attend(batch), expected(batch)) < FP32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_lengths_at_block_tile_and_split_borders_equal_the_twin(dtype: torch.dtype) -> None:
    lengths = [n + d for n in (16, 32, 64, 512, 1024) for d in (-1, 0, 1)]
    batch = make_batch([(1, n) for n in lengths], num_heads=2, num_kv_heads=1, head_dim=16, dtype=dtype)
    assert error(attend(batch), expected(batch)) < TOLERANCE[dtype]


def test_a_prompt_of_any_length_around_a_tile_equals_the_twin() -> None:
    lengths = [2, 15, 16, 17, 31, 32, 33]
    batch = make_batch([(n, n) for n in lengths], num_heads=2, num_kv_heads=1, head_dim=16)
    assert error(attend(batch), expected(batch)) < FP32


def test_padded_rows_of_a_graph_give_zeros_and_leave_the_others_alone() -> None:
    """A captured graph keeps its bounds: rows without a sequence have no keys, and the longest may be short."""
    batch = make_batch([(1, 0), (1, 1), (1, 20), (1, 0)])
    wide = torch.full((4, 128), 2**31 - 1, dtype=torch.int32, device=DEVICE)
    wide[:, : batch.meta.block_tables.shape[1]] = batch.meta.block_tables
    padded = Batch(batch.query, batch.kv_cache, replace(batch.meta, block_tables=wide, max_context_len=2048))
    result = attend(padded)
    assert torch.equal(result[[0, 3]], torch.zeros(2, 9, 64))
    assert torch.equal(result, attend(batch))
    assert error(result, expected(batch)) < FP32


def test_an_empty_last_split_leaves_the_row_as_it_was() -> None:
    batch = make_batch([(1, 512), (1, 513)], num_heads=2, num_kv_heads=1, head_dim=16)
    result = attend(batch)
    assert torch.equal(result[0], attend(pick(batch, 0))[0])
    assert error(result, expected(batch)) < FP32


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("query_len", [1, 3])
def test_unwritten_slots_of_the_last_block_are_not_read(poison: float, query_len: int) -> None:
    batch = make_batch([(query_len, 17), (query_len, 33)], dtype=torch.float16)
    batch.kv_cache[batch.kv_cache.isnan()] = poison
    assert error(attend(batch), expected(batch)) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("padding", [0, -1, 2**31 - 1])
def test_table_entries_past_the_end_are_not_followed(padding: int) -> None:
    """Block 0 is nobody's and holds NaN, as does every block that no sequence owns."""
    batch = make_batch(MIXED)
    used = -(-batch.meta.context_lens // 16)
    table = batch.meta.block_tables
    table[torch.arange(table.shape[1], device=DEVICE) >= used.unsqueeze(1)] = padding
    assert table.stride(0) > table.shape[1]
    assert error(attend(batch), expected(batch)) < FP32


@pytest.mark.parametrize("query_len", [1, 3])
def test_a_length_beyond_the_table_reads_no_further_than_the_table(query_len: int) -> None:
    """A length that lies must not lead into other memory: the keys that the table has are all there is."""
    batch = make_batch([(query_len, 32), (query_len, 32)], block_size=16)
    table, lengths = batch.meta.block_tables[:, :2], torch.full_like(batch.meta.context_lens, 1_000_000)
    lying = replace(batch.meta, block_tables=table, context_lens=lengths)
    assert error(attend(Batch(batch.query, batch.kv_cache, lying)), expected(batch)) < FP32


@pytest.mark.parametrize("head_dim", [64, 80])
def test_the_result_goes_to_a_given_view_and_nowhere_else(head_dim: int) -> None:
    batch = make_batch(MIXED, head_dim=head_dim)
    memory = torch.full((batch.query.shape[0] + 2, 12, head_dim + 16), torch.nan, device=DEVICE)
    target = memory[1:-1, 2:11, :head_dim]
    assert paged_attention(batch.query, batch.kv_cache, 1, batch.meta, 0.125, out=target) is target
    assert error(target.cpu(), expected(batch)) < FP32
    target[:] = torch.nan
    assert memory.isnan().all()


def test_query_heads_and_tokens_beside_the_batch_are_not_read() -> None:
    batch = make_batch(MIXED, num_heads=6, num_kv_heads=2, head_dim=80)
    num_tokens = batch.query.shape[0]
    memory = torch.full((num_tokens + 40, 40, 128), torch.nan, device=DEVICE)
    memory[20:-20, 3:9, :80] = batch.query
    inside = Batch(memory[20:-20, 3:9, :80], batch.kv_cache, batch.meta)
    assert error(attend(inside), expected(batch)) < FP32


@pytest.mark.parametrize("order", [(0, 1, 2, 4, 3, 5), (2, 0, 1, 3, 4, 5), (1, 4, 0, 2, 3, 5)])
def test_a_cache_of_any_layout_is_read_through_its_strides(order: tuple[int, ...]) -> None:
    """Heads before slots; keys and values apart, each with all blocks; layers first."""
    batch = make_batch(MIXED)
    inverse = [order.index(axis) for axis in range(6)]
    other = batch.kv_cache.permute(order).contiguous().permute(inverse)
    assert other.stride() != batch.kv_cache.stride()
    assert error(attend(Batch(batch.query, other, batch.meta)), expected(batch)) < FP32


def test_strides_and_counts_of_one_are_served() -> None:
    """One token, head, block, layer and key: what the compiler takes for a constant."""
    batch = make_batch([(1, 1)], num_heads=1, num_kv_heads=1, head_dim=16, block_size=1, num_layers=1)
    table = batch.meta.block_tables[:, :1].contiguous()
    meta = replace(batch.meta, block_tables=table)
    assert error(attend(Batch(batch.query, batch.kv_cache, meta), layer=0), expected(batch, layer=0)) < FP32


def test_a_chunk_of_a_prompt_gives_what_the_whole_prompt_gives() -> None:
    batch = make_batch([(50, 50)], num_heads=6, num_kv_heads=2, head_dim=16)
    whole = attend(batch)
    assert error(whole, expected(batch)) < FP32
    for cut in (1, 15, 16, 17, 31, 49):
        pieces = torch.cat((attend(pick(batch, 0, 0, cut)), attend(pick(batch, 0, cut))))
        assert error(pieces, whole) < 1e-5, f"cut at {cut}"


def test_a_chunk_that_crosses_splits_and_tiles_equals_the_twin() -> None:
    batch = make_batch([(40, 540)], num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float16)
    assert error(attend(batch), expected(batch)) < TOLERANCE[torch.float16]


def test_two_sequences_may_share_their_first_blocks() -> None:
    batch = make_batch([(1, 40), (3, 40)])
    batch.meta.block_tables[1, :2] = batch.meta.block_tables[0, :2]
    assert error(attend(batch), expected(batch)) < FP32


@pytest.mark.parametrize("size", [0.0, 1e4])
def test_equal_and_enormous_scores_stay_finite_and_equal_the_twin(size: float) -> None:
    """At 1e4 some scores pass what float16 holds."""
    batch = make_batch([(3, 70), (1, 33)], head_dim=16, dtype=torch.float16)
    scaled = Batch((batch.query * size).clamp(-6e4, 6e4), batch.kv_cache, batch.meta)
    result = attend(scaled, scale=1.0)
    assert result.isfinite().all()
    assert error(result, expected(scaled, scale=1.0)) < (TOLERANCE[torch.float16] if size == 0 else 5e-3)


def test_a_row_has_the_same_bits_alone_and_in_a_batch_of_37() -> None:
    lengths = [1 + 37 * n % 300 for n in range(36)] + [1100]
    batch = make_batch([(1, n) for n in lengths], num_heads=3, num_kv_heads=1, head_dim=16)
    together = attend(batch)
    for seq in range(37):
        assert torch.equal(attend(pick(batch, seq))[0], together[seq]), f"sequence {seq} of {lengths[seq]} keys"


def test_a_decode_has_the_same_bits_beside_a_prefill_chunk() -> None:
    batch = make_batch([(1, 600), (30, 40), (1, 77)], num_heads=3, num_kv_heads=1, head_dim=16)
    together = attend(batch)
    assert torch.equal(attend(pick(batch, 0))[0], together[0])
    assert torch.equal(attend(pick(batch, 2))[0], together[-1])


@pytest.mark.parametrize("seqs", [[(1, 2100), (1, 3)], [(4, 300), (1, 600)]])
def test_sizes_chosen_by_the_batch_equal_the_twin(seqs: list[tuple[int, int]]) -> None:
    batch = make_batch(seqs, num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float16)
    by_shape = Batch(batch.query, batch.kv_cache, replace(batch.meta, is_deterministic=False))
    assert error(attend(by_shape), expected(batch)) < TOLERANCE[torch.float16]


def test_a_batch_of_no_tokens_gives_no_rows() -> None:
    assert attend(make_batch([(0, 20), (0, 0)])).shape == (0, 9, 64)
    assert attend(make_batch([])).shape == (0, 9, 64)


# The cache, the queries and the output are virtual memory that is touched in few places, but offsets pass 2^31 there.
FAR = """
import sys, torch
from kernels.paged_attention import AttentionMetadata, paged_attention
device = sys.argv[1]
kv_cache = torch.empty(24000, 30, 2, 16, 3, 64, dtype=torch.float16, device=device)
assert kv_cache.numel() > 2**32
block = kv_cache.shape[0] - 1
kv_cache[block, 29] = torch.randn(2, 16, 3, 64)
values = kv_cache[block, 29, 1]
rows = [torch.empty(4 * (2**30 + 16), dtype=torch.float16, device=device) for _ in range(2)]
query, out = (row.as_strided((4, 9, 64), (2**30 + 16, 64, 1)) for row in rows)
query.zero_()
tables = torch.full((2, 1), block, dtype=torch.int32, device=device)
starts = torch.tensor([0, 3, 4], dtype=torch.int32, device=device)
lens = torch.tensor([3, 1], dtype=torch.int32, device=device)
paged_attention(query, kv_cache, 29, AttentionMetadata(tables, starts, lens, 3, 3), 0.125, out=out)
rows = [values[:n].float().mean(0).half() for n in (1, 2, 3, 1)]
wanted = torch.stack(rows).repeat_interleave(3, dim=1)
assert torch.allclose(out, wanted, atol=1e-3), (out - wanted).abs().max()
"""


def test_offsets_beyond_two_to_the_31_are_addressed_right() -> None:
    """In a process of its own: a 32-bit product would end it with a signal."""
    env = {**os.environ, "PAGEMILL_KERNELS": "attention=triton", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", FAR, DEVICE], check=True, env=env, timeout=240)


@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
def test_a_captured_graph_serves_other_lengths_of_the_same_bounds() -> None:
    """Captured with one set of lengths, replayed with another: nothing of the first is baked in."""
    batch = make_batch([(1, 700), (1, 40), (1, 90)], dtype=torch.float16)
    attend(batch)
    lens = batch.meta.context_lens
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(batch.query, batch.kv_cache, 1, batch.meta, 0.125)
    lens.copy_(torch.tensor([513, 0, 17], dtype=torch.int32))
    graph.replay()
    assert error(out.cpu(), expected(batch)) < TOLERANCE[torch.float16]


def test_lengths_and_tables_of_64_bits_are_served() -> None:
    batch = make_batch(MIXED)
    meta = batch.meta
    wide = AttentionMetadata(
        meta.block_tables.long(),
        meta.query_starts.long(),
        meta.context_lens.long(),
        meta.max_query_len,
        meta.max_context_len,
    )
    assert error(attend(Batch(batch.query, batch.kv_cache, wide)), expected(batch)) < FP32
