"""Sampling, one row a work item: passes of vectors over the row, no sort. See kernels/sampling.py for what is chosen.

Where the torch implementation adds noise to every token and takes the largest sum, this one asks of each token whether
it can still win. With u the token's uniform number, gumbel = -log(-log(1 - u)) and a best sum B so far, a token wins
only if -log(1 - u) < exp(scaled - B); since u <= -log(1 - u), u < exp(scaled - B) is necessary, and costs a comparison.
The few tokens that pass get their noise in full, in the same arithmetic as kernels/noise.py, so both implementations
choose the same token.
"""

from math import exp as exp_f64
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from kernels.cpu.helper import helper
from kernels.cpu.parallel import ARGUMENTS, NEXT_THREAD
from kernels.cpu.vector import (
    I32,
    INT_VECTOR,
    LANES,
    VECTOR,
    VECTOR_BYTES,
    bits_f64,
    constant,
    div,
    exp,
    f32x16,
    f64_bits,
    fetch_add,
    finite_or,
    lanes_less,
    load,
    load_f32,
    load_f64,
    load_i32,
    load_i64,
    mul,
    select_greater,
    splat,
    splat_value,
    store,
    store_f32,
    store_f64,
    store_i64,
    sub,
)
from kernels.noise import FMIX_1, FMIX_2, GOLDEN, LN_2, SERIES, SPLIT_1, SPLIT_2, SQRT_2, TOKEN_FACTOR, signed

(
    LOGITS, LOGITS_ROW, LIMIT, TEMPERATURE, TOP_K, TOP_P, MIN_P, SEEDS, POSITIONS, IDS, NUM_ROWS,
    SCRATCH, SCRATCH_STRIDE,
) = range(ARGUMENTS, ARGUMENTS + 8 * 13, 8)  # fmt: skip
MASK_32 = 0xFFFFFFFF
GOLDEN_64, SPLIT_1_64, SPLIT_2_64 = signed(GOLDEN), signed(SPLIT_1), signed(SPLIT_2)
NUM_BINS = 2048
MINUS_INFINITY = float("-inf")
S0, S1, S2, S3, S4, S5, S6, S7, S8 = SERIES
# Slack of the test that spares a token its logarithms: above the rounding of the float32 numbers in it.
SLACK = 1.0 - 1e-5


def scratch_bytes(vocab_size: int) -> int:
    """Working memory of one thread: scaled logits, their exponentials, the bins, one vector for the row's tail."""
    return 8 * (vocab_size + 2 * LANES) + 8 * NUM_BINS + VECTOR_BYTES


def _int_splat(builder: ir.IRBuilder, number: ir.Value) -> ir.Value:
    return splat_value(builder, builder.trunc(number, I32), INT_VECTOR)


