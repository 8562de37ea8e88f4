"""The paged KV cache's memory: one tensor a tier, a block with all its layers in one piece."""

from collections.abc import Sequence

import numpy as np
import torch

from kernels.block_copy import copy_blocks
from model.config import ModelConfig
from model.errors import RunnerInputError
from scheduler.output import BlockCopy


def kv_block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values of `block_size` tokens in all layers."""
    return config.num_layers * 2 * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize


class KVCache:
    """Owns the blocks' memory, [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim] a tier.

    `blocks` lies on the device, `cpu_blocks` is the swap tier (None where there is none). A swap of a block moves one
    contiguous piece, since all its layers lie together. Which block belongs to whom is the scheduler's business.
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
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = kv_block_bytes(config, block_size, dtype)
        block_shape = (config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim)
        self.blocks = _allocate((num_blocks, *block_shape), dtype, device)
        self.cpu_blocks = None
        if num_cpu_blocks:
            self.cpu_blocks = _allocate((num_cpu_blocks, *block_shape), dtype, torch.device("cpu"))
            if device.type == "cuda":
                self.cpu_blocks = self.cpu_blocks.pin_memory()

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks on the device (copy-on-write). No block is the target of one copy and the source of another."""
        if copies:
            copy_blocks(self.blocks, *_source_and_target(copies, self.blocks.device))

    def swap_out(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks from the device to the CPU tier; both are free to reuse when this returns."""
        if copies:
            self._move(self.blocks, self._cpu_tier(), copies)

    def swap_in(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks from the CPU tier to the device; both are free to reuse when this returns."""
        if copies:
            self._move(self._cpu_tier(), self.blocks, copies)

    def _cpu_tier(self) -> torch.Tensor:
        if self.cpu_blocks is None:
            raise RunnerInputError("a step swaps blocks, but the KV cache has no CPU tier: set num_cpu_blocks")
        return self.cpu_blocks

    @staticmethod
    def _move(source: torch.Tensor, target: torch.Tensor, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            target[copy.dst].copy_(source[copy.src])


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeroed memory. On the CPU it comes from numpy: pages are taken when first written, and are huge ones.

    torch.zeros would write all of it at start, seconds for a pool of gigabytes.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)


def _source_and_target(copies: Sequence[BlockCopy], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = torch.tensor([(copy.src, copy.dst) for copy in copies], dtype=torch.int64).T.to(device)
    return pairs[0], pairs[1]
