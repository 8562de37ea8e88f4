"""Putting a step's keys and values into their slots of the paged cache.

A slot is block * block_size + offset; the cache is [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim],
index 0 of the third axis holding keys and index 1 values.
"""

import torch

from kernels.rotary import rotate_heads


def write_kv(
    keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor, kv_cache: torch.Tensor, layer: int
) -> None:
    """Scatter keys and values [num_tokens, num_kv_heads, head_dim] into layer `layer` of the cache IN PLACE.

    slot_mapping int64 [num_tokens]; a token of slot -1 is not written. Where a slot stands twice, either token may win.
    """
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    block_size = kv_cache.shape[3]
    blocks, offsets = slots // block_size, slots % block_size
    kv_cache[blocks, layer, 0, offsets] = keys[written].to(kv_cache.dtype)
    kv_cache[blocks, layer, 1, offsets] = values[written].to(kv_cache.dtype)


def rope_and_write(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    num_heads: int,
    num_kv_heads: int,
) -> torch.Tensor:
    """Rotate queries and keys, write keys and values to their slots IN PLACE, return the rotated queries.

    qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], cos_sin float32 [max_positions, rotary_dim] (see
    `rotate_heads`), positions int64 or int32 [num_tokens], slot_mapping int64 [num_tokens] (-1: not written).
    Returns [num_tokens, num_heads, head_dim] of qkv's dtype.
    """
    heads = qkv.reshape(qkv.shape[0], num_heads + 2 * num_kv_heads, -1)
    num_rotated = num_heads + num_kv_heads
    rotated = rotate_heads(heads[:, :num_rotated], cos_sin, positions)
    write_kv(rotated[:, num_heads:], heads[:, num_rotated:], slot_mapping, kv_cache, layer)
    return rotated[:, :num_heads].contiguous()
