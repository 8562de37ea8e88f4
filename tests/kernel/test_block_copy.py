"""Moves of blocks: copy-on-write, and to and from a staging buffer."""

import pytest
import torch

from kernels import reference
from kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks
from kernels.errors import KernelInputError
from tests.kernel.batches import guarded

pytestmark = [pytest.mark.usefixtures("kernels_in_use"), pytest.mark.triton]

# Of one byte, of two, of four and of eight; of blocks of an odd number of bytes, too.
DTYPES = [torch.float8_e4m3fn, torch.uint8, torch.bfloat16, torch.float32, torch.int64]
BLOCK_SHAPES = [(2, 2, 4, 2, 8), (1, 1, 3, 1, 1), (1, 2, 16, 3, 80)]


def made(block_shape: tuple[int, ...], dtype: torch.dtype = torch.float32, num_blocks: int = 9) -> torch.Tensor:
    """Blocks of random bytes, each a slice of a larger piece."""
    generator = torch.Generator().manual_seed(0)
    num_bytes = torch.Size(block_shape).numel() * dtype.itemsize
    memory = torch.randint(0, 256, (num_blocks, num_bytes + 24), dtype=torch.uint8, generator=generator)
    numbers = (
        memory.view(dtype) if (num_bytes + 24) % dtype.itemsize == 0 else memory[:, :num_bytes].clone().view(dtype)
    )
    return numbers[:, : num_bytes // dtype.itemsize].view(num_blocks, *block_shape)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@pytest.mark.parametrize("block_shape", BLOCK_SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_moved_bit_by_bit_and_others_left_alone(dtype: torch.dtype, block_shape: tuple[int, ...]) -> None:
    kv_cache = made(block_shape, dtype)
    wanted = kv_cache.clone()
    src, dst = torch.tensor([3, 3, 0]), torch.tensor([8, 1, 7])
    copy_blocks(kv_cache, src, dst)
    reference.copy_blocks(wanted, src, dst)
    assert same_bits(kv_cache, wanted)

    ids = torch.tensor([5, 0, 8, 5])
    staging, wanted_staging = torch.zeros_like(kv_cache[:4]), torch.zeros_like(wanted[:4])
    gather_blocks(kv_cache, ids, staging)
    reference.gather_blocks(wanted, ids, wanted_staging)
    assert same_bits(staging, wanted_staging)

    ids = torch.tensor([6, 2, 4, 1])
    scatter_blocks(staging, ids, kv_cache)
    reference.scatter_blocks(wanted_staging, ids, wanted)
    assert same_bits(kv_cache, wanted)


def test_nothing_around_the_staging_buffer_is_touched() -> None:
    kv_cache = made((1, 2, 3, 1, 5))
    staging, red_zones = guarded((3, 1, 2, 3, 1, 5))
    gather_blocks(kv_cache, torch.tensor([1, 2, 3]), staging)
    assert same_bits(staging, kv_cache[1:4])
    assert red_zones.isnan().all()
    memory = torch.full((40, 30), torch.nan)
    scatter_blocks(staging, torch.tensor([2, 0, 1]), memory[10:13].view(3, 1, 2, 3, 1, 5))
    assert same_bits(memory[10:13].flatten(), kv_cache[torch.tensor([2, 3, 1])].flatten())
    assert torch.cat((memory[:10], memory[13:])).isnan().all()


def test_blocks_with_gaps_inside_are_moved_too() -> None:
    kv_cache = torch.randn(5, 2, 2, 4, 2, 8)[..., :7]
    wanted, src, dst = kv_cache.clone(), torch.tensor([1]), torch.tensor([4])
    copy_blocks(kv_cache, src, dst)
    reference.copy_blocks(wanted, src, dst)
    assert torch.equal(kv_cache, wanted)


def test_ids_may_be_a_column_of_pairs() -> None:
    kv_cache = made((2, 2, 4, 2, 8))
    wanted, pairs = kv_cache.clone(), torch.tensor([[3, 8], [0, 1]])
    copy_blocks(kv_cache, pairs[:, 0], pairs[:, 1])
    reference.copy_blocks(wanted, pairs[:, 0], pairs[:, 1])
    assert same_bits(kv_cache, wanted)


def test_no_ids_move_nothing() -> None:
    kv_cache = torch.randn(3, 2, 2, 4, 2, 8)
    before, nothing = kv_cache.clone(), torch.empty(0, dtype=torch.int64)
    copy_blocks(kv_cache, nothing, nothing)
    scatter_blocks(kv_cache[:0], nothing, kv_cache)
    gather_blocks(kv_cache, nothing, kv_cache[:0])
    assert torch.equal(kv_cache, before)


def test_what_does_not_fit_together_is_refused() -> None:
    kv_cache, ids = torch.zeros(3, 2, 2, 4, 2, 8), torch.tensor([0, 1])
    with pytest.raises(KernelInputError, match="one length"):
        copy_blocks(kv_cache, ids, ids[:1])
    with pytest.raises(KernelInputError, match="staging is"):
        gather_blocks(kv_cache, ids, kv_cache[:1])
    with pytest.raises(KernelInputError, match="staging is"):
        scatter_blocks(kv_cache[:2].half(), ids, kv_cache)
