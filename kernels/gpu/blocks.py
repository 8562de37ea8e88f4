"""Moves of whole KV blocks, seen as words of bytes, and their checksums."""

from typing import Final

import torch
import triton
import triton.language as tl

from kernels.gpu.case import Case, meta
from kernels.gpu.common import launch, next_power_of_2

# Words of a block that one program moves: four of 16 bytes for each of its 128 threads, where a word has 8.
PIECE: Final = 1024
# Words of a row that one program adds up at a time.
SUMMED: Final = 1024


@triton.jit
def move_blocks_kernel(
    source_ptr: tl.tensor,
    target_ptr: tl.tensor,
    source_ids: tl.tensor,
    target_ids: tl.tensor,
    source_stride: tl.tensor,
    target_stride: tl.tensor,
    NUM_WORDS: tl.constexpr,
    PIECE: tl.constexpr,
    GATHERS: tl.constexpr,
    SCATTERS: tl.constexpr,
) -> None:
    """PIECE words of move i: from block source_ids[i], or i where nothing is gathered, to target_ids[i], or to i."""
    move = tl.program_id(0)
    words = tl.program_id(1).to(tl.int64) * PIECE + tl.arange(0, PIECE)
    source, target = move.to(tl.int64), move.to(tl.int64)
    if GATHERS:
        source = tl.load(source_ids + move).to(tl.int64)
    if SCATTERS:
        target = tl.load(target_ids + move).to(tl.int64)
    moved = tl.load(source_ptr + source * source_stride + words, mask=words < NUM_WORDS)
    tl.store(target_ptr + target * target_stride + words, moved, mask=words < NUM_WORDS)


@triton.jit
def block_checksums_kernel(
    words_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    block_stride: tl.tensor,
    NUM_ROWS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    LENGTH: tl.constexpr,
    ROW_STEP: tl.constexpr,
    COLUMN_STEP: tl.constexpr,
) -> None:
    """One row of one block: its words times their weights, modulo 2^64, in which the order of sums doesn't matter."""
    block = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    words = words_ptr + block * block_stride + row * NUM_COLUMNS
    total = tl.zeros([LENGTH], tl.int64)
    for first in range(0, NUM_COLUMNS, LENGTH):
        columns = first + tl.arange(0, LENGTH)
        word = tl.load(words + columns, mask=columns < NUM_COLUMNS, other=0)
        total += word * ((2 * row + 1) * ROW_STEP + (2 * columns.to(tl.int64) + 2) * COLUMN_STEP)
    tl.store(sums_ptr + block * NUM_ROWS + row, tl.sum(total, axis=0))


def launch_move_blocks(
    source: torch.Tensor, target: torch.Tensor, source_ids: torch.Tensor | None, target_ids: torch.Tensor | None
) -> None:
    """Move words [num_blocks, num_words] int64 (or of fewer bytes), rows contiguous, from `source` to `target`.

    At least one list of ids is given, contiguous; what has none is taken in order.
    """
    ids = source_ids if source_ids is not None else target_ids
    assert ids is not None, "a move without a list of ids is a copy"
    num_words = source.shape[1]
    launch(
        move_blocks_kernel, (ids.shape[0], triton.cdiv(num_words, PIECE)), source, target,
        ids if source_ids is None else source_ids, ids if target_ids is None else target_ids,
        source.stride(0), target.stride(0), NUM_WORDS=num_words, PIECE=PIECE, GATHERS=source_ids is not None,
        SCATTERS=target_ids is not None, num_warps=4,
    )  # fmt: skip


def launch_block_checksums(words: torch.Tensor, row_step: int, column_step: int) -> torch.Tensor:
    """As kernels.checksum.block_checksums, of words int64 [num_blocks, num_rows, num_columns], blocks contiguous."""
    num_blocks, num_rows, num_columns = words.shape
    sums = torch.empty((num_blocks, num_rows), dtype=torch.int64, device=words.device)
    launch(
        block_checksums_kernel, (num_blocks, num_rows), words, sums, words.stride(0), NUM_ROWS=num_rows,
        NUM_COLUMNS=num_columns, LENGTH=min(SUMMED, next_power_of_2(num_columns)), ROW_STEP=row_step,
        COLUMN_STEP=column_step, num_warps=4,
    )  # fmt: skip
    return sums.sum(dim=1)


# A block of Llama-3-8B in bfloat16 is 2 MiB, of 64 rows; one of SmolLM2-135M 360 KiB, of 60.
def _move_case(*, gathers: bool, scatters: bool) -> None:
    blocks, ids = meta((1000, 262144), dtype=torch.int64), meta((64,), dtype=torch.int64)
    launch_move_blocks(blocks, blocks, ids if gathers else None, ids if scatters else None)


CASES: Final = (
    Case("copy_blocks 2 MiB", lambda: _move_case(gathers=True, scatters=True)),
    Case("gather_blocks 2 MiB", lambda: _move_case(gathers=True, scatters=False)),
    Case("scatter_blocks 2 MiB", lambda: _move_case(gathers=False, scatters=True)),
    Case("block_checksums 2 MiB", lambda: launch_block_checksums(meta((64, 64, 4096), dtype=torch.int64), 7, 9)),
    Case("block_checksums 360 KiB", lambda: launch_block_checksums(meta((64, 60, 768), dtype=torch.int64), 7, 9)),
)
