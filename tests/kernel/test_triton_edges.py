"""Triton's kernels at the ends of what they take: nothing, one, exactly a tile and one more or less, no rows at all."""

from dataclasses import replace

import pytest
import torch

from kernels import reference
from kernels.activation import silu_and_mul
from kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks
from kernels.checksum import block_checksums
from kernels.dispatch import implementation
from kernels.kv_cache_write import rope_and_write
from kernels.paged_attention import paged_attention
from kernels.penalties import Penalties, apply_penalties
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.sampling import sample
from tests.kernel.batches import Batch, error, pick, ragged_batch
from tests.kernel.test_kv_cache_write import cos_sin_table

pytestmark = pytest.mark.usefixtures("triton_in_use")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize("is_decode", [True, False], ids=["decodes", "chunks"])
def test_contexts_of_nothing_one_and_whole_blocks(block_size: int, is_decode: bool) -> None:
    """Beside tables that are just as wide as the longest, and wider ones."""
    lengths = [0, 1, block_size - 1, block_size, block_size + 1, 2 * block_size]
    seqs = [(1 if is_decode else min(max(length, 1), 3), length) for length in lengths]
    batch = ragged_batch(seqs, num_heads=2, num_kv_heads=1, head_dim=16, block_size=block_size)
    exact = Batch(batch.query, batch.kv_cache, replace(batch.meta, block_tables=batch.meta.block_tables[:, :2]))
    wanted = reference.paged_attention(batch.query, batch.kv_cache, 1, batch.meta, 0.25)
    for each in (batch, exact):
        assert error(paged_attention(each.query, each.kv_cache, 1, each.meta, 0.25), wanted) < 2e-6


def test_a_table_without_columns_is_a_batch_without_keys() -> None:
    batch = ragged_batch([(1, 0), (2, 0)], num_heads=2, num_kv_heads=1, head_dim=16)
    empty = replace(batch.meta, block_tables=batch.meta.block_tables[:, :0])
    assert not paged_attention(batch.query, batch.kv_cache, 1, empty, 0.25).any()


def test_one_sequence_alone_at_every_place_of_a_chunk() -> None:
    batch = ragged_batch([(17, 33)], num_heads=2, num_kv_heads=1, head_dim=16)
    wanted = reference.paged_attention(batch.query, batch.kv_cache, 1, batch.meta, 0.25)
    for first, last in ((0, 1), (16, 17), (0, 16), (1, 17)):
        part = pick(batch, 0, first, last)
        made = paged_attention(part.query, part.kv_cache, 1, part.meta, 0.25)
        assert error(made, wanted[first:last]) < 2e-6


@pytest.mark.parametrize("num_rows", [0, 1, 2])
@pytest.mark.parametrize("size", [1, 2, 1023, 1024, 1025, 2048])
def test_rows_of_one_element_and_of_whole_tiles(size: int, num_rows: int) -> None:
    x, weight = random(num_rows, size), random(1, size, seed=1)[0]
    residual, gate_up = random(num_rows, size, seed=2), random(num_rows, 2 * size, seed=3)
    twin = residual.clone()
    wanted = reference.add_rms_norm(x, twin, weight, 1e-5)
    assert error(add_rms_norm(x, residual, weight, 1e-5), wanted) < 1e-6
    assert error(residual, twin) < 1e-6
    assert error(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)) < 1e-6
    assert error(silu_and_mul(gate_up), reference.silu_and_mul(gate_up)) < 1e-6


@pytest.mark.parametrize("num_words", [1, 1023, 1024, 1025])
def test_blocks_of_one_word_and_of_whole_pieces(num_words: int) -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (4, 1, 2, num_words), generator=torch.Generator().manual_seed(4))
    assert torch.equal(block_checksums(words), reference.block_checksums(words))
    for ids in ([], [3], [1, 2]):
        index, staging, wanted = torch.tensor(ids, dtype=torch.int64), words[: len(ids)].clone(), words.clone()
        gather_blocks(words, index, staging)
        assert torch.equal(staging, wanted[index])
        scatter_blocks(staging + 1, index, words)
        wanted[index] = staging + 1
        copy_blocks(words, index, index * 0) if len(ids) == 1 else None
        wanted[0] = wanted[3] if len(ids) == 1 else wanted[0]
        assert torch.equal(words, wanted)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (16, 1)])
