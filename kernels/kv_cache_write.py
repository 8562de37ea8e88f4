"""Putting a step's keys and values into their slots of the paged cache.

A slot is block * block_size + offset; the cache is [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim],
index 0 of the third axis holding keys and index 1 values. A cache of float8_e4m3fn holds them divided by their scale,
those beyond its largest number as that number.
"""

import math
from typing import Final

import torch

from kernels.attention_inputs import FP8
from kernels.cache_dtype import check_cache_dtype
from kernels.checks import INTEGERS, check_devices, check_dtypes
from kernels.compiled import launch, threads_for
from kernels.dispatch import TRITON_DTYPES, tell_fallback, use_compiled, use_triton
from kernels.errors import KernelInputError
from kernels.rotary import rotate_heads

FP8_MAX: Final = 448.0


def write_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Scatter keys and values [num_tokens, num_kv_heads, head_dim] into layer `layer` of the cache IN PLACE.

    slot_mapping int64 [num_tokens]; a token of slot -1 is not written. Where a slot stands twice, either token may win.
    The scales are those of a cache in float8_e4m3fn. The host waits for nothing, so that a CUDA graph can hold it.
    Raises KernelInputError for what doesn't belong together.
    """
    check_devices("keys", keys, values=values, slot_mapping=slot_mapping, kv_cache=kv_cache)
    _check_cache(keys, slot_mapping, kv_cache, layer, k_scale, v_scale)
    wanted = (*slot_mapping.shape, *kv_cache.shape[4:])
    if slot_mapping.ndim != 1 or not keys.shape == values.shape == wanted or keys.dtype is not values.dtype:
        raise KernelInputError(
            f"keys are {keys.dtype} {tuple(keys.shape)}, values {values.dtype} {tuple(values.shape)} and slot_mapping"
            f" {tuple(slot_mapping.shape)}; for this cache they must be {wanted} of one dtype, and [num_tokens]"
        )
    _write_with_torch(keys, values, slot_mapping, kv_cache, layer, k_scale, v_scale)


def _write_with_torch(
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    k_scale: float,
    v_scale: float,
) -> None:
    if not len(slot_mapping):
        return
    # To leave tokens out would be to ask how many are left. Instead one that isn't written repeats the first that is,
    # and where none is, all of them write to slot 0 what is there.
    is_written = slot_mapping >= 0
    places = torch.arange(len(slot_mapping), device=slot_mapping.device)
    tokens = torch.where(is_written, places, is_written.long().argmax())
    slots = slot_mapping.index_select(0, tokens).clamp(min=0)
    block_size = kv_cache.shape[3]
    at = (slots // block_size, slots % block_size)
    for kv, numbers, scale in ((0, keys, k_scale), (1, values, v_scale)):
        stored, target = _stored(numbers.index_select(0, tokens), kv_cache, scale), kv_cache[:, layer, kv]
        if kv_cache.dtype is FP8:  # as bytes, which torch can index everywhere
            stored, target = stored.view(torch.uint8), target.view(torch.uint8)
        target.index_put_(at, torch.where(is_written.any(), stored, target[at]))


def _stored(numbers: torch.Tensor, kv_cache: torch.Tensor, scale: float) -> torch.Tensor:
    if kv_cache.dtype is FP8:
        numbers = (numbers.float() * _factor(scale)).clamp(-FP8_MAX, FP8_MAX)
    return numbers.to(kv_cache.dtype)


def _factor(scale: float) -> float:
    """What a number is multiplied by before it is stored. A scale of 0 says that all of them are 0."""
    return 1.0 / scale if scale else 0.0


def rope_and_write(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    num_heads: int,
    num_kv_heads: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Rotate queries and keys, write keys and values to their slots IN PLACE, return the rotated queries.

    qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], cos_sin float32 [max_positions, rotary_dim] (see
    `rotate_heads`), positions int64 or int32 [num_tokens], slot_mapping int64 [num_tokens] (-1: not written).
    Positions and slots must lie inside the table and the cache; the compiled kernel and Triton's do not check them.
    The cache is of qkv's dtype, or float8_e4m3fn with scales: a key is stored as key / k_scale (0: as 0), rounded.
    Returns [num_tokens, num_heads, head_dim] of qkv's dtype. Raises KernelInputError for what doesn't belong together,
    and for a cache in FP8 on a device without such numbers (`cache_dtype.py`).
    """
    check_devices("qkv", qkv, cos_sin=cos_sin, positions=positions, slot_mapping=slot_mapping, kv_cache=kv_cache)
    _check_cache(qkv, slot_mapping, kv_cache, layer, k_scale, v_scale)
    num_rotated = num_heads + num_kv_heads
    head_dim = kv_cache.shape[5]
    if qkv.ndim != 2 or qkv.shape[1] != (num_rotated + num_kv_heads) * head_dim or kv_cache.shape[4] != num_kv_heads:
        raise KernelInputError(
            f"qkv is {tuple(qkv.shape)} for {num_heads} heads and {num_kv_heads} KV heads,"
            f" the cache {tuple(kv_cache.shape)}: their head counts or sizes differ"
        )
    _check_places(qkv, cos_sin, positions, slot_mapping, head_dim)
    check_cache_dtype(kv_cache.dtype, qkv.device, ("rope_and_write",))
    if _takes_triton(qkv, kv_cache):
        from kernels.gpu.kv_cache_write import launch_rope_and_write

        return launch_rope_and_write(
            qkv if qkv.stride(1) == 1 else qkv.contiguous(),
            cos_sin if cos_sin.stride(1) == 1 else cos_sin.contiguous(),
            positions.contiguous(),
            slot_mapping.contiguous(),
            kv_cache,
            layer,
            num_heads,
            (_factor(k_scale), _factor(v_scale)),
        )
    if _can_launch(qkv, cos_sin, kv_cache):
        return _launch(qkv, cos_sin, positions, slot_mapping, kv_cache, layer, num_heads)
    heads = qkv.reshape(qkv.shape[0], num_rotated + num_kv_heads, head_dim)
    rotated = rotate_heads(heads[:, :num_rotated], cos_sin, positions)
    _write_with_torch(rotated[:, num_heads:], heads[:, num_rotated:], slot_mapping, kv_cache, layer, k_scale, v_scale)
    return rotated[:, :num_heads].contiguous()


