"""Causal attention of a ragged batch over the paged KV cache (Kwon et al., arXiv 2309.06180).

query rows    |--- sequence 0 ---|- sequence 1 -|...     sequence s owns rows query_starts[s] .. query_starts[s + 1]
keys of s     |<------------- context_lens[s] ------------->|
              |<-- computed before -->|<-- this step's ---->|     its last query row sees all keys, the one before
                                                                  one fewer, and so on
"""

from functools import cache
from typing import Final

import torch

from kernels.attention_inputs import FP8, PLAIN, AttentionMetadata, AttentionOptions, check
from kernels.attention_torch import attend_with_torch
from kernels.cache_dtype import check_cache_dtype
from kernels.compiled import LANES, float_bits, launch, product_address, scratch
from kernels.dispatch import selected, tell_fallback, use_compiled, use_triton

__all__ = ["FP8", "AttentionMetadata", "AttentionOptions", "paged_attention"]

# Keys and values of a tile that one work item of the compiled kernel has at most.
MAX_TILE_BYTES: Final = 128 << 10


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    meta: AttentionMetadata,
    scale: float,
    out: torch.Tensor | None = None,
    options: AttentionOptions = PLAIN,
) -> torch.Tensor:
    """softmax(scale * q kᵀ) v for every query row, over the keys of its own sequence up to its own position.

    query [num_tokens, num_heads, head_dim]; kv_cache [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim] of
    the same dtype, or float8_e4m3fn, this step's keys and values already written. num_heads is a multiple of
    num_kv_heads, and consecutive query heads share a KV head. `options` has what a model wants beside that: a window, a
    soft cap, sinks, ALiBi, scales. Returns [num_tokens, num_heads, head_dim], written to `out` if given.

    A sequence of no keys gives rows of zeros, and a row that stands before the first key, too. A row's result does not
    depend on the other sequences in the batch. On CUDA nothing waits for the device, where Triton's kernel computes the
    call. Raises KernelInputError for what doesn't belong together, and for what the device can't compute.
    """
    check(query, kv_cache, layer, meta, options, out)
    check_cache_dtype(kv_cache.dtype, query.device, ("attention",))
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    if use_triton("attention", query):
        from kernels.gpu.paged_attention import attend_with_triton, why_not_triton

        why = why_not_triton(query, kv_cache, meta, scale, out)
        if why is None:
            attend_with_triton(query, kv_cache, layer, meta, scale, options, out)
            return out
    else:
        why = _why_not_compiled(query, kv_cache, meta, options, out)
        if why is None:
            _launch(query, kv_cache, layer, meta, scale, options.window, out)
            return out
    if selected("attention") != "torch":
        tell_fallback("attention", why)
    attend_with_torch(query, kv_cache, layer, meta, scale, options, out)
    return out


def _why_not_compiled(
    query: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, options: AttentionOptions, out: torch.Tensor
) -> str | None:
    """What the compiled kernel lacks for this call: it makes products of whole vectors of float32, and masks keys."""
    head_dim = query.shape[2]
    if not use_compiled("attention", query):
        return f"{query.dtype} on {query.device.type} has no other kernel"
    if kv_cache.dtype is FP8:
        return f"the compiled kernel doesn't read {FP8}"
    if lacking := [name for name in options.names if name != "window"]:
        return f"the compiled kernel doesn't compute {', '.join(lacking)}"
    if head_dim % LANES:
        return f"the head size {head_dim} is no multiple of {LANES}"
    return _why_not_read(query, kv_cache, meta, out)


def _why_not_read(
    query: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, out: torch.Tensor
) -> str | None:
    """What the compiled kernel can't read in place: it relies on adjacent heads, and on int32 that are adjacent."""
    adjacent = (query.shape[2], 1)
    if not kv_cache.stride()[4:] == query.stride()[1:] == out.stride()[1:] == adjacent:
        return "the heads of query, kv_cache or out are not adjacent in memory"
    if not meta.block_tables.dtype is meta.query_starts.dtype is meta.context_lens.dtype is torch.int32:
        return "the metadata is not int32"
    if not meta.block_tables.stride(1) == meta.query_starts.stride(0) == meta.context_lens.stride(0) == 1:
        return "the entries of the metadata are not adjacent in memory"
    return None


@cache
def _scratch_bytes(head_dim: int, group: int) -> int:
    from kernels.cpu.attention import MAX_ROWS, scratch_bytes

    return scratch_bytes(head_dim, max(group, MAX_ROWS))


@cache
def _heads_at_once(head_dim: int, num_kv_heads: int, group: int) -> int:
    """How many KV heads of a decode one work item may take, so that memory is read in order.

    As many as its tile has rows for, and as leave this tile and the next one room in an L2 cache. Items are fewer then,
    so it pays only where there are several for each thread.
    """
    from kernels.cpu.attention import MAX_ROWS
    from kernels.cpu.attention_softmax import KEY_TILE

    tile_bytes = 2 * KEY_TILE * head_dim * 4
    return max(1, min(num_kv_heads, MAX_ROWS // group, MAX_TILE_BYTES // tile_bytes))


def _launch(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    meta: AttentionMetadata,
    scale: float,
    window: int | None,
    out: torch.Tensor,
) -> None:
    num_kv_heads, head_dim = kv_cache.shape[4], kv_cache.shape[5]
    group = query.shape[1] // num_kv_heads
    # A row of the table is read up to its last needed entry only, so its width does not matter here.
    block_stride, layer_stride, value_stride, slot_stride = (4 * n for n in kv_cache.stride()[:4])
    num_threads = torch.get_num_threads()
    thread_bytes = _scratch_bytes(head_dim, group)
    max_keys = meta.block_tables.shape[1] * kv_cache.shape[3]
    launch(
        "attention",
        (
            query.data_ptr(), query.stride(0) * 4, out.data_ptr(), out.stride(0) * 4,
            kv_cache.data_ptr() + layer * layer_stride, block_stride, value_stride, slot_stride, kv_cache.shape[3],
            meta.block_tables.data_ptr(), meta.block_tables.stride(0) * 4, meta.query_starts.data_ptr(),
            meta.context_lens.data_ptr(), meta.context_lens.shape[0], num_kv_heads, group, head_dim, float_bits(scale),
            scratch(num_threads * thread_bytes).data_ptr(), thread_bytes, product_address(),
            max_keys, max_keys if window is None else min(window, max_keys),
            _heads_at_once(head_dim, num_kv_heads, group) if meta.context_lens.shape[0] >= 4 * num_threads else 1,
        ),
        num_threads,
    )  # fmt: skip