@pytest.mark.parametrize("slots", [[], [0], [7, 8, 15], [-1, -1]], ids=str)
def test_slots_at_both_ends_of_a_block_and_none(slots: list[int], heads: tuple[int, int]) -> None:
    num_heads, num_kv_heads = heads
    qkv, positions = random(len(slots), (num_heads + 2 * num_kv_heads) * 128), torch.zeros(len(slots)).long()
    cache = torch.full((2, 1, 2, 8, num_kv_heads, 128), -77.0)
    wanted = cache.clone()
    args = (qkv, cos_sin_table(128), positions, torch.tensor(slots, dtype=torch.int64))
    query = rope_and_write(*args, cache, 0, num_heads, num_kv_heads)
    assert error(query, reference.rope_and_write(*args, wanted, 0, num_heads, num_kv_heads)) < 1e-6
    assert error(cache, wanted) < 1e-6
    assert torch.equal(cache == -77.0, wanted == -77.0)


@pytest.mark.parametrize("length", [0, 1, 1023, 1024, 1025])
def test_histories_of_nothing_one_token_and_whole_pieces(length: int) -> None:
    g = torch.Generator().manual_seed(length)
    token_ids = torch.randint(0, 40, (1, 1030), generator=g)
    numbers = (torch.tensor([n]) for n in (0, length // 2, length))
    amounts = (torch.tensor([n]) for n in (1.5, 0.25, 0.5))
    penalties, logits = Penalties(token_ids, *numbers, *amounts), random(1, 40)
    for history in (penalties, replace(penalties, token_ids=token_ids[:, :length])):
        made, wanted = logits.clone(), logits.clone()
        apply_penalties(made, history)
        reference.apply_penalties(wanted, history)
        torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-4)


# Temperatures at the ends of float32, a share and a count of nothing and of everything, in one batch.
EXTREMES = [
    *(
        (1e-45, 0, 1.0, 0.0),
        (1e-30, 5, 0.5, 0.0),
        (3e38, 0, 1.0, 0.0),
        (torch.inf, 0, 1.0, 0.0),
        (torch.inf, 3, 0.5, 0.0),
    ),
    *((1.0, 2**40, 1.0, 0.0), (1.0, 0, -1.0, 0.0), (1.0, 1, 0.0, 1.0), (torch.nan, 3, 0.5, 0.1), (-1.0, 0, 1.0, 0.0)),
    *((1.0, 3, torch.nan, torch.nan), (1.0, 0, 1e-45, 0.0), (1.0, 0, 1.0, 1e-45), (0.5, 2, 0.999, torch.inf)),
]


# NumPy, by which the interpreter computes, tells of infinities and of their quotients.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("size", [1.0, 1e-38, 3e38])
def test_wishes_at_the_ends_of_what_numbers_hold_draw_what_the_twin_draws(size: float) -> None:
    """With logits near the ends themselves, among them none that is a number."""
    logits = random(len(EXTREMES), 40).clamp(-1, 1) * size
    logits[:, 3::7], logits[:, 4::9] = torch.nan, -torch.inf
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*EXTREMES, strict=True))
    seeds = torch.arange(len(EXTREMES))
    args = (logits, temperature, top_k, top_p, seeds, seeds + 5, 40, min_p)
    wanted = reference.sample(*args).tolist()
    for choice in ("triton", "torch", "auto"):
        with implementation(choice):
            assert sample(*args).tolist() == wanted, choice


@pytest.mark.parametrize("vocab", [8191, 8192, 8193])
def test_a_vocabulary_of_a_whole_piece_and_one_more_or_less(vocab: int) -> None:
    """The largest stands last, where a tile ends or is all padding but for it."""
    logits = random(2, vocab).clamp(max=3.0)
    logits[:, -1] = 9.0
    zero = torch.zeros(2)
    temperature, seeds = torch.tensor([0.0, 0.1]), torch.arange(2)
    ids = sample(logits, temperature, torch.tensor([0, 5]), zero + 0.9, seeds, seeds, vocab, zero)
    assert ids.tolist() == [vocab - 1] * 2
