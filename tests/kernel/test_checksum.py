"""A checksum that no change of a block escapes."""

import pytest
import torch

from kernels import reference
from kernels.checksum import block_checksums
from kernels.errors import KernelInputError

pytestmark = pytest.mark.usefixtures("kernels_in_use")


def made(dtype: torch.dtype = torch.float32, num_blocks: int = 3) -> torch.Tensor:
    """Blocks [num_blocks, 2, 2, 4, 3, 4] of random bits."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_blocks, 2, 2, 4, 3, 4, generator=generator).to(dtype)


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_the_weighted_sum_that_the_docstring_says(dtype: torch.dtype) -> None:
    blocks = made(dtype)
    assert torch.equal(block_checksums(blocks), reference.block_checksums(blocks))


@pytest.mark.triton
def test_rows_longer_than_what_is_added_at_a_time_and_words_of_all_bits_count() -> None:
    blocks = torch.randint(-(2**63), 2**63 - 1, (2, 1, 2, 2500), generator=torch.Generator().manual_seed(3))
    blocks[0, 0, 1, -1] = -1
    assert torch.equal(block_checksums(blocks), reference.block_checksums(blocks))


@pytest.mark.triton
def test_no_blocks_have_no_checksums() -> None:
    assert block_checksums(made()[:0]).shape == (0,)


@pytest.mark.triton
def test_a_block_has_the_same_checksum_wherever_it_lies() -> None:
    blocks = made()
    together = block_checksums(blocks)
    assert torch.equal(together, torch.cat([block_checksums(blocks[i : i + 1]) for i in range(3)]))
    assert torch.equal(block_checksums(blocks.flip(0)), together.flip(0))
    assert len(set(together.tolist())) == 3


def test_every_flipped_bit_shows() -> None:
    block = made(num_blocks=1)
    expected = block_checksums(block)
    words = block.view(-1).view(torch.int64)
    for index in range(len(words)):
        for bit in (0, 1, 31, 52, 63):
            mask = -(2**63) if bit == 63 else 1 << bit
            words[index] ^= mask
            assert not torch.equal(block_checksums(block), expected), (index, bit)
            words[index] ^= mask
    assert torch.equal(block_checksums(block), expected)


def test_every_two_words_that_change_places_show() -> None:
    block = made(num_blocks=1)
    expected = block_checksums(block)
    words = block.view(-1).view(torch.int64)
    for first in range(len(words)):
        for second in range(first):
            swapped = words.clone()
            swapped[[first, second]] = words[[second, first]]
            checksum = block_checksums(swapped.view(torch.float32).view(block.shape))
            assert not torch.equal(checksum, expected), (first, second)


@pytest.mark.triton
def test_nothing_written_is_not_something_written() -> None:
    zeros = torch.zeros_like(made())
    assert block_checksums(zeros).tolist() == [0, 0, 0]
    assert 0 not in block_checksums(made()).tolist()


@pytest.mark.triton
def test_rows_that_are_no_words_are_refused() -> None:
    with pytest.raises(KernelInputError, match="rows of 3 elements"):
        block_checksums(torch.zeros(1, 1, 2, 1, 1, 3))
