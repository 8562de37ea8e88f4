"""Sampling without a sort, without a wait for the host, by four launches over a batch of rows.

    row_maxima_kernel   (row, piece)   largest usable logit of 8,192 tokens, and the first token that has it
    find_cuts_kernel    (row)          the cut of min-p, top-k and top-p: a search by pivots over the row
    best_bounds_kernel  (row, piece)   an upper bound of the best sum of logit and noise in a piece, in float32
    choose_kernel       (row)          the winner, with exact noise for the few tiles whose bound lets them win

**Cuts.** scaled = (logit - largest) / temperature is <= 0, so its bits without the sign, its *magnitude*, grow as the
value falls: a cut is a magnitude, and what is up to it stays. The search halves twice a pass: it weighs the row at four
pivots between the bounds and keeps the interval in which the target is reached. It counts tokens for top-k and adds
weights for top-p, in integers (exp(scaled) in units of 2⁻⁴⁰), so that sums are the same in any order. It ends early
where only one token can be left in the interval, after about half of its sixteen passes in rows without ties.

**Draw.** The noise of kernels/noise.py takes two logarithms in float64, which many GPUs compute at a 64th of their
speed. With v the token's uniform number, -log(1 - v) >= v, so scaled - log(v) bounds its sum from above, and is cheap.
Only tiles whose bound reaches the best sum so far get their noise in full.
"""

from functools import partial
from typing import Final

import torch
import triton
import triton.language as tl

from kernels.gpu.case import Case, meta
from kernels.gpu.common import launch, next_power_of_2
from kernels.gpu.noise import gumbel, log, row_key, token_hash

PIECE: Final = 8192
# Tokens that the search weighs at a time. One program reads alone on its multiprocessor, so three tiles are on their
# way while one is weighed: with more pivots, or more tiles, 16 warps spill registers.
SEARCH_TILE: Final = 1024
NUM_PIVOTS: Final = 4
STAGES = tl.constexpr(4)
# Tokens whose bounds are looked at together in a piece that may hold the winner.
DRAW_TILE: Final = 512

NO_TOKEN = tl.constexpr(2**31 - 1)
# The magnitude of -inf, which keeps all.
KEEP_ALL = tl.constexpr(0x7F800000)
# One in the fixed-point weights; 2¹⁸ tokens of weight 1 stay below 2⁶³.
WEIGHT_ONE = tl.constexpr(2.0**40)
# A weight that is still known to a thousandth.
WEIGHT_KNOWN = tl.constexpr(1024)
# Above the rounding of bounds in float32, whose winners lie between -4 and 23.
SLACK = tl.constexpr(1e-3)


@triton.jit
def _usable(logits: tl.tensor, tokens: tl.tensor, limit: tl.tensor) -> tl.tensor:
    """float32 logits of a row that starts at `logits`; -inf where they are not finite or past the limit."""
    values = tl.load(logits + tokens, mask=tokens < limit, other=float("-inf")).to(tl.float32)
    return tl.where(tl.abs(values) < float("inf"), values, float("-inf"))


@triton.jit
def _magnitude(scaled: tl.tensor) -> tl.tensor:
    return scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF


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
    values = _usable(logits + row * row_stride, tokens, limit)
    largest = tl.max(values, axis=0)
    tl.store(maxima + row * num_pieces + piece, largest)
    tl.store(firsts + row * num_pieces + piece, tl.min(tl.where(values == largest, tokens, NO_TOKEN), axis=0))


