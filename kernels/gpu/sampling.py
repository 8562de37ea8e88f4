"""Sampling without a sort, without a wait for the host, by four launches over a batch of rows.

    row_maxima_kernel   (row, piece)   largest usable logit of 8,192 tokens, and the first token that has it
    find_cuts_kernel    (row)          the cut of min-p, top-k and top-p (sampling_cuts.py): what is up to it stays
    best_bounds_kernel  (row, piece)   an upper bound of the best sum of logit and noise in a piece, in float32
    choose_kernel       (row)          the winner, with exact noise for the few tiles whose bound lets them win

**Draw.** The noise of kernels/noise.py takes two logarithms in float64, which many GPUs compute at a 64th of their
speed. With v the token's uniform number, -log(1 - v) >= v, so scaled - log(v) bounds its sum from above, and is cheap.
Only tiles whose bound reaches the best sum so far get their noise in full.
"""

from functools import partial
from typing import Final

import torch
import triton
import triton.language as tl

from kernels.gpu.case import TARGETS, Case, meta
from kernels.gpu.common import launch, next_power_of_2
from kernels.gpu.noise import gumbel, row_key, token_hash
from kernels.gpu.sampling_cuts import (
    NUM_PIVOTS,
    SEARCH_TILE,
    find_cuts_kernel,
    largest_of,
    magnitude,
    usable_logits,
)

PIECE: Final = 8192
# Tokens whose bounds are looked at together in a piece that may hold the winner.
DRAW_TILE: Final = 512

NO_TOKEN = tl.constexpr(2**31 - 1)
# Above the rounding of bounds in float32, whose winners lie between -4 and 23.
SLACK = tl.constexpr(1e-3)


@triton.jit
def row_maxima_kernel(
    logits: tl.tensor,
    maxima: tl.tensor,
    firsts: tl.tensor,
    row_stride: tl.tensor,
    limit: tl.tensor,
    num_pieces: tl.tensor,
    PIECE: tl.constexpr,
) -> None:
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = piece * PIECE + tl.arange(0, PIECE)
    values = usable_logits(logits + row * row_stride, tokens, limit)
    largest = tl.max(values, axis=0)
    tl.store(maxima + row * num_pieces + piece, largest)
    tl.store(firsts + row * num_pieces + piece, tl.min(tl.where(values == largest, tokens, NO_TOKEN), axis=0))


