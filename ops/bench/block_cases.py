"""Times the block pool and the prefix cache, alone: what one block and one token cost."""

import time
from collections.abc import Callable
from typing import Final

from ops.bench.errors import BenchError
from ops.bench.scheduler_load import BLOCK_SIZE
from scheduler import CacheConfig, SamplingParams, Sequence
from scheduler.block_pool import Block, BlockPool
from scheduler.kv_cache_manager import KVCacheManager

NUM_BLOCKS: Final = 8192
BATCH: Final = 8
NUM_PROMPT_TOKENS: Final = 4096


def allocate_and_free_ns(batch: int) -> tuple[float, float]:
    """Nanoseconds a block of `allocate` and of `free`, in calls of `batch` blocks each; nothing is cached."""
    pool = BlockPool(NUM_BLOCKS, lambda content: None)
    num_calls = NUM_BLOCKS // batch
    held: list[list[Block]] = []

    def allocate() -> None:
        held.extend([pool.allocate(batch) or [] for _ in range(num_calls)])

    def free() -> None:
        for blocks in held:
            pool.free(blocks)

    return _cpu_ns(allocate) / NUM_BLOCKS, _cpu_ns(free) / NUM_BLOCKS


def lookup_ns() -> tuple[float, float]:
    """Nanoseconds a token of a prefix lookup that finds all blocks: a prompt's first one, and one more of the same."""
    kv = KVCacheManager(CacheConfig(NUM_PROMPT_TOKENS // BLOCK_SIZE + 1, BLOCK_SIZE))
    prompt = range(NUM_PROMPT_TOKENS + 1)
    writer, reader = (Sequence(name, prompt, SamplingParams()) for name in ("writer", "reader"))
    kv.allocate_slots(writer, len(prompt))
    writer.num_computed_tokens = len(prompt)
    kv.seal_full_blocks(writer)

    def look_up() -> None:
        if len(kv.find_prefix(reader)) * BLOCK_SIZE != NUM_PROMPT_TOKENS:
            raise BenchError("a lookup of a cached prompt doesn't find all of it")

    first, again = _cpu_ns(look_up), _cpu_ns(look_up)
    return first / NUM_PROMPT_TOKENS, again / NUM_PROMPT_TOKENS


def _cpu_ns(call: Callable[[], None]) -> int:
    started = time.thread_time_ns()
    call()
    return time.thread_time_ns() - started