@triton.jit
def _largest(
    maxima: tl.tensor, row: tl.tensor, num_pieces: tl.tensor, PIECES: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The maximum of each piece of a row [PIECES], -inf in the padding, and their maximum."""
    piece = tl.arange(0, PIECES)
    values = tl.load(maxima + row * num_pieces + piece, mask=piece < num_pieces, other=float("-inf"))
    return values, tl.max(values, axis=0)


@triton.jit
def _weights(scaled: tl.tensor) -> tl.tensor:
    return (tl.exp(scaled) * WEIGHT_ONE).to(tl.int64)


@triton.jit
def _search(
    logits: tl.tensor,
    limit: tl.tensor,
    largest: tl.tensor,
    temperature: tl.tensor,
    highest: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    IS_SHARE: tl.constexpr,
    TILE: tl.constexpr,
    PIVOTS: tl.constexpr,
) -> tl.tensor:
    """Smallest magnitude up to which there are top_k tokens, or the share top_p of the weight up to `highest`."""
    # Up to `low` the target is not reached, up to `high` it is.
    low = tl.full([], -1, tl.int64)
    high = highest.to(tl.int64)
    total_low = tl.full([], 0, tl.int64)
    target = top_k.to(tl.int64)
    if IS_SHARE:
        target = tl.full([], -1, tl.int64)
    while high - low > 1:
        pivots = low + (high - low) * (tl.arange(0, PIVOTS) + 1) // PIVOTS
        partial_totals = tl.zeros([TILE, PIVOTS], tl.int64 if IS_SHARE else tl.int32)
        for start in tl.range(0, limit, TILE, num_stages=STAGES):
            tokens = start + tl.arange(0, TILE)
            scaled = tl.div_rn(_usable(logits, tokens, limit) - largest, temperature)
            weights = _weights(scaled) if IS_SHARE else (tokens < limit).to(tl.int32)
            is_up_to = _magnitude(scaled)[:, None] <= pivots.to(tl.int32)[None, :]
            partial_totals += tl.where(is_up_to, weights[:, None], 0)
        totals = tl.sum(partial_totals, axis=0).to(tl.int64)
        # In the first pass the last pivot is `highest`, up to which all weight counts.
        share = tl.ceil(top_p.to(tl.float64) * tl.max(totals, axis=0).to(tl.float64)).to(tl.int64)
        target = tl.where(target < 0, tl.maximum(share, 1), target)
        is_reached = totals >= target
        low = tl.max(tl.where(is_reached, low, pivots), axis=0)
        high = tl.min(tl.where(is_reached, pivots, high), axis=0)
        total_low = tl.max(tl.where(is_reached, total_low, totals), axis=0)
        total_high = tl.min(tl.where(is_reached, totals, 0x7FFFFFFFFFFFFFFF), axis=0)
        if IS_SHARE:
            least = _weights(-high.to(tl.int32).to(tl.float32, bitcast=True))
            is_found = (least > WEIGHT_KNOWN) & ((total_high - total_low) * 8 < least * 15)
        else:
            is_found = total_high == target
        low = tl.where(is_found, high - 1, low)
    return high.to(tl.int32)


@triton.jit
def find_cuts_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    maxima: tl.tensor,
    cuts: tl.tensor,
    row_stride: tl.tensor,
    limit: tl.tensor,
    num_pieces: tl.tensor,
    PIECES: tl.constexpr,
    TILE: tl.constexpr,
    PIVOTS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    _, largest = _largest(maxima, row, num_pieces, PIECES)
    cut = tl.full([], KEEP_ALL, tl.int32)
    if (temperature > 0.0) & (largest > float("-inf")):
        row_logits = logits + row * row_stride
        min_p = tl.load(min_ps + row)
        if min_p > 0.0:
            cut = _magnitude(tl.minimum(log(min_p.to(tl.float64)), 0.0).to(tl.float32))
        top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
        if (top_k > 0) & (top_k < limit):
            everything = tl.full([], KEEP_ALL, tl.int32)
            cut = tl.minimum(
                cut,
                _search(row_logits, limit, largest, temperature, everything, top_k, top_p, False, TILE, PIVOTS),
            )
        if top_p < 1.0:
            cut = _search(row_logits, limit, largest, temperature, cut, top_k, top_p, True, TILE, PIVOTS)
    tl.store(cuts + row, cut)


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
    usable = _usable(logits, tokens, limit)
    scaled = tl.div_rn(usable - largest, temperature)
    uniform = (token_hash(tokens, key).to(tl.float32) + 0.5) * 2.0**-32
    is_kept = (_magnitude(scaled) <= cut) & (usable > float("-inf"))
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
    _, largest = _largest(maxima, row, num_pieces, PIECES)
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
    piece_maxima, largest = _largest(maxima, row, num_pieces, PIECES)
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


def _case(name: str, num_rows: int, vocab_size: int, dtype: torch.dtype) -> Case:
    number, whole = partial(meta, num_rows), partial(meta, num_rows, dtype=torch.int64)
    logits = meta(num_rows, vocab_size, dtype=dtype)
    args = (logits, number(), whole(), number(), number(), whole(), whole(), vocab_size)
    return Case(name, partial(sample, *args))


CASES: Final = (
    _case("sample, vocab 128256, float32", 64, 128256, torch.float32),
    _case("sample, vocab 151936, bfloat16", 1, 151936, torch.bfloat16),
    _case("sample, vocab 256000, float16", 128, 256000, torch.float16),
    _case("sample, vocab 1000, float32", 4, 1000, torch.float32),
)
