"""Penalties, one row a work item: three walks over a sequence's tokens, none over the vocabulary.

The first walk clears the counts of the tokens that occur, so that the table they lie in needs no clearing; the second
counts; the third changes the logit of each token that still has a count, and clears it, so that none changes twice.
"""

import numpy as np

from kernels.cpu.helper import helper
from kernels.cpu.parallel import ARGUMENTS, NEXT_THREAD
from kernels.cpu.vector import fetch_add, load_f32, load_i64, store_f32, store_i64

(
    LOGITS, LOGITS_ROW, VOCAB, NUM_ROWS, TOKEN_IDS, TOKEN_IDS_ROW, SEQUENCES, NUM_PROMPT, NUM_TOKENS,
    REPETITION, FREQUENCY, PRESENCE, SCRATCH, SCRATCH_STRIDE,
) = range(ARGUMENTS, ARGUMENTS + 8 * 14, 8)  # fmt: skip


def scratch_bytes(vocab_size: int) -> int:
    """Working memory of one thread: for each token twice its count in the output, and 1 more if it is in the prompt."""
    return 8 * vocab_size


@helper
def _count(tokens: int, num_prompt: int, num_tokens: int, vocab: int, counts: int) -> None:
    for place in range(num_tokens):
        token = load_i64(tokens + place * 8)
        if 0 <= token < vocab:
            store_i64(counts + token * 8, 0)
    for place in range(num_tokens):
        token = load_i64(tokens + place * 8)
        if 0 <= token < vocab:
            count = load_i64(counts + token * 8)
            store_i64(counts + token * 8, count | 1 if place < num_prompt else count + 2)


@helper
def _penalised(
    logit: np.float32, count: int, repetition: np.float32, frequency: np.float32, presence: np.float32
) -> np.float32:
    logit = logit / repetition if logit > 0 else logit * repetition
    if count > 1:
        logit = logit - frequency * np.float32(count >> 1)
        logit = logit - presence
    return logit


def penalties(task: int) -> None:
    """Work item: one row."""
    vocab, num_rows = load_i64(task + VOCAB), load_i64(task + NUM_ROWS)
    counts = load_i64(task + SCRATCH) + fetch_add(task + NEXT_THREAD, 1) * load_i64(task + SCRATCH_STRIDE)
    while True:
        item = fetch_add(task, 1)
        if item >= num_rows:
            break
        repetition = load_f32(load_i64(task + REPETITION) + item * 4)
        frequency = load_f32(load_i64(task + FREQUENCY) + item * 4)
        presence = load_f32(load_i64(task + PRESENCE) + item * 4)
        if repetition != 1 or frequency != 0 or presence != 0:
            row = load_i64(task + LOGITS) + item * load_i64(task + LOGITS_ROW)
            sequence = load_i64(load_i64(task + SEQUENCES) + item * 8)
            tokens = load_i64(task + TOKEN_IDS) + sequence * load_i64(task + TOKEN_IDS_ROW)
            num_tokens = load_i64(load_i64(task + NUM_TOKENS) + item * 8)
            _count(tokens, load_i64(load_i64(task + NUM_PROMPT) + item * 8), num_tokens, vocab, counts)
            for place in range(num_tokens):
                token = load_i64(tokens + place * 8)
                if 0 <= token < vocab:
                    count = load_i64(counts + token * 8)
                    if count != 0:
                        store_i64(counts + token * 8, 0)
                        logit = load_f32(row + token * 4)
                        store_f32(row + token * 4, _penalised(logit, count, repetition, frequency, presence))
