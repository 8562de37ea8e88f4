"""Threads of a step, and the cache's memory."""

import os

import pytest
import torch

from model.kv_cache import KVCache, kv_block_bytes
from model.threads import num_physical_cores, set_num_threads
from tests.unit.model_runner.driver import tiny_config


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no CPU affinity")
def test_a_process_that_is_held_to_one_cpu_counts_one_core() -> None:
    """What the machine has beyond it is not ours."""
    allowed = os.sched_getaffinity(0)
    assert 1 <= num_physical_cores() <= len(allowed)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert num_physical_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_number_of_threads_that_is_named_is_set() -> None:
    """And the default never exceeds what torch was told."""
    before = torch.get_num_threads()
    try:
        assert set_num_threads(1) == torch.get_num_threads() == 1
        assert set_num_threads(None) == 1
    finally:
        set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_takes_the_bytes_that_are_said(dtype: torch.dtype) -> None:
    """So that the pool's size can be planned before it is made."""
    config = tiny_config()
    cache = KVCache(config, num_blocks=5, block_size=8, dtype=dtype, device=torch.device("cpu"))
    assert cache.blocks.shape == (5, 2, 2, 8, 2, 16)
    assert cache.blocks.dtype == dtype
    assert cache.block_bytes == kv_block_bytes(config, 8, dtype) == cache.blocks.nbytes // 5
    assert cache.cpu_tier is None
