"""What only real streams can break: pinned memory that is written too early, blocks that are copied too late."""

import random

import numpy as np
import pytest
import torch

from model.kv_cache import KVCache
from model.staging import HostCopy, Staging, Transport, transport_for
from scheduler.output import BlockCopy, Transfer
from tests.unit.model_runner.driver import tiny_config
from tests.unit.model_runner.late_device import LateDevice

pytestmark = pytest.mark.gpu

NUM_BLOCKS = 48
SLOW_CYCLES = 2_000_000


def be_busy(device: torch.device) -> None:
    """Have the stream lag behind the host by about a millisecond."""
    if device.type == "cuda":
        torch.cuda._sleep(SLOW_CYCLES)  # type: ignore[no-untyped-call]


def transport_of(device: torch.device) -> Transport:
    return transport_for(device) or LateDevice()


def made(device: torch.device) -> KVCache:
    """Blocks of 768 KiB."""
    config = tiny_config(num_layers=12, num_kv_heads=8, num_heads=8, head_dim=128)
    return KVCache(
        config,
        num_blocks=NUM_BLOCKS,
        block_size=16,
        dtype=torch.bfloat16,
        device=device,
        num_cpu_blocks=2 * NUM_BLOCKS,
    )


def test_each_step_s_kernels_see_its_own_arrays_while_the_device_lags(device: torch.device) -> None:
    transport = transport_of(device)
    staging = Staging(transport, 1 << 16)
    sums = []
    for step in range(60):
        staging.begin()
        staged = staging.put(np.full(4000, step, dtype=np.int64))
        staging.flush()
        be_busy(device)
        if isinstance(transport, LateDevice):
            transport.run_until(len(transport.todo))
        sums.append(HostCopy(staged.sum(), transport))
    if isinstance(transport, LateDevice):
        transport.run_until(len(transport.todo))
    assert [int(each.numpy()) for each in sums] == [4000 * step for step in range(60)]


def test_blocks_that_are_written_swapped_and_written_again_come_back_as_they_were(device: torch.device) -> None:
    """A block is written by a kernel that runs late, copied out at once, and overwritten once its copy has ended."""
    seed = 3
    rng = random.Random(seed)
    cache = made(device)
    for number in range(12):
        blocks = rng.sample(range(NUM_BLOCKS), 16)
        targets = rng.sample(range(2 * NUM_BLOCKS), 16)
        be_busy(device)
        for block in blocks:
            cache.blocks[block].fill_(number + block / 64)
        outs = Transfer(2 * number, tuple(BlockCopy(*pair) for pair in zip(blocks, targets, strict=True)))
        cache.begin_transfers([outs], [])
        _await(cache, 2 * number)
        for block in blocks:
            cache.blocks[block].fill_(torch.nan)
        places = rng.sample(range(NUM_BLOCKS), 16)
        ins = Transfer(2 * number + 1, tuple(BlockCopy(*pair) for pair in zip(targets, places, strict=True)))
        be_busy(device)
        cache.begin_transfers([], [ins])
        _await(cache, 2 * number + 1)
        for block, place in zip(blocks, places, strict=True):
            wanted = torch.tensor(number + block / 64).to(torch.bfloat16)
            assert bool((cache.blocks[place] == wanted.to(device)).all()), f"seed {seed}, round {number}, block {place}"


def test_a_wrong_bit_in_pinned_memory_is_found(device: torch.device) -> None:
    cache = made(device)
    cache.blocks.normal_()
    cache.begin_transfers([Transfer(1, tuple(BlockCopy(n, n) for n in range(8)))], [])
    _await(cache, 1)
    assert cache.cpu_tier is not None
    assert cache.cpu_tier.blocks(0, 1).is_pinned() is (device.type == "cuda")
    cache.cpu_tier.blocks(3, 1).view(torch.uint8).view(-1)[777] ^= 16
    cache.begin_transfers([], [Transfer(2, tuple(BlockCopy(n, 16 + n) for n in range(8)))])
    assert _await(cache, 2) == (19,)
    assert torch.equal(cache.blocks[16], cache.blocks[0])


def _await(cache: KVCache, transfer_id: int) -> tuple[int, ...]:
    """Poll until it has ended, as steps do; answers what has failed."""
    while True:
        for result in cache.ended_transfers(is_waiting=True):
            if result.transfer_id == transfer_id:
                return result.failed_dst
