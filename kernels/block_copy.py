"""Copy-on-write of KV blocks."""

import torch


def copy_blocks(kv_cache: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy block src[i] onto block dst[i], all layers, keys and values, IN PLACE.

    kv_cache [num_blocks, ...]; src, dst int64 [n]. No id may stand in both lists, and none twice in `dst`.
    """
    if src.numel():
        kv_cache[dst] = kv_cache[src]
