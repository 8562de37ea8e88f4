"""Rotary embedding and the write into the cache, fused, against their float64 twin."""

import pytest
import torch

from kernels import reference
from kernels.errors import KernelInputError
from kernels.kv_cache_write import rope_and_write
from tests.kernel.batches import error

pytestmark = [pytest.mark.usefixtures("kernels_in_use"), pytest.mark.triton]


def cos_sin_table(rotary_dim: int, num_positions: int = 60) -> torch.Tensor:
    frequencies = 10000.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.arange(num_positions)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def inputs(head_dim: int, num_tokens: int = 7, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A fused qkv of 3 query and 2 KV heads, as a slice of a wider tensor, and a cache full of a sentinel."""
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn((num_tokens, 7 * head_dim + 9), generator=generator)[:, : 7 * head_dim]
    return qkv, torch.full((6, 2, 2, 8, 2, head_dim), -77.0)


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"),
    [(8, 8), (16, 16), (64, 64), (64, 32), (80, 80), (80, 20), (96, 96), (128, 128), (256, 64)],
)
def test_queries_and_cache_equal_the_twin(head_dim: int, rotary_dim: int) -> None:
    qkv, kv_cache = inputs(head_dim)
    wanted_cache = kv_cache.clone()
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(1))[:7]
    positions = torch.arange(7) * 2
    args = (qkv, cos_sin_table(rotary_dim), positions, slots)
    query = rope_and_write(*args, kv_cache, 1, 3, 2)
    wanted = reference.rope_and_write(*args, wanted_cache, 1, 3, 2)
    assert query.shape == (7, 3, head_dim)
    assert error(query, wanted) < 1e-6
    assert error(kv_cache, wanted_cache) < 1e-6
    assert torch.equal(kv_cache[:, :, 1], wanted_cache[:, :, 1]), "values are copied bit by bit"


def test_a_slot_of_minus_one_is_not_written_but_its_query_is_rotated() -> None:
    qkv, kv_cache = inputs(64, num_tokens=3)
    query = rope_and_write(qkv, cos_sin_table(64), torch.arange(3), torch.tensor([-1, 12, -1]), kv_cache, 0, 3, 2)
    assert (kv_cache != -77.0).flatten(1).any(1).tolist() == [False, True, False, False, False, False]
    assert bool((kv_cache[1, 0, :, 4] != -77.0).any())
    kv_cache[1, 0, :, 4] = -77.0
    assert bool((kv_cache == -77.0).all()), "other slots and layers are left alone"
    assert query.isfinite().all()


def test_positions_may_be_int32() -> None:
    qkv, kv_cache = inputs(64)
    args = (torch.arange(7), kv_cache, 0, 3, 2)
    query = rope_and_write(qkv, cos_sin_table(64), torch.arange(7), *args)
    assert torch.equal(rope_and_write(qkv, cos_sin_table(64), torch.arange(7, dtype=torch.int32), *args), query)


def test_a_token_has_the_same_bits_alone_and_in_a_batch() -> None:
    qkv, kv_cache = inputs(64)
    positions, slots = torch.arange(7), torch.arange(7) + 20
    together = rope_and_write(qkv, cos_sin_table(64), positions, slots, kv_cache, 0, 3, 2)
    for token in (0, 3, 6):
        one = slice(token, token + 1)
        alone_cache = torch.full_like(kv_cache, -77.0)
        alone = rope_and_write(qkv[one], cos_sin_table(64), positions[one], slots[one], alone_cache, 0, 3, 2)
        assert torch.equal(alone[0], together[token])
        block, offset = divmod(int(slots[token]), 8)
        assert torch.equal(alone_cache[block, 0, :, offset], kv_cache[block, 0, :, offset])


def test_no_tokens_write_nothing() -> None:
    qkv, kv_cache = inputs(64, num_tokens=0)
    nothing = torch.empty(0, dtype=torch.int64)
    assert rope_and_write(qkv, cos_sin_table(64), nothing, nothing, kv_cache, 0, 3, 2).shape == (0, 3, 64)
    assert bool((kv_cache == -77.0).all())


def test_bfloat16_is_rotated_in_float32() -> None:
    qkv, kv_cache = inputs(64)
    qkv, kv_cache = qkv.bfloat16(), kv_cache.bfloat16()
    wanted_cache = kv_cache.clone()
    args = (qkv, cos_sin_table(64), torch.arange(7), torch.arange(7))
    query = rope_and_write(*args, kv_cache, 0, 3, 2)
    assert query.dtype is torch.bfloat16
    assert error(query, reference.rope_and_write(*args, wanted_cache, 0, 3, 2)) < 4e-3
    assert error(kv_cache, wanted_cache) < 4e-3


def test_of_two_tokens_for_one_slot_one_stays_whole() -> None:
    qkv, kv_cache = inputs(64, num_tokens=3)
    positions, slots = torch.arange(3), torch.tensor([21, 4, 21])
    rope_and_write(qkv, cos_sin_table(64), positions, slots, kv_cache, 0, 3, 2)
    apart = torch.full_like(kv_cache, -77.0)
    rope_and_write(qkv, cos_sin_table(64), positions, torch.tensor([20, 4, 21]), apart, 0, 3, 2)
    for kv in (0, 1):
        written = kv_cache[2, 0, kv, 5]
        assert any(torch.equal(written, apart[2, 0, kv, offset]) for offset in (4, 5))
    assert torch.equal(kv_cache[0], apart[0]), "the other token is where it belongs"
    assert bool((kv_cache[2, :, :, :5] == -77.0).all())


def test_what_would_be_written_elsewhere_or_read_beyond_its_end_is_refused() -> None:
    qkv, kv_cache = inputs(64)
    table, seven = cos_sin_table(64), torch.arange(7)
    for layer in (-1, 2):
        with pytest.raises(KernelInputError, match=rf"layer is {layer}, and the cache has layers 0 to 1"):
            rope_and_write(qkv, table, seven, seven, kv_cache, layer, 3, 2)
    for positions, slots in ((seven[:6], seven), (seven, seven[:6]), (seven[:, None], seven)):
        with pytest.raises(KernelInputError, match="each of the 7 tokens has one of either"):
            rope_and_write(qkv, table, positions, slots, kv_cache, 0, 3, 2)
    with pytest.raises(KernelInputError, match=r"the cache torch\.bfloat16"):
        rope_and_write(qkv, table, seven, seven, kv_cache.bfloat16(), 0, 3, 2)
    for wrong in (cos_sin_table(66), table[:, :63], table.double()):
        with pytest.raises(KernelInputError, match="cos_sin is"):
            rope_and_write(qkv, wrong, seven, seven, kv_cache, 0, 3, 2)
    assert bool((kv_cache == -77.0).all())


def test_head_counts_that_do_not_fit_the_cache_are_refused() -> None:
    qkv, kv_cache = inputs(64)
    with pytest.raises(KernelInputError, match="head counts or sizes differ"):
        rope_and_write(qkv, cos_sin_table(64), torch.arange(7), torch.arange(7), kv_cache, 0, 4, 2)
