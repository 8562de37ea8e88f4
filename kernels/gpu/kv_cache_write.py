"""Rotary embedding of queries and keys, and the write of keys and values to their slots, in one pass over qkv."""

from typing import Final

import torch
import triton
import triton.language as tl

from kernels.attention_inputs import FP8
from kernels.gpu.case import FP8_TARGETS, Case, meta
from kernels.gpu.common import launch, next_power_of_2

# Elements of the tile of heads that one program moves.
TILE: Final = 2048


@triton.jit
def store_number(place: tl.tensor, value: tl.tensor, mask: tl.tensor, factor: tl.tensor, IS_FP8: tl.constexpr) -> None:
    """Store float32 numbers in the place's dtype; in float8_e4m3fn times `factor`, and cut off where its numbers end.

    A NaN stays one: all comparisons with it are false.
    """
    if IS_FP8:
        value = value * factor
        value = tl.where(value > 448.0, 448.0, tl.where(value < -448.0, -448.0, value))
    tl.store(place, value.to(place.dtype.element_ty), mask=mask)


@triton.jit
def move_heads(
    source: tl.tensor,
    target: tl.tensor,
    cos_sin: tl.tensor,
    mask: tl.tensor,
    factor: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_LENGTH: tl.constexpr,
    REST_LENGTH: tl.constexpr,
    ROTATES: tl.constexpr,
    IS_FP8: tl.constexpr,
) -> None:
    """Heads at `source` to `target`, both [heads] pointers, rotated by the row of the table or as they are."""
    pair = tl.arange(0, HALF_LENGTH)
    mask_pair = mask[:, None] & (pair < HALF)[None, :]
    low = tl.load(source[:, None] + pair[None, :], mask=mask_pair, other=0.0).to(tl.float32)
    high = tl.load(source[:, None] + (HALF + pair)[None, :], mask=mask_pair, other=0.0).to(tl.float32)
    if ROTATES:
        cos = tl.load(cos_sin + pair, mask=pair < HALF, other=0.0)[None, :]
        sin = tl.load(cos_sin + HALF + pair, mask=pair < HALF, other=0.0)[None, :]
        turned_low = low * cos - high * sin
        high = high * cos + low * sin
        low = turned_low
    store_number(target[:, None] + pair[None, :], low, mask_pair, factor, IS_FP8)
    store_number(target[:, None] + (HALF + pair)[None, :], high, mask_pair, factor, IS_FP8)
    if HEAD_DIM > 2 * HALF:
        rest = 2 * HALF + tl.arange(0, REST_LENGTH)
        mask_rest = mask[:, None] & (rest < HEAD_DIM)[None, :]
        passed = tl.load(source[:, None] + rest[None, :], mask=mask_rest, other=0.0).to(tl.float32)
        store_number(target[:, None] + rest[None, :], passed, mask_rest, factor, IS_FP8)