@triton.jit
def _bounds(
    logits: tl.tensor,
    tokens: tl.tensor,
    limit: tl.tensor,
    largest: tl.tensor,
    temperature: tl.tensor,
    cut: tl.tensor,
    key: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Scaled logits of tokens, and an upper bound of their sums with noise: -inf for those that the cut drops."""
    usable = usable_logits(logits, tokens, limit)
    scaled = tl.div_rn(usable - largest, temperature)
    uniform = (token_hash(tokens, key).to(tl.float32) + 0.5) * 2.0**-32
    is_kept = (magnitude(scaled) <= cut) & (usable > float("-inf"))
    return scaled, tl.where(is_kept, scaled - tl.log(uniform), float("-inf"))


@triton.jit
def best_bounds_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    maxima: tl.tensor,
    cuts: tl.tensor,
    bounds: tl.tensor,
    row_stride: tl.tensor,
    limit: tl.tensor,
    num_pieces: tl.tensor,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
) -> None:
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    _, largest = largest_of(maxima, row, num_pieces, PIECES)
    if (temperature > 0.0) & (largest > float("-inf")):
        key = row_key(tl.load(seeds + row), tl.load(positions + row))
        tokens = piece * PIECE + tl.arange(0, PIECE)
        cut = tl.load(cuts + row)
        _scaled, bound = _bounds(logits + row * row_stride, tokens, limit, largest, temperature, cut, key)
        tl.store(bounds + row * num_pieces + piece, tl.max(bound, axis=0))


@triton.jit
def choose_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    maxima: tl.tensor,
    firsts: tl.tensor,
    cuts: tl.tensor,
    bounds: tl.tensor,
    ids: tl.tensor,
    row_stride: tl.tensor,
    limit: tl.tensor,
    num_pieces: tl.tensor,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    piece_maxima, largest = largest_of(maxima, row, num_pieces, PIECES)
    pieces = tl.arange(0, PIECES)
    is_there = pieces < num_pieces
    first = tl.load(firsts + row * num_pieces + pieces, mask=is_there, other=NO_TOKEN)
    best = tl.min(tl.where(piece_maxima == largest, first, NO_TOKEN), axis=0)
    if largest == float("-inf"):
        best = tl.full([], -1, tl.int32)
    elif temperature > 0.0:
        key = row_key(tl.load(seeds + row), tl.load(positions + row))
        cut = tl.load(cuts + row)
        score = gumbel(best, key)  # scaled is 0
        piece_bounds = tl.load(bounds + row * num_pieces + pieces, mask=is_there, other=float("-inf"))
        highest = tl.max(piece_bounds, axis=0)
        promising = tl.min(tl.where(piece_bounds == highest, pieces, PIECES), axis=0)
        # The most promising piece first, so that most of the others can't win any more.
        for step in range(-1, num_pieces):
            piece = tl.where(step < 0, promising, step)
            bound = tl.max(tl.where(pieces == piece, piece_bounds, float("-inf")), axis=0)
            if (bound >= score - SLACK) & ((step < 0) | (step != promising)):
                for start in range(piece * PIECE, min(piece * PIECE + PIECE, limit), TILE):
                    tokens = start + tl.arange(0, TILE)
                    scaled, tile_bounds = _bounds(
                        logits + row * row_stride, tokens, limit, largest, temperature, cut, key
                    )
                    if tl.max(tile_bounds, axis=0) >= score - SLACK:
                        sums = tl.where(tile_bounds > float("-inf"), scaled + gumbel(tokens, key), float("-inf"))
                        tile_score = tl.max(sums, axis=0)
                        tile_best = tl.min(tl.where(sums == tile_score, tokens, NO_TOKEN), axis=0)
                        is_better = (tile_score > score) | ((tile_score == score) & (tile_best < best))
                        best = tl.where(is_better, tile_best, best)
                        score = tl.maximum(score, tile_score)
    tl.store(ids + row, best.to(tl.int64))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocab_limit: int,
) -> torch.Tensor:
    """As kernels.sampling.sample, for logits [rows, vocab] of any float dtype whose columns are adjacent."""
    num_rows, num_pieces = logits.shape[0], triton.cdiv(vocab_limit, PIECE)
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    maxima, bounds = torch.empty((2, num_rows, num_pieces), dtype=torch.float32, device=logits.device)
    firsts = torch.empty((num_rows, num_pieces), dtype=torch.int32, device=logits.device)
    cuts = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    size = (logits.stride(0), vocab_limit, num_pieces)
    piece, longest = min(PIECE, next_power_of_2(vocab_limit)), next_power_of_2(vocab_limit)
    pieces = next_power_of_2(num_pieces)
    # Products stay apart from sums, as in the other implementations: the same draw to the bit.
    launch_exactly = partial(launch, enable_fp_fusion=False)
    launch_exactly(row_maxima_kernel, (num_rows, num_pieces), logits, maxima, firsts, *size, PIECE=piece, num_warps=16)
    launch_exactly(
        find_cuts_kernel, (num_rows,), logits, temperature, top_k, top_p, min_p, maxima, cuts, *size,
        PIECES=pieces, TILE=min(SEARCH_TILE, longest), PIVOTS=NUM_PIVOTS, num_warps=16,
    )  # fmt: skip
    launch_exactly(
        best_bounds_kernel, (num_rows, num_pieces), logits, temperature, seeds, positions, maxima, cuts, bounds, *size,
        PIECE=piece, PIECES=pieces, num_warps=16,
    )  # fmt: skip
    launch_exactly(
        choose_kernel, (num_rows,), logits, temperature, seeds, positions, maxima, firsts, cuts, bounds, ids, *size,
        PIECE=piece, PIECES=pieces, TILE=min(DRAW_TILE, longest), num_warps=8,
    )  # fmt: skip
    return ids


def _case(name: str, num_rows: int, vocab_size: int, dtype: torch.dtype, targets: tuple[int, ...] = TARGETS) -> Case:
    number, whole = partial(meta, num_rows), partial(meta, num_rows, dtype=torch.int64)
    logits = meta(num_rows, vocab_size, dtype=dtype)
    args = (logits, number(), whole(), number(), number(), whole(), whole(), vocab_size)
    return Case(name, partial(sample, *args), targets=targets)


CASES: Final = (
    _case("sample, vocab 128256, float32", 64, 128256, torch.float32),
    _case("sample, vocab 151936, bfloat16", 1, 151936, torch.bfloat16, (80, 90)),
    _case("sample, vocab 256000, float16", 128, 256000, torch.float16, (89, 100)),
    _case("sample, vocab 1000, float32", 4, 1000, torch.float32, (89,)),
)