@intrinsic  # type: ignore[untyped-decorator]
def _uniforms(typingctx: Any, first_token: Any, key_low: Any, key_high: Any) -> Any:
    """The uniform numbers of 16 tokens in a row, float32: h / 2³² of kernels/noise.py."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        first, low, high = (_int_splat(builder, value) for value in values)

        def number(value: int) -> ir.Constant:
            return ir.Constant(INT_VECTOR, [value] * LANES)

        def fmix32(h: ir.Value) -> ir.Value:
            h = builder.mul(builder.xor(h, builder.lshr(h, number(16))), number(FMIX_1))
            h = builder.mul(builder.xor(h, builder.lshr(h, number(13))), number(FMIX_2))
            return builder.xor(h, builder.lshr(h, number(16)))

        tokens = builder.add(first, ir.Constant(INT_VECTOR, list(range(LANES))))
        h = fmix32(builder.add(builder.mul(tokens, number(TOKEN_FACTOR)), low))
        h = fmix32(builder.xor(h, high))
        return builder.fmul(builder.uitofp(h, VECTOR), constant(2.0**-32))

    return f32x16(types.int64, types.int64, types.int64), codegen


@helper
def _log(x: Any) -> Any:
    bits = f64_bits(x)
    exponent = (bits >> 52) - 1023
    mantissa = bits_f64((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000)
    if mantissa > SQRT_2:
        mantissa = mantissa * 0.5
        exponent += 1
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    total = (((((((S0 * z + S1) * z + S2) * z + S3) * z + S4) * z + S5) * z + S6) * z + S7) * z + S8
    return exponent * LN_2 + (s + s) * total


@helper
def _splitmix64(x: int) -> int:
    """An int64 for the unsigned word of the same bits: sums and products wrap, shifts fill up with zeros."""
    x = x + GOLDEN_64
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * SPLIT_1_64
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * SPLIT_2_64
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@helper
def _fmix32(h: int) -> int:
    h = ((h ^ (h >> 16)) * FMIX_1) & MASK_32
    h = ((h ^ (h >> 13)) * FMIX_2) & MASK_32
    return h ^ (h >> 16)


@helper
def _gumbel(token: int, key_low: int, key_high: int) -> Any:
    h = _fmix32(_fmix32((token * TOKEN_FACTOR + key_low) & MASK_32) ^ key_high)
    return -_log(-_log(1.0 - (h + 0.5) * 2.0**-32))


@helper
def _largest(row: int, tail: int, limit: int, cell: int) -> int:
    """First position of the largest finite value of a row, -1 if there is none; the value goes to `cell`.

    `tail` holds the row's last, incomplete vector, padded.
    """
    num_full = limit // LANES
    best, best_step = splat(MINUS_INFINITY), splat(0.0)
    for step in range((limit + LANES - 1) // LANES):
        address = row + step * VECTOR_BYTES if step < num_full else tail
        value = finite_or(load(address), MINUS_INFINITY)
        best_step = select_greater(value, best, splat(step), best_step)
        best = select_greater(value, best, value, best)
    store(cell, best)
    store(cell + VECTOR_BYTES, best_step)
    largest, where = load_f32(cell), -1
    for lane in range(LANES):
        value_1, position = load_f32(cell + lane * 4), int(load_f32(cell + VECTOR_BYTES + lane * 4)) * LANES + lane
        if value_1 > MINUS_INFINITY and (where < 0 or value_1 > largest or (value_1 == largest and position < where)):
            largest, where = value_1, position
    store_f32(cell, largest)
    return where


@helper
def _scale_row(row: int, tail: int, limit: int, largest: float, temperature: float, scaled: int) -> None:
    num_full = limit // LANES
    top, divisor = splat(largest), splat(temperature)
    for step in range((limit + LANES - 1) // LANES):
        address = row + step * VECTOR_BYTES if step < num_full else tail
        store(scaled + step * VECTOR_BYTES, div(sub(finite_or(load(address), MINUS_INFINITY), top), divisor))


@helper
def _weigh_row(scaled: int, weights: int, limit: int, cut: int) -> None:
    """exp(scaled), 0 where the magnitude of scaled is above the cut."""
    for step in range((limit + LANES - 1) // LANES):
        store(weights + step * VECTOR_BYTES, exp(load(scaled + step * VECTOR_BYTES)))
    for token in range(limit):
        if load_i32(scaled + token * 4) & 0x7FFFFFFF > cut:
            store_f32(weights + token * 4, 0.0)


@helper
def _find_cut(scaled: int, weights: int, limit: int, target: float, is_share: bool, bins: int) -> int:
    """Smallest magnitude at which the weight of all tokens up to it reaches the target.

    All of scaled is <= 0, so a magnitude (the bits but for the sign) grows as the value falls. weights: address of one
    float32 a token, or 0 where each counts 1. is_share: the target is a share of all weight. A radix search: bins by
    the first digit, then by the second within the bin that holds the cut, then by the third.
    """
    prefix, above, before = 0, 31, 0.0
    for digit in range(3):
        shift, bits = (20, 11) if digit == 0 else ((10, 10) if digit == 1 else (0, 10))
        for n in range(1 << bits):
            store_f64(bins + n * 8, 0.0)
        for token in range(limit):
            magnitude = load_i32(scaled + token * 4) & 0x7FFFFFFF
            if magnitude >> above == prefix:
                weight = 1.0 if weights == 0 else float(load_f32(weights + token * 4))
                place = bins + ((magnitude >> shift) & ((1 << bits) - 1)) * 8
                store_f64(place, load_f64(place) + weight)
        if digit == 0 and is_share:
            total = 0.0
            for n in range(1 << bits):
                total += load_f64(bins + n * 8)
            target = target * total
        chosen, reached = 0, before
        for n in range(1 << bits):
            weight = load_f64(bins + n * 8)
            if weight > 0.0:
                chosen, before = n, reached
                reached += weight
                if reached >= target:
                    break
        prefix, above = (prefix << bits) | chosen, shift
    return prefix


@helper
def _draw(scaled: int, weights: int, limit: int, first_choice: int, key_low: int, key_high: int) -> int:
    """Token of the largest scaled + noise, the first of equals, among those of weight above 0."""
    best_token = first_choice
    best = load_f32(scaled + first_choice * 4) + np.float32(_gumbel(first_choice, key_low, key_high))
    bound = splat(exp_f64(-best) / SLACK)
    for step in range((limit + LANES - 1) // LANES):
        token = step * LANES
        can_win = lanes_less(_uniforms(token, key_low, key_high), mul(load(weights + token * 4), bound))
        while can_win != 0:
            if can_win & 1:
                score = load_f32(scaled + token * 4) + np.float32(_gumbel(token, key_low, key_high))
                if score > best or (score == best and token < best_token):
                    best, best_token = score, token
                    bound = splat(exp_f64(-best) / SLACK)
            can_win >>= 1
            token += 1
    return best_token


def sample(task: int) -> None:
    """Work item: one row."""
    limit, row_stride = load_i64(task + LIMIT), load_i64(task + LOGITS_ROW)
    num_rows = load_i64(task + NUM_ROWS)
    scaled = load_i64(task + SCRATCH) + fetch_add(task + NEXT_THREAD, 1) * load_i64(task + SCRATCH_STRIDE)
    weights = scaled + (limit + LANES) * 4
    bins = weights + (limit + LANES) * 4
    tail = bins + NUM_BINS * 8
    while True:
        item = fetch_add(task, 1)
        if item >= num_rows:
            break
        row = load_i64(task + LOGITS) + item * row_stride
        num_full = limit // LANES
        for lane in range(LANES):
            token = num_full * LANES + lane
            store_f32(tail + lane * 4, load_f32(row + token * 4) if token < limit else MINUS_INFINITY)
        best = _largest(row, tail, limit, bins)
        largest = load_f32(bins)
        temperature = load_f32(load_i64(task + TEMPERATURE) + item * 4)
        if best >= 0 and temperature > 0.0:
            _scale_row(row, tail, limit, largest, temperature, scaled)
            cut = 0x7F800000
            min_p = float(load_f32(load_i64(task + MIN_P) + item * 4))
            if min_p > 0.0:
                store_f32(bins, np.float32(_log(min(min_p, 1.0))))
                cut = load_i32(bins) & 0x7FFFFFFF
            top_k = load_i64(load_i64(task + TOP_K) + item * 8)
            top_p = load_f32(load_i64(task + TOP_P) + item * 4)
            if 0 < top_k < limit:
                cut = min(cut, _find_cut(scaled, 0, limit, float(top_k), False, bins))
            _weigh_row(scaled, weights, limit, cut)
            if top_p < 1.0:
                cut = min(cut, _find_cut(scaled, weights, limit, float(top_p), True, bins))
                _weigh_row(scaled, weights, limit, cut)
            seed = load_i64(load_i64(task + SEEDS) + item * 8)
            position = load_i64(load_i64(task + POSITIONS) + item * 8)
            key = _splitmix64(seed + GOLDEN_64 * _splitmix64(position))
            best = _draw(scaled, weights, limit, best, key & MASK_32, (key >> 32) & MASK_32)
        store_i64(load_i64(task + IDS) + item * 8, best)
