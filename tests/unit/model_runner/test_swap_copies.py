"""The CPU tier's memory, and what passes between it and the device."""

import pytest
import torch

from model.cpu_tier import RESERVE_BYTES, CpuTier
from model.errors import RunnerInputError
from model.kv_cache import KVCache
from model.swap_copies import SwapCopies, runs_of
from scheduler.output import BlockCopy, Transfer, TransferResult
from tests.unit.model_runner.driver import tiny_config

SHAPE = (2, 2, 8, 2, 16)
BLOCK_BYTES = 4096


def made(num_cpu_blocks: int, num_blocks: int = 8) -> KVCache:
    """A cache whose device blocks hold noise."""
    cache = KVCache(
        tiny_config(),
        num_blocks=num_blocks,
        block_size=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
        num_cpu_blocks=num_cpu_blocks,
    )
    cache.blocks.normal_(generator=torch.Generator().manual_seed(0))
    return cache


def transfer(transfer_id: int, *pairs: tuple[int, int]) -> Transfer:
    return Transfer(transfer_id, tuple(BlockCopy(src, dst) for src, dst in pairs))


def test_swapped_blocks_come_back_bit_for_bit_to_other_places() -> None:
    cache = made(num_cpu_blocks=3)
    before = cache.blocks.clone()
    cache.begin_transfers([transfer(1, (4, 0), (1, 2))], [])
    assert cache.ended_transfers() == (TransferResult(1),)
    cache.blocks[[4, 1]] = torch.nan
    cache.begin_transfers([], [transfer(2, (0, 1)), transfer(3, (2, 5))])
    assert cache.ended_transfers(is_waiting=True) == (TransferResult(2), TransferResult(3))
    assert cache.ended_transfers() == ()
    assert torch.equal(cache.blocks[1], before[4])
    assert torch.equal(cache.blocks[5], before[1])
    untouched = [0, 2, 3, 6, 7]
    assert torch.equal(cache.blocks[untouched], before[untouched])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_single_wrong_bit_in_the_cpu_tier_is_found_and_named(dtype: torch.dtype) -> None:
    cache = KVCache(
        tiny_config(), num_blocks=8, block_size=8, dtype=dtype, device=torch.device("cpu"), num_cpu_blocks=6
    )
    cache.blocks.normal_(generator=torch.Generator().manual_seed(0))
    cache.begin_transfers([transfer(1, (0, 0), (1, 1), (2, 2), (3, 5))], [])
    assert cache.ended_transfers() == (TransferResult(1),)
    assert cache.cpu_tier is not None
    cache.cpu_tier.blocks(1, 1).view(torch.uint8).view(-1)[777] ^= 16
    cache.begin_transfers([], [transfer(2, (0, 4), (1, 5), (2, 6), (5, 7))])
    assert cache.ended_transfers() == (TransferResult(2, (5,)),)


def test_neighbours_are_copied_in_one_piece_up_to_the_end_of_a_slab() -> None:
    outs = [BlockCopy(src, dst) for src, dst in [(1, 6), (2, 7), (3, 8), (5, 9), (6, 10), (7, 12)]]
    assert runs_of(outs, 100, is_out=True) == [([1, 2, 3], 6), ([5, 6], 9), ([7], 12)]
    assert runs_of(outs, 4, is_out=True) == [([1, 2], 6), ([3], 8), ([5, 6], 9), ([7], 12)]
    ins = [BlockCopy(copy.dst, copy.src) for copy in outs]
    assert runs_of(ins, 4, is_out=False) == [([1, 2], 6), ([3], 8), ([5, 6], 9), ([7], 12)]


def test_blocks_to_be_gathered_need_to_be_neighbours_in_the_cpu_tier_alone() -> None:
    outs = [BlockCopy(src, dst) for src, dst in [(9, 6), (2, 7), (3, 8), (1, 9), (6, 10), (7, 12)]]
    assert runs_of(outs, 100, is_out=True, max_staged=4) == [([9, 2, 3, 1], 6), ([6], 10), ([7], 12)]
    assert runs_of(outs, 4, is_out=True, max_staged=4) == [([9, 2], 6), ([3, 1, 6], 8), ([7], 12)]


def test_scattered_blocks_pass_through_a_staging_buffer_and_a_wrong_bit_is_named() -> None:
    blocks, tier = torch.randn(9, *SHAPE), CpuTier(8, SHAPE, torch.float32)
    before, copies = blocks.clone(), SwapCopies(blocks, tier, is_staging=True)
    copies.begin([transfer(1, (7, 0), (1, 1), (2, 2), (5, 3))], [])
    assert copies.ended(is_waiting=False) == (TransferResult(1),)
    assert torch.equal(tier.blocks(0, 4), before[[7, 1, 2, 5]])
    tier.blocks(2, 1).view(-1)[5] += 1
    blocks[[7, 1, 2, 5]] = torch.nan
    copies.begin([], [transfer(2, (0, 1), (1, 7), (2, 5), (3, 8))])
    assert copies.ended(is_waiting=False) == (TransferResult(2, (5,)),)
    assert torch.equal(blocks[[1, 7, 8]], before[[7, 1, 5]])
    assert torch.equal(blocks[[0, 3, 4, 6]], before[[0, 3, 4, 6]])
    assert blocks[2].isnan().all()


def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.cpu_tier.SLAB_BYTES", 2 * BLOCK_BYTES)


def test_memory_is_taken_slab_by_slab_when_it_is_first_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    small_slabs(monkeypatch)
    cache = made(num_cpu_blocks=6)
    tier = cache.cpu_tier
    assert tier is not None
    assert (tier.slab_blocks, tier.num_bytes) == (2, 0)
    cache.begin_transfers([transfer(1, (0, 0))], [])
    assert tier.num_bytes == 2 * BLOCK_BYTES
    cache.begin_transfers([transfer(2, (1, 3), (2, 4))], [])
    assert tier.num_bytes == 6 * BLOCK_BYTES
    cache.begin_transfers([], [transfer(3, (4, 7)), transfer(4, (3, 6)), transfer(5, (0, 5))])
    assert cache.ended_transfers() == tuple(TransferResult(number) for number in range(1, 6))
    assert torch.equal(cache.blocks[[5, 6, 7]], cache.blocks[[0, 1, 2]])


def test_where_memory_runs_short_what_fits_is_copied_and_the_rest_named(monkeypatch: pytest.MonkeyPatch) -> None:
    small_slabs(monkeypatch)
    free = [RESERVE_BYTES + 2 * BLOCK_BYTES]
    tier = CpuTier(6, SHAPE, torch.float32, available_bytes=lambda: free[0])
    blocks = torch.randn(8, *SHAPE)
    copies = SwapCopies(blocks, tier)
    assert tier.try_grow(1)
    free[0] -= 1
    copies.begin([transfer(1, (3, 1), (4, 2), (5, 3), (6, 4))], [])
    assert copies.ended(is_waiting=False) == (TransferResult(1, (2, 3, 4)),)
    assert torch.equal(tier.blocks(1, 1)[0], blocks[3])
    assert tier.num_bytes == 2 * BLOCK_BYTES
    free[0] += 1
    copies.begin([transfer(2, (4, 2))], [])
    assert copies.ended(is_waiting=False) == (TransferResult(2),)


def test_a_cache_without_a_cpu_tier_refuses_to_swap() -> None:
    cache = made(num_cpu_blocks=0)
    cache.begin_transfers([], [])
    assert cache.ended_transfers(is_waiting=True) == ()
    with pytest.raises(RunnerInputError, match="set num_cpu_blocks"):
        cache.begin_transfers([transfer(1, (0, 0))], [])
