"""Putting a step's keys and values into their slots of the paged cache.

A slot is block * block_size + offset; the cache is [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim],
index 0 of the third axis holding keys and index 1 values.
"""

import torch

from kernels.compiled import launch, threads_for
from kernels.dispatch import use_compiled
from kernels.errors import KernelInputError
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
    Positions and slots must lie inside the table and the cache; the compiled kernel does not check them.
    Returns [num_tokens, num_heads, head_dim] of qkv's dtype.
    """
    num_rotated = num_heads + num_kv_heads
    head_dim = kv_cache.shape[5]
    if qkv.ndim != 2 or qkv.shape[1] != (num_rotated + num_kv_heads) * head_dim or kv_cache.shape[4] != num_kv_heads:
        raise KernelInputError(
            f"qkv is {tuple(qkv.shape)} for {num_heads} heads and {num_kv_heads} KV heads,"
            f" the cache {tuple(kv_cache.shape)}: their head counts or sizes differ"
        )
    if _can_launch(qkv, cos_sin, kv_cache):
        return _launch(qkv, cos_sin, positions, slot_mapping, kv_cache, layer, num_heads)
    heads = qkv.reshape(qkv.shape[0], num_rotated + num_kv_heads, head_dim)
    rotated = rotate_heads(heads[:, :num_rotated], cos_sin, positions)
    write_kv(rotated[:, num_heads:], heads[:, num_rotated:], slot_mapping, kv_cache, layer)
    return rotated[:, :num_heads].contiguous()


def _can_launch(qkv: torch.Tensor, cos_sin: torch.Tensor, kv_cache: torch.Tensor) -> bool:
    return (
        use_compiled("rope_and_write", qkv)
        and kv_cache.dtype is torch.float32
        and qkv.stride(1) == 1
        and cos_sin.is_contiguous()
        and kv_cache.stride(5) == 1
        and kv_cache.stride(4) == kv_cache.shape[5]
    )


def _launch(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    num_heads: int,
) -> torch.Tensor:
    num_tokens, num_kv_heads, head_dim = qkv.shape[0], kv_cache.shape[4], kv_cache.shape[5]
    positions, slot_mapping = positions.long().contiguous(), slot_mapping.contiguous()
    out = torch.empty((num_tokens, num_heads, head_dim))
    block_stride, layer_stride, value_stride, slot_stride = (4 * n for n in kv_cache.stride()[:4])
    num_threads = threads_for(8 * qkv.numel())
    launch(
        "rope_and_write",
        (
            qkv.data_ptr(), qkv.stride(0) * 4, cos_sin.data_ptr(), positions.data_ptr(), slot_mapping.data_ptr(),
            kv_cache.data_ptr() + layer * layer_stride, block_stride, value_stride, slot_stride, kv_cache.shape[3],
            num_heads, num_kv_heads, head_dim, cos_sin.shape[1], out.data_ptr(), num_tokens,
            max(1, num_tokens // (4 * num_threads)),
        ),
        num_threads,
    )  # fmt: skip
    return out
