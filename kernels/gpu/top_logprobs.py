"""The k likeliest tokens of each row and their log probabilities, without a sort, by two launches.

    piece_candidates_kernel   (row, piece)   the k largest of 4,096 logits, their maximum and the sum of exponentials
    likeliest_kernel          (row)          the k largest of all candidates, in order, less the logarithm of the sum

A logit and its token become one whole number, a *rank*: larger for the larger logit, and of equals for the first token.
So the largest is found k times by a maximum and taken out: no two ranks are equal.
"""

from functools import partial
from typing import Final

import torch
import triton
import triton.language as tl

from kernels.gpu.case import TARGETS, Case, meta
from kernels.gpu.common import launch, next_power_of_2
from kernels.gpu.noise import log
from kernels.gpu.sampling_cuts import usable_logits

PIECE: Final = 4096
# Above it a sort is the lesser work: each of the k is a pass over registers.
MAX_K: Final = 64
# Candidates of a row that one program holds in registers: 64 of each piece of a vocabulary of a million.
MAX_CANDIDATES: Final = 16384

# The rank of what is no number, below all others.
NO_RANK = tl.constexpr(-(2**63))
LOW_BITS = tl.constexpr(2**31 - 1)


@triton.jit
def _ordered(bits: tl.tensor) -> tl.tensor:
    """int32 that order as the float32 of these bits do, and back: those of negative numbers grow as they fall."""
    return bits ^ ((bits >> 31) & LOW_BITS)


@triton.jit
def _ranks(values: tl.tensor, tokens: tl.tensor) -> tl.tensor:
    """int64 ranks of float32 values (-inf: none) and their tokens."""
    # One zero: the bits of -0.0 are others.
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    ranks = (_ordered(bits).to(tl.int64) << 32) | (tokens ^ LOW_BITS).to(tl.int64)
    return tl.where(values > float("-inf"), ranks, NO_RANK)


@triton.jit(do_not_specialize=["k"])
def piece_candidates_kernel(
    logits: tl.tensor,
    ranks: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    row_stride: tl.tensor,
    limit: tl.tensor,
    num_pieces: tl.tensor,
    k: tl.tensor,
    PIECE: tl.constexpr,
) -> None:
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = piece * PIECE + tl.arange(0, PIECE)
    values = usable_logits(logits + row * row_stride, tokens, limit)
    top = tl.max(values, axis=0)
    cell = row * num_pieces + piece
    tl.store(tops + cell, top)
    tl.store(totals + cell, tl.sum(tl.exp(values - tl.where(top > float("-inf"), top, 0.0)), axis=0))
    left = _ranks(values, tokens)
    for place in range(k):
        best = tl.max(left, axis=0)
        tl.store(ranks + cell * k + place, best)
        left = tl.where(left == best, NO_RANK, left)


@triton.jit(do_not_specialize=["k"])
def likeliest_kernel(
    ranks: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    logprobs: tl.tensor,
    ids: tl.tensor,
    num_pieces: tl.tensor,
    k: tl.tensor,
    PIECES: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PIECES)
    piece_tops = tl.load(tops + row * num_pieces + piece, mask=piece < num_pieces, other=float("-inf"))
    piece_totals = tl.load(totals + row * num_pieces + piece, mask=piece < num_pieces, other=0.0)
    top = tl.max(piece_tops, axis=0)
    top = tl.where(top > float("-inf"), top, 0.0)
    total = tl.sum(piece_totals.to(tl.float64) * tl.exp(piece_tops - top).to(tl.float64), axis=0)
    log_sum = top.to(tl.float64) + log(total)
    candidate = tl.arange(0, CANDIDATES)
    is_there = candidate < num_pieces * k
    left = tl.load(ranks + row * num_pieces * k + candidate, mask=is_there, other=NO_RANK)
    for place in range(k):
        best = tl.max(left, axis=0)
        value = _ordered((best >> 32).to(tl.int32)).to(tl.float32, bitcast=True).to(tl.float64)
        is_found = best > NO_RANK
        tl.store(logprobs + row * k + place, tl.where(is_found, value - log_sum, float("-inf")))
        tl.store(ids + row * k + place, tl.where(is_found, (best & LOW_BITS) ^ LOW_BITS, -1))
        left = tl.where(left == best, NO_RANK, left)


def why_not_triton(k: int, vocab_limit: int) -> str | None:
    """What the kernels lack for this call; None where they compute it."""
    if k > MAX_K:
        return f"{k} tokens of a row are more than {MAX_K}"
    if triton.cdiv(vocab_limit, PIECE) * k > MAX_CANDIDATES:
        return f"{k} tokens of each piece of a vocabulary of {vocab_limit} are more than a program holds"
    return None


def top_logprobs(logits: torch.Tensor, k: int, vocab_limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As kernels.top_logprobs.top_logprobs, for what `why_not_triton` has nothing against and adjacent columns."""
    num_rows, num_pieces, device = logits.shape[0], triton.cdiv(vocab_limit, PIECE), logits.device
    ranks = torch.empty((num_rows, num_pieces, k), dtype=torch.int64, device=device)
    tops = torch.empty((num_rows, num_pieces), dtype=torch.float32, device=device)
    totals = torch.empty((num_rows, num_pieces), dtype=torch.float32, device=device)
    logprobs = torch.empty((num_rows, k), dtype=torch.float64, device=device)
    ids = torch.empty((num_rows, k), dtype=torch.int64, device=device)
    launch(
        piece_candidates_kernel, (num_rows, num_pieces), logits, ranks, tops, totals, logits.stride(0), vocab_limit,
        num_pieces, k, PIECE=min(PIECE, next_power_of_2(vocab_limit)), num_warps=8,
    )  # fmt: skip
    launch(
        likeliest_kernel, (num_rows,), ranks, tops, totals, logprobs, ids, num_pieces, k,
        PIECES=next_power_of_2(num_pieces), CANDIDATES=next_power_of_2(num_pieces * k), num_warps=8,
    )  # fmt: skip
    return logprobs, ids


def _case(num_rows: int, vocab_size: int, k: int, dtype: torch.dtype, targets: tuple[int, ...] = TARGETS) -> Case:
    run = partial(top_logprobs, meta(num_rows, vocab_size, dtype=dtype), k, vocab_size)
    return Case(f"top_logprobs, {k} of {vocab_size}", run, targets=targets)


CASES: Final = (
    _case(4, 128256, 17, torch.float32),
    _case(64, 256000, 64, torch.bfloat16, (80, 90)),
    _case(1, 1 << 20, 64, torch.float32, (89, 100)),
    _case(3, 1000, 1, torch.float16, (89,)),
)
