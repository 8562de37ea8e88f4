"""The k likeliest tokens of a row, one row a work item: two passes of vectors, no sort.

The first pass keeps the k largest so far in order. A token is looked at by itself only if it beats the last of them,
which happens about k ln(vocab / k) times in a row without an order; the others cost a comparison for sixteen. The
second pass adds up the exponentials.
"""

from math import exp as exp_f64
from math import log

from kernels.cpu.helper import helper
from kernels.cpu.parallel import ARGUMENTS
from kernels.cpu.vector import (
    LANES,
    VECTOR_BYTES,
    add,
    exp,
    fetch_add,
    finite_or,
    lanes_less,
    load,
    load_f32,
    load_f64,
    load_i64,
    reduce_add,
    splat,
    store_f64,
    store_i64,
    sub,
)

LOGITS, LOGITS_ROW, LIMIT, K, VALUES, IDS, NUM_ROWS = range(ARGUMENTS, ARGUMENTS + 8 * 7, 8)
MINUS_INFINITY = float("-inf")
# So many vectors are added in float32 before their sum goes on in float64.
VECTORS_PER_SUM = 32


@helper
def _insert(values: int, ids: int, num: int, k: int, value: float, token: int) -> int:
    """Put a token behind those that are as large, drop the last where there are k; how many there are now."""
    place = num if num < k else k - 1
    while place > 0 and load_f64(values + (place - 1) * 8) < value:
        store_f64(values + place * 8, load_f64(values + (place - 1) * 8))
        store_i64(ids + place * 8, load_i64(ids + (place - 1) * 8))
        place -= 1
    store_f64(values + place * 8, value)
    store_i64(ids + place * 8, token)
    return num + 1 if num < k else num


@helper
def _largest_k(row: int, limit: int, k: int, values: int, ids: int) -> int:
    """How many tokens there are of the row's k largest finite ones; they go to `values` and `ids`."""
    num, worst = 0, MINUS_INFINITY
    for step in range(limit // LANES):
        beats = lanes_less(splat(worst), finite_or(load(row + step * VECTOR_BYTES), MINUS_INFINITY))
        token = step * LANES
        while beats != 0:
            if beats & 1:
                value = float(load_f32(row + token * 4))
                if value > worst:
                    num = _insert(values, ids, num, k, value, token)
                    worst = load_f64(values + (k - 1) * 8) if num == k else MINUS_INFINITY
            beats >>= 1
            token += 1
    for token in range(limit // LANES * LANES, limit):
        value = float(load_f32(row + token * 4))
        if value - value == 0.0 and value > worst:
            num = _insert(values, ids, num, k, value, token)
            worst = load_f64(values + (k - 1) * 8) if num == k else MINUS_INFINITY
    return num


@helper
def _sum_of_exp(row: int, limit: int, largest: float) -> float:
    """Sum over the row's finite logits of exp(logit - largest), float64."""
    top, total, num_full = splat(largest), 0.0, limit // LANES
    for first in range(0, num_full, VECTORS_PER_SUM):
        partial = splat(0.0)
        for step in range(first, min(first + VECTORS_PER_SUM, num_full)):
            value = finite_or(load(row + step * VECTOR_BYTES), MINUS_INFINITY)
            partial = add(partial, exp(sub(value, top)))
        total += reduce_add(partial)
    for token in range(num_full * LANES, limit):
        value_1 = float(load_f32(row + token * 4))
        if value_1 - value_1 == 0.0:
            total += exp_f64(value_1 - largest)
    return total


def top_logprobs(task: int) -> None:
    """Work item: one row."""
    limit, k = load_i64(task + LIMIT), load_i64(task + K)
    while True:
        item = fetch_add(task, 1)
        if item >= load_i64(task + NUM_ROWS):
            break
        row = load_i64(task + LOGITS) + item * load_i64(task + LOGITS_ROW)
        values, ids = load_i64(task + VALUES) + item * k * 8, load_i64(task + IDS) + item * k * 8
        num = _largest_k(row, limit, k, values, ids)
        if num > 0:
            largest = load_f64(values)
            log_sum = largest + log(_sum_of_exp(row, limit, largest))
            for place in range(num):
                store_f64(values + place * 8, load_f64(values + place * 8) - log_sum)
        for place in range(num, k):
            store_f64(values + place * 8, MINUS_INFINITY)
            store_i64(ids + place * 8, -1)