def _check_cache(
    numbers: torch.Tensor, slot_mapping: torch.Tensor, kv_cache: torch.Tensor, layer: int, *scales: float
) -> None:
    """Raise KernelInputError unless such numbers can be written to these slots of the cache. Looks at no contents."""
    check_dtypes((torch.int64,), slot_mapping=slot_mapping)
    if kv_cache.ndim != 6 or kv_cache.shape[2] != 2:
        raise KernelInputError(
            f"the cache is {tuple(kv_cache.shape)}; it must be"
            " [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]"
        )
    if not 0 <= layer < kv_cache.shape[1]:
        raise KernelInputError(f"layer is {layer}, and the cache has layers 0 to {kv_cache.shape[1] - 1}")
    if kv_cache.dtype is not numbers.dtype and kv_cache.dtype is not FP8:
        raise KernelInputError(
            f"what is written is {numbers.dtype}, the cache {kv_cache.dtype}: it must be of that dtype or {FP8}"
        )
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        if not 0 <= scale < math.inf:
            raise KernelInputError(f"{name} is {scale}: it must be finite and not below 0")
        if scale != 1.0 and kv_cache.dtype is not FP8:
            raise KernelInputError(f"{name} is {scale}, but the cache is {kv_cache.dtype}: only {FP8} has scales")


def _check_places(
    qkv: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor, head_dim: int
) -> None:
    """Raise KernelInputError where a shape or dtype would lead into other memory. Looks at no contents."""
    check_dtypes(INTEGERS, positions=positions)
    if not positions.shape == slot_mapping.shape == qkv.shape[:1]:
        raise KernelInputError(
            f"positions are {tuple(positions.shape)} and slot_mapping {tuple(slot_mapping.shape)}:"
            f" each of the {qkv.shape[0]} tokens has one of either"
        )
    if cos_sin.ndim != 2 or cos_sin.dtype is not torch.float32 or cos_sin.shape[1] % 2 or cos_sin.shape[1] > head_dim:
        raise KernelInputError(
            f"cos_sin is {cos_sin.dtype} {tuple(cos_sin.shape)}; it must be float32 [positions, rotary_dim], an even"
            f" number of up to {head_dim} columns"
        )


def _takes_triton(qkv: torch.Tensor, kv_cache: torch.Tensor) -> bool:
    if not use_triton("rope_and_write", qkv) or qkv.dtype not in TRITON_DTYPES:
        return False
    if kv_cache.stride(5) != 1:
        tell_fallback("rope_and_write", f"the elements of a head lie {kv_cache.stride(5)} apart in the cache")
        return False
    return True


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