@triton.jit(do_not_specialize=["layer"])
def rope_and_write_kernel(
    qkv_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    out_ptr: tl.tensor,
    qkv_stride: tl.tensor,
    table_stride: tl.tensor,
    layer: tl.tensor,
    block_stride: tl.tensor,
    layer_stride: tl.tensor,
    value_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    k_factor: tl.tensor,
    v_factor: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_LENGTH: tl.constexpr,
    REST_LENGTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    IS_FP8: tl.constexpr,
) -> None:
    """HEADS heads of one token: programs of axis 1 first take the query heads, then the keys', then the values'."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    query_groups: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    kv_groups: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    qkv = qkv_ptr + token * qkv_stride
    cos_sin = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * table_stride
    if group < query_groups:
        head = (group * HEADS + tl.arange(0, HEADS)).to(tl.int64)
        out = out_ptr + (token * NUM_HEADS + head) * HEAD_DIM
        move_heads(
            qkv + head * HEAD_DIM, out, cos_sin, head < NUM_HEADS, 1.0,
            HEAD_DIM, HALF, HALF_LENGTH, REST_LENGTH, True, False,
        )  # fmt: skip
        return
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    place = cache_ptr + slot // BLOCK_SIZE * block_stride + layer.to(tl.int64) * layer_stride
    place += slot % BLOCK_SIZE * slot_stride
    if group < query_groups + kv_groups:
        head = ((group - query_groups) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
        move_heads(
            qkv + (NUM_HEADS + head) * HEAD_DIM, place + head * head_stride, cos_sin, head < NUM_KV_HEADS, k_factor,
            HEAD_DIM, HALF, HALF_LENGTH, REST_LENGTH, True, IS_FP8,
        )  # fmt: skip
    else:
        head = ((group - query_groups - kv_groups) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
        move_heads(
            qkv + (NUM_HEADS + NUM_KV_HEADS + head) * HEAD_DIM, place + value_stride + head * head_stride, cos_sin,
            head < NUM_KV_HEADS, v_factor, HEAD_DIM, HALF, HALF_LENGTH, REST_LENGTH, False, IS_FP8,
        )  # fmt: skip


def launch_rope_and_write(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    num_heads: int,
    factors: tuple[float, float],
) -> torch.Tensor:
    """As kernels.kv_cache_write.rope_and_write: last axes adjacent, positions and slots contiguous.

    `factors`: what keys and values are multiplied by where the cache is float8_e4m3fn.
    """
    num_tokens, num_kv_heads, head_dim = qkv.shape[0], kv_cache.shape[4], kv_cache.shape[5]
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    half = cos_sin.shape[1] // 2
    heads = min(max(1, TILE // next_power_of_2(head_dim)), next_power_of_2(max(num_heads, num_kv_heads)))
    num_groups = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    block_stride, layer_stride, value_stride, slot_stride, head_stride, _ = kv_cache.stride()
    launch(
        rope_and_write_kernel, (num_tokens, num_groups), qkv, cos_sin, positions, slot_mapping, kv_cache, out,
        qkv.stride(0), cos_sin.stride(0), layer, block_stride, layer_stride, value_stride, slot_stride, head_stride,
        *factors, NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, HALF=half,
        HALF_LENGTH=next_power_of_2(half), REST_LENGTH=next_power_of_2(max(1, head_dim - 2 * half)),
        BLOCK_SIZE=kv_cache.shape[3], HEADS=heads, IS_FP8=kv_cache.dtype is FP8, num_warps=4,
    )  # fmt: skip
    return out


def _case(
    heads: tuple[int, int, int], dtype: torch.dtype, cache_dtype: torch.dtype | None = None, rotary_dim: int = 0
) -> None:
    """A step of 64 tokens of a model with these query heads, KV heads and head size."""
    num_heads, num_kv_heads, head_dim = heads
    launch_rope_and_write(
        meta((64, (num_heads + 2 * num_kv_heads) * head_dim), dtype=dtype),
        meta((8192, rotary_dim or head_dim), dtype=torch.float32),
        meta((64,), dtype=torch.int64),
        meta((64,), dtype=torch.int64),
        meta((1000, 32, 2, 16, num_kv_heads, head_dim), dtype=cache_dtype or dtype),
        5,
        num_heads,
        (1.0, 1.0),
    )


CASES: Final = (
    Case("rope_and_write 32/8 x 128 bf16", lambda: _case((32, 8, 128), torch.bfloat16)),
    Case("rope_and_write 9/3 x 64 fp32", lambda: _case((9, 3, 64), torch.float32)),
    Case("rope_and_write 32/32 x 80 fp16, 32 rotated", lambda: _case((32, 32, 80), torch.float16, rotary_dim=32)),
    Case(
        "rope_and_write 32/8 x 128 bf16, e4m3 cache",
        lambda: _case((32, 8, 128), torch.bfloat16, FP8),
        targets=FP8_TARGETS,
    ),
)
