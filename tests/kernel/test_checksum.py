"""A checksum that no change of a block escapes."""

import pytest
import torch

from kernels.checksum import block_checksums


def made(dtype: torch.dtype = torch.float32, num_blocks: int = 3) -> torch.Tensor:
    """Blocks [num_blocks, 2, 2, 4, 3, 4] of random bits."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_blocks, 2, 2, 4, 3, 4, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_the_weighted_sum_that_the_docstring_says(dtype: torch.dtype) -> None:
    blocks = made(dtype)
    words = blocks.reshape(3, 4, -1).view(torch.int64).tolist()
    by_row, by_column = 0x1E3779B97F4A7C15, 0x42B2AE3D27D4EB4F
    for block, checksum in zip(words, block_checksums(blocks).tolist(), strict=True):
        total = sum(
            word * (by_row * (2 * r + 1) + by_column * (2 * c + 2))
            for r, row in enumerate(block)
            for c, word in enumerate(row)
        )
        assert (total - checksum) % 2**64 == 0


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


def test_nothing_written_is_not_something_written() -> None:
    zeros = torch.zeros_like(made())
    assert block_checksums(zeros).tolist() == [0, 0, 0]
    assert 0 not in block_checksums(made()).tolist()


def test_rows_that_are_no_words_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 3 elements"):
        block_checksums(torch.zeros(1, 1, 2, 1, 1, 3))
