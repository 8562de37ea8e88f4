"""Where a row is cut by min-p, top-k and top-p: a search by pivots, without a sort.

scaled = (logit - largest) / temperature is <= 0, so its bits without the sign, its *magnitude*, grow as the value
falls: a cut is a magnitude, and what is up to it stays. The search halves twice a pass: it weighs the row at four
pivots between the bounds and keeps the interval in which the target is reached. It counts tokens for top-k and adds
weights for top-p, in integers (exp(scaled) in units of 2⁻⁴⁰), so that sums are the same in any order. It ends early
where only one token can be left in the interval, after about half of its sixteen passes in rows without ties.
"""

from typing import Final

import triton
import triton.language as tl

from kernels.gpu.noise import log

# Tokens that the search weighs at a time. One program reads alone on its multiprocessor, so three tiles are on their
# way while one is weighed: with more pivots, or more tiles, 16 warps spill registers.
SEARCH_TILE: Final = 1024
NUM_PIVOTS: Final = 4
STAGES = tl.constexpr(4)

# The magnitude of -inf, which keeps all.
KEEP_ALL = tl.constexpr(0x7F800000)
# One in the fixed-point weights; 2¹⁸ tokens of weight 1 stay below 2⁶³.
WEIGHT_ONE = tl.constexpr(2.0**40)
# A weight that is still known to a thousandth.
WEIGHT_KNOWN = tl.constexpr(1024)


@triton.jit
def usable_logits(logits: tl.tensor, tokens: tl.tensor, limit: tl.tensor) -> tl.tensor:
    """float32 logits of a row that starts at `logits`; -inf where they are not finite or past the limit."""
    values = tl.load(logits + tokens, mask=tokens < limit, other=float("-inf")).to(tl.float32)
    return tl.where(tl.abs(values) < float("inf"), values, float("-inf"))


@triton.jit
def magnitude(scaled: tl.tensor) -> tl.tensor:
    """int32 bits of float32 numbers, without the sign."""
    return scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def largest_of(
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
            scaled = tl.div_rn(usable_logits(logits, tokens, limit) - largest, temperature)
            weights = _weights(scaled) if IS_SHARE else (tokens < limit).to(tl.int32)
            is_up_to = magnitude(scaled)[:, None] <= pivots.to(tl.int32)[None, :]
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
    _, largest = largest_of(maxima, row, num_pieces, PIECES)
    cut = tl.full([], KEEP_ALL, tl.int32)
    if (temperature > 0.0) & (largest > float("-inf")):
        row_logits = logits + row * row_stride
        min_p = tl.load(min_ps + row)
        if min_p > 0.0:
            cut = magnitude(tl.minimum(log(min_p.to(tl.float64)), 0.0).to(tl.float32))
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
