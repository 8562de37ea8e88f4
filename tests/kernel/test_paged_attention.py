"""Attention over block tables against its float64 twin, on batches in which everything foreign is NaN."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from kernels import reference
from kernels.errors import KernelInputError
from kernels.paged_attention import AttentionMetadata, paged_attention
from tests.kernel.batches import Batch, error, pick, ragged_batch

pytestmark = pytest.mark.usefixtures("kernels_in_use")

TOLERANCE = 2e-6
# A decode, a chunk with context, a fresh prompt, a prompt of one token, one without queries, one without keys.
MIXED = [(1, 40), (21, 50), (17, 17), (1, 1), (0, 30), (2, 0), (1, 33)]


def attend(batch: Batch, layer: int = 1, scale: float = 0.125) -> torch.Tensor:
    return paged_attention(batch.query, batch.kv_cache, layer, batch.meta, scale)


def expected(batch: Batch, layer: int = 1, scale: float = 0.125) -> torch.Tensor:
    return reference.paged_attention(batch.query, batch.kv_cache, layer, batch.meta, scale)


@pytest.mark.parametrize("head_dim", [8, 16, 64, 80, 96, 128, 256])
def test_a_mixed_batch_equals_the_twin_at_every_head_size(head_dim: int) -> None:
    batch = ragged_batch(MIXED, num_heads=4, num_kv_heads=2, head_dim=head_dim)
    assert error(attend(batch), expected(batch)) < TOLERANCE


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(3, 3), (9, 3), (8, 2), (7, 1), (8, 1), (16, 1), (32, 1), (100, 1)]
)
def test_a_mixed_batch_equals_the_twin_at_every_group_size(num_heads: int, num_kv_heads: int) -> None:
    batch = ragged_batch(MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=16)
    assert error(attend(batch), expected(batch)) < TOLERANCE


@pytest.mark.parametrize("block_size", [1, 5, 8, 16, 32, 64])
def test_a_mixed_batch_equals_the_twin_at_every_block_size(block_size: int) -> None:
    batch = ragged_batch(MIXED, block_size=block_size, head_dim=16)
    assert error(attend(batch), expected(batch)) < TOLERANCE


def test_lengths_at_block_tile_and_split_borders_equal_the_twin() -> None:
    lengths = [n + d for n in (16, 32, 64, 512, 1024) for d in (-1, 0, 1)]
    batch = ragged_batch([(1, n) for n in lengths], num_heads=2, num_kv_heads=1, head_dim=16)
    assert error(attend(batch), expected(batch)) < TOLERANCE


def test_a_chunk_that_crosses_a_split_equals_the_twin() -> None:
    batch = ragged_batch([(70, 540)], num_heads=2, num_kv_heads=1, head_dim=16)
    assert error(attend(batch), expected(batch)) < TOLERANCE


def test_a_sequence_of_no_keys_gives_zeros() -> None:
    batch = ragged_batch([(2, 0), (1, 5)])
    assert torch.equal(attend(batch)[:2], torch.zeros(2, 9, 64))


def test_a_batch_of_no_tokens_gives_no_rows() -> None:
    assert attend(ragged_batch([(0, 20), (0, 0)])).shape == (0, 9, 64)
    assert attend(ragged_batch([])).shape == (0, 9, 64)


def test_cutting_a_prompt_anywhere_gives_the_result_of_one_piece(kernels_in_use: str) -> None:
    batch = ragged_batch([(100, 100)], num_heads=6, num_kv_heads=2)
    whole = attend(batch)
    for cut in (1, 15, 16, 17, 31, 50, 64, 99):
        pieces = torch.cat((attend(pick(batch, 0, 0, cut)), attend(pick(batch, 0, cut))))
        if kernels_in_use == "compiled":
            assert torch.equal(pieces, whole), f"cut at {cut}"
        assert error(pieces, whole) < 1e-5, f"cut at {cut}"


def test_a_row_has_the_same_bits_alone_and_in_a_batch_of_37() -> None:
    lengths = [1 + 37 * n % 700 for n in range(37)]
    batch = ragged_batch([(1, n) for n in lengths])
    together = attend(batch)
    for seq in range(37):
        assert torch.equal(attend(pick(batch, seq))[0], together[seq]), f"sequence {seq} of {lengths[seq]} keys"


def test_a_decode_has_the_same_bits_beside_a_prefill_chunk() -> None:
    batch = ragged_batch([(1, 600), (90, 120), (1, 77)])
    together = attend(batch)
    assert torch.equal(attend(pick(batch, 0))[0], together[0])
    assert torch.equal(attend(pick(batch, 2))[0], together[-1])


@pytest.mark.parametrize("size", [0.0, 1e4])
def test_equal_and_enormous_scores_stay_finite_and_equal_the_twin(size: float) -> None:
    batch = ragged_batch([(3, 70), (1, 33)], head_dim=16)
    scaled = Batch(batch.query * size, batch.kv_cache, batch.meta)
    result = attend(scaled, scale=1.0)
    assert result.isfinite().all()
    # At 1e4 a score carries an error of about 1e4 * 2^-24, which the exponential turns into a relative one.
    assert error(result, expected(scaled, scale=1.0)) < (TOLERANCE if size == 0 else 5e-3)


def test_two_sequences_may_share_their_first_blocks() -> None:
    batch = ragged_batch([(1, 40), (1, 40)])
    batch.meta.block_tables[1, :2] = batch.meta.block_tables[0, :2]
    assert error(attend(batch), expected(batch)) < TOLERANCE


def test_the_result_goes_to_a_given_view_and_nowhere_else() -> None:
    batch = ragged_batch(MIXED)
    memory = torch.full((batch.query.shape[0] + 2, 12, 64), torch.nan)
    target = memory[1:-1, 2:11]
    assert paged_attention(batch.query, batch.kv_cache, 1, batch.meta, 0.125, out=target) is target
    assert error(target, expected(batch)) < TOLERANCE
    target[:] = torch.nan
    assert memory.isnan().all()


def test_a_cache_with_heads_before_slots_is_read_through_its_strides() -> None:
    batch = ragged_batch(MIXED)
    other = batch.kv_cache.transpose(3, 4).contiguous().transpose(3, 4)
    assert error(attend(Batch(batch.query, other, batch.meta)), expected(batch)) < TOLERANCE


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)]
)
def test_other_dtypes_are_served(dtype: torch.dtype, tolerance: float) -> None:
    batch = ragged_batch(MIXED, dtype=dtype)
    result = attend(batch)
    assert result.dtype is dtype
    assert error(result, expected(batch)) < tolerance


@pytest.mark.parametrize("query_len", [1, 3])
def test_a_length_beyond_the_table_reads_no_further_than_the_table(query_len: int) -> None:
    """A length that lies must not lead into other memory: the keys that the table has are all there is."""
    batch = ragged_batch([(query_len, 32), (query_len, 32)], block_size=16)
    table, lengths = batch.meta.block_tables[:, :2], torch.full_like(batch.meta.context_lens, 1_000_000)
    lying = replace(batch.meta, block_tables=table, context_lens=lengths)
    assert error(attend(Batch(batch.query, batch.kv_cache, lying)), expected(batch)) < TOLERANCE


def test_a_wrong_shape_is_refused_by_name() -> None:
    batch = ragged_batch([(1, 20)])
    with pytest.raises(KernelInputError, match="8 query heads are no multiple of 3"):
        attend(Batch(batch.query[:, :8], batch.kv_cache, batch.meta))
    with pytest.raises(KernelInputError, match="must be"):
        attend(Batch(batch.query[..., :32], batch.kv_cache, batch.meta))
    meta = AttentionMetadata(batch.meta.block_tables, torch.zeros(4, dtype=torch.int32), batch.meta.context_lens, 1, 20)
    with pytest.raises(KernelInputError, match="query_starts"):
        attend(Batch(batch.query, batch.kv_cache, meta))


# The cache is virtual memory that is touched in its last block only, but offsets there pass 2^31 elements.
FAR_BLOCK = """
import torch
from kernels.kv_cache_write import rope_and_write
from kernels.paged_attention import AttentionMetadata, paged_attention
kv_cache = torch.empty(12000, 30, 2, 16, 3, 64)
assert kv_cache.numel() > 2**31
block = kv_cache.shape[0] - 1
qkv, slots = torch.randn(5, 15 * 64), block * 16 + torch.arange(5)
table = torch.cat((torch.ones(5, 32), torch.zeros(5, 32)), dim=1)
query = rope_and_write(qkv, table, torch.arange(5), slots, kv_cache, 29, 9, 3)
starts, lens = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
meta = AttentionMetadata(torch.tensor([[block]], dtype=torch.int32), starts, lens, 5, 5)
out = paged_attention(query, kv_cache, 29, meta, 0.125)
values = qkv.view(5, 15, 64)[:, 12:]
assert torch.equal(kv_cache[block, 29, 1, :5], values)
assert torch.allclose(out[0], values[0].repeat_interleave(3, dim=0))
"""


def test_blocks_beyond_two_to_the_31_elements_are_addressed_right(kernels_in_use: str) -> None:
    """In a process of its own: a 32-bit product would end it with a signal."""
    env = {"PAGEMILL_KERNELS": "auto" if kernels_in_use == "compiled" else "torch", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", FAR_BLOCK], check=True, env={**os.environ, **env}, timeout=120)
