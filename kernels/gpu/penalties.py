"""Penalties by two launches over the tokens of sequences: one counts, one changes logits.

Counts lie in a table over the vocabulary that is zero before. A token may stand in many places: the one that takes its
count out of the table, leaving zero, changes the logit, so each changes once and by the same amount whoever is first.
"""

from functools import partial
from typing import Final

import torch
import triton
import triton.language as tl

from kernels.gpu.case import Case, meta
from kernels.gpu.common import launch
from kernels.penalties import Penalties

# Places of a sequence that one program looks at.
PIECE: Final = 1024


@triton.jit
def _tokens(
    token_ids: tl.tensor,
    sequences: tl.tensor,
    num_tokens: tl.tensor,
    row: tl.tensor,
    token_ids_stride: tl.tensor,
    vocab: tl.tensor,
    PIECE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Places of this program's piece, the tokens there, and whether they count."""
    places = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    is_held = places < tl.load(num_tokens + row)
    start = token_ids + tl.load(sequences + row) * token_ids_stride
    tokens = tl.load(start + places, mask=is_held, other=-1)
    return places, tokens, is_held & (tokens >= 0) & (tokens < vocab)


@triton.jit
def count_tokens_kernel(
    token_ids: tl.tensor,
    sequences: tl.tensor,
    num_prompt: tl.tensor,
    num_tokens: tl.tensor,
    counts: tl.tensor,
    token_ids_stride: tl.tensor,
    vocab: tl.tensor,
    PIECE: tl.constexpr,
) -> None:
    """Twice the count in the output, and 1 more where the token is in the prompt."""
    row = tl.program_id(0).to(tl.int64)
    places, tokens, is_known = _tokens(token_ids, sequences, num_tokens, row, token_ids_stride, vocab, PIECE)
    is_prompt = places < tl.load(num_prompt + row)
    cells = counts + row * vocab + tokens
    tl.atomic_or(cells, 1, mask=is_known & is_prompt)
    tl.atomic_add(cells, 2, mask=is_known & (is_prompt == 0))


@triton.jit
def penalise_kernel(
    logits: tl.tensor,
    token_ids: tl.tensor,
    sequences: tl.tensor,
    num_tokens: tl.tensor,
    repetitions: tl.tensor,
    frequencies: tl.tensor,
    presences: tl.tensor,
    counts: tl.tensor,
    logits_stride: tl.tensor,
    token_ids_stride: tl.tensor,
    vocab: tl.tensor,
    PIECE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    _places, tokens, is_known = _tokens(token_ids, sequences, num_tokens, row, token_ids_stride, vocab, PIECE)
    count = tl.atomic_xchg(counts + row * vocab + tokens, 0, mask=is_known)
    is_first = is_known & (count != 0)
    cells = logits + row * logits_stride + tokens
    logit = tl.load(cells, mask=is_first, other=0.0)
    repetition = tl.load(repetitions + row)
    logit = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
    frequency, presence = tl.load(frequencies + row), tl.load(presences + row)
    output_count = count >> 1
    lowered = logit - frequency * output_count.to(tl.float32)
    lowered = lowered - presence
    tl.store(cells, tl.where(output_count > 0, lowered, logit), mask=is_first)


def apply_penalties(logits: torch.Tensor, penalties: Penalties) -> None:
    """As kernels.penalties.apply_penalties, for logits and token_ids whose columns are adjacent."""
    token_ids, (num_rows, vocab_size) = penalties.token_ids, logits.shape
    sequences, num_prompt, num_tokens, *amounts = (each.contiguous() for each in penalties.columns)
    counts = torch.zeros((num_rows, vocab_size), dtype=torch.int32, device=logits.device)
    grid = (num_rows, triton.cdiv(token_ids.shape[1], PIECE))
    stride = token_ids.stride(0)
    launch(
        count_tokens_kernel, grid, token_ids, sequences, num_prompt, num_tokens, counts, stride, vocab_size, PIECE=PIECE
    )
    launch(
        penalise_kernel, grid, logits, token_ids, sequences, num_tokens, *amounts, counts, logits.stride(0), stride,
        vocab_size, PIECE=PIECE, enable_fp_fusion=False,
    )  # fmt: skip


def _case(num_rows: int, vocab_size: int, max_len: int) -> Case:
    whole, number = partial(meta, num_rows, dtype=torch.int64), partial(meta, num_rows)
    token_ids = meta(num_rows, max_len, dtype=torch.int64)
    penalties = Penalties(token_ids, whole(), whole(), whole(), number(), number(), number())
    return Case(f"penalties, vocab {vocab_size}", partial(apply_penalties, meta(num_rows, vocab_size), penalties))


CASES: Final = (_case(64, 128256, 8193), _case(3, 1000, 33))
