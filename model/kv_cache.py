"""The paged KV cache's memory: one tensor a tier, a block with all its layers in one piece."""

from collections.abc import Callable, Sequence

import torch

from kernels.block_copy import copy_blocks
from model.config import ModelConfig
from model.cpu_tier import CpuTier
from model.errors import RunnerInputError
from model.memory import allocate, take_pages
from model.swap_copies import SwapCopies
from scheduler.output import BlockCopy, Transfer, TransferResult


def kv_block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values of `block_size` tokens in all layers."""
    return config.num_layers * 2 * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize


class KVCache:
    """Owns the blocks' memory, [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim] a tier.

    `blocks` lies on the device, `cpu_tier` is the swap tier (None where there is none). A swap of a block moves one
    contiguous piece, since all its layers lie together. Which block belongs to whom is the scheduler's business.
    `available_bytes` tells how much memory the CPU tier may still take; without it there is no limit.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_cpu_blocks: int = 0,
        available_bytes: Callable[[], int] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = kv_block_bytes(config, block_size, dtype)
        block_shape = (config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim)
        self.blocks = allocate((num_blocks, *block_shape), dtype, device)
        self.cpu_tier: CpuTier | None = None
        self._copies: SwapCopies | None = None
        if num_cpu_blocks:
            is_pinned = device.type == "cuda"
            self.cpu_tier = CpuTier(
                num_cpu_blocks, block_shape, dtype, is_pinned=is_pinned, available_bytes=available_bytes
            )
            self._copies = SwapCopies(self.blocks, self.cpu_tier)

    def take_pages(self, max_wait_s: float) -> None:
        """Take all memory of the device's blocks now, not as they are first written. Nothing moves, nothing is lost.

        What isn't there after `max_wait_s` is taken in the background, beside the steps. Call it while no sequence has
        a row. Raises MemoryError where there is too little.
        """
        take_pages(self.blocks, max_wait_s)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks on the device (copy-on-write). No block is the target of one copy and the source of another."""
        if copies:
            copy_blocks(self.blocks, *_source_and_target(copies, self.blocks.device))

    def begin_transfers(self, outs: Sequence[Transfer], ins: Sequence[Transfer]) -> None:
        """Begin copies to the CPU tier (`outs`) and back (`ins`). Neither side may be touched before they have ended.

        Raises RunnerInputError where there is no CPU tier.
        """
        if not (outs or ins):
            return
        if self._copies is None:
            raise RunnerInputError("a step swaps blocks, but the KV cache has no CPU tier: set num_cpu_blocks")
        self._copies.begin(outs, ins)

    def ended_transfers(self, *, is_waiting: bool = False) -> tuple[TransferResult, ...]:
        """The transfers that have ended since the last call. `is_waiting`: wait for the oldest, if there is one."""
        return () if self._copies is None else self._copies.ended(is_waiting=is_waiting)


def _source_and_target(copies: Sequence[BlockCopy], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = torch.tensor([(copy.src, copy.dst) for copy in copies], dtype=torch.int64).T.contiguous()
    if device.type == "cuda":  # torch keeps fresh pinned memory until the copy has run
        pairs = pairs.pin_memory().to(device, non_blocking=True)
    return pairs[0], pairs[1]
