"""What copying and computing cost on this machine, measured at start, in well under a second."""

import time
from itertools import count

from model.kv_cache import KVCache
from model.model_runner import ModelRunner
from scheduler.output import BlockCopy, Chunks, NewRow, SchedulerOutput, Transfer
from scheduler.sampling_params import SamplingParams

# A pass copies at most this many blocks and about this many bytes each way.
SWAP_BLOCKS = 8
SWAP_BYTES = 8 << 20
FIRST_PROMPT_TOKENS = 16


def measure_swap(cache: KVCache, num_passes: int = 2) -> float | None:
    """Bytes per second that are copied between the tiers, checksums included, the mean of both ways.

    Uses the first blocks of both tiers, whose contents don't matter yet. None where the CPU tier gets no memory.
    """
    assert cache.cpu_tier is not None, "there is no CPU tier to measure"
    num_blocks = max(1, min(SWAP_BLOCKS, SWAP_BYTES // cache.block_bytes, cache.num_blocks, cache.cpu_tier.num_blocks))
    copies = tuple(BlockCopy(block_id, block_id) for block_id in range(num_blocks))
    best_s = None
    for number in range(1 + num_passes):  # the first takes the memory, and is not counted
        started = time.perf_counter()
        for outs, ins in (((Transfer(0, copies),), ()), ((), (Transfer(0, copies),))):
            cache.begin_transfers(outs, ins)
            if any(result.failed_dst for result in cache.ended_transfers(is_waiting=True)):
                return None
        elapsed_s = time.perf_counter() - started
        if number:
            best_s = elapsed_s if best_s is None else min(best_s, elapsed_s)
    assert best_s is not None
    return 2 * num_blocks * cache.block_bytes / best_s


def measure_prefill(runner: ModelRunner, cache: KVCache, max_tokens: int, budget_s: float) -> float:
    """Tokens of a prompt that are computed per second, the best of ever longer prompts.

    Stops before the next one would most likely pass `budget_s`. No sequence may have a row; the first blocks of the
    cache are written.
    """
    max_tokens = min(max_tokens, cache.num_blocks * cache.block_size)
    num_tokens = min(FIRST_PROMPT_TOKENS, max_tokens)
    best = spent_s = 0.0
    for number in count():
        elapsed_s = _time_prompt(runner, cache, num_tokens, f"rate-{number}")
        best = max(best, num_tokens / elapsed_s)
        spent_s += elapsed_s
        if num_tokens == max_tokens or spent_s + 2 * elapsed_s > budget_s:
            break
        num_tokens = min(2 * num_tokens, max_tokens)
    return best


def _time_prompt(runner: ModelRunner, cache: KVCache, num_tokens: int, seq_id: str) -> float:
    block_ids = tuple(range(-(-num_tokens // cache.block_size)))
    row = NewRow(seq_id, (0,) * num_tokens, num_tokens, SamplingParams(temperature=0), 0, block_ids)
    chunks = Chunks((seq_id,), (0,), (num_tokens,), (True,))
    started = time.perf_counter()
    runner.execute(SchedulerOutput(step=0, new_rows=(row,), chunks=chunks))
    elapsed_s = time.perf_counter() - started
    runner.execute(SchedulerOutput(step=0, removed_ids=(seq_id,)))
    return elapsed_s
