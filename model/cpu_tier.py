"""The memory of the CPU tier: grown as it is needed, and never given back."""

from collections.abc import Callable

import torch

from model.memory import allocate

# Grown in pieces of about this many bytes: small enough to stop in time, large enough to hold long runs of blocks.
SLAB_BYTES = 64 << 20
# Left to everybody else on the machine when the tier grows.
RESERVE_BYTES = 512 << 20


class CpuTier:
    """Blocks [num_blocks, *block_shape] in slabs, and a checksum for each.

    A slab is taken when one of its blocks is first written. So a large tier costs nothing before it is used, and
    where the machine runs short of memory meanwhile it stays as it is: `try_grow` says no. `available_bytes` tells
    how much is free; without it there is no limit. On CUDA slabs are pinned, once each, and kept.
    """

    def __init__(
        self,
        num_blocks: int,
        block_shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        is_pinned: bool = False,
        available_bytes: Callable[[], int] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.checksums = torch.zeros(num_blocks, dtype=torch.int64, pin_memory=is_pinned)
        self._shape = block_shape
        self._dtype = dtype
        self._is_pinned = is_pinned
        self._available_bytes = available_bytes
        self._block_bytes = torch.Size(block_shape).numel() * dtype.itemsize
        self.slab_blocks = min(num_blocks, max(1, SLAB_BYTES // self._block_bytes))
        self._slabs: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Memory taken so far."""
        return sum(slab.nbytes for slab in self._slabs)

    def try_grow(self, block_id: int) -> bool:
        """Have memory for this block and all before it; False where too little is free."""
        while len(self._slabs) * self.slab_blocks <= block_id:
            num_bytes = self.slab_blocks * self._block_bytes
            if self._available_bytes is not None and self._available_bytes() < num_bytes + RESERVE_BYTES:
                return False
            shape = (self.slab_blocks, *self._shape)
            if self._is_pinned:
                self._slabs.append(torch.empty(shape, dtype=self._dtype, pin_memory=True))
            else:
                self._slabs.append(allocate(shape, self._dtype, torch.device("cpu")))
        return True

    def blocks(self, block_id: int, num_blocks: int) -> torch.Tensor:
        """A view [num_blocks, *block_shape] of neighbours in one slab, for which there is memory."""
        slab, first = divmod(block_id, self.slab_blocks)
        return self._slabs[slab][first : first + num_blocks]
