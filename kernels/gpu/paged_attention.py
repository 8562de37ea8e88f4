"""Launches of the attention kernels: which of them a batch takes, and with what sizes.

A batch with one query row a sequence takes the split kernel and its merge. Any other one takes two launches over the
same batch: the prefill kernel passes over sequences of one row, the split kernel over all others. So a decode is split
beside a prompt as well as without one, and has the same bits where the split is fixed; a kernel with both in it would
pipeline neither.
Nothing here depends on what stands in a tensor: bounds come from shapes and the metadata's two numbers.
"""

from typing import Any, Final

import torch
import triton

from kernels.attention_inputs import AttentionMetadata, AttentionOptions
from kernels.dispatch import TRITON_DTYPES, capability_of_cuda
from kernels.gpu.attention_sizes import decode_sizes, padded_head_dim, prefill_sizes, split_len
from kernels.gpu.attention_tile import LOG2_E
from kernels.gpu.common import launch, next_power_of_2, num_sms
from kernels.gpu.decode_attention import decode_kernel, merge_kernel
from kernels.gpu.prefill_attention import prefill_kernel

MAX_HEAD_DIM: Final = 256
# Splits that the merge takes at a time. Which ones come together depends on their place alone.
_MERGED_SPLITS: Final = 16
# Programs that a grid may have on its second and third axis.
_MAX_GRID: Final = 65535
# All that a thread can have. Left to itself, the assembler rather spills some bytes to fit one program more.
_MAX_REGISTERS: Final = 255
# Where a scale of the cache is 0: a factor that -inf keeps its sign under, and that no score shows beside.
_LEAST_SCALE: Final = 1e-30


def capability(device: torch.device) -> int:
    """10 * major + minor of the device, or of the target that kernels are being compiled for."""
    if device.type == "cuda":
        return capability_of_cuda(device)
    if device.type == "meta":
        return int(triton.runtime.driver.active.get_current_target().arch)
    return 90


def why_not_triton(
    query: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, scale: float, out: torch.Tensor
) -> str | None:
    """What the kernels lack for this call, which torch's operators have; None where they compute it."""
    num_heads, head_dim = query.shape[1:]
    if head_dim > MAX_HEAD_DIM:
        return f"the head size {head_dim} is above {MAX_HEAD_DIM}"
    if query.dtype not in TRITON_DTYPES:
        return f"{query.dtype} has no kernel on {query.device.type}"
    if not scale > 0:
        return f"the scale {scale} is not above 0"
    num_splits = -(-meta.max_context_len // decode_split(query, kv_cache, meta))
    if max(num_heads, num_splits) > _MAX_GRID:
        return f"{num_heads} heads and {num_splits} splits of the keys are more than a grid of programs has"
    return _why_not_read(query, kv_cache, meta, out)


def _why_not_read(
    query: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, out: torch.Tensor
) -> str | None:
    batch = (meta.block_tables, meta.query_starts, meta.context_lens)
    if not query.stride(2) == kv_cache.stride(5) == out.stride(2) == 1:
        return "the elements of a head are not adjacent in memory"
    if not all(tensor.stride(-1) == 1 for tensor in batch):
        return "the entries of the metadata are not adjacent in memory"
    return None


def decode_split(query: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata) -> int:
    """Keys of one split of this batch's decodes."""
    num_programs = meta.context_lens.shape[0] * kv_cache.shape[4]
    sms = num_sms(query.device)
    return split_len(num_programs, meta.max_context_len, sms, is_deterministic=meta.is_deterministic)


def attend_with_triton(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    meta: AttentionMetadata,
    scale: float,
    options: AttentionOptions,
    out: torch.Tensor,
) -> None:
    """As paged_attention, into `out`, for calls that `why_not_triton` has nothing against. Waits for nothing."""
    if query.shape[0] == 0:
        return
    cache = kv_cache.select(1, layer)
    factor = max(scale * options.k_scale, _LEAST_SCALE) * LOG2_E.value
    if meta.max_query_len > 1:
        _prefill(query, cache, meta, factor, options, out)
    _decode(query, cache, meta, factor, options, out)


def _numbers(
    query: torch.Tensor,
    cache: torch.Tensor,
    meta: AttentionMetadata,
    factor: float,
    options: AttentionOptions,
    out: torch.Tensor,
) -> tuple[Any, ...]:
    """What both kernels take after their tensors: bounds, numbers and strides, in their order."""
    block_stride, value_stride, slot_stride, head_stride, _ = cache.stride()
    return (
        *_key_bounds(cache, meta, options), factor, options.soft_cap or 1.0, float(options.v_scale),
        query.stride(0), query.stride(1), out.stride(0), out.stride(1), meta.block_tables.stride(0),
        block_stride, value_stride, slot_stride, head_stride,
    )  # fmt: skip


def _key_bounds(cache: torch.Tensor, meta: AttentionMetadata, options: AttentionOptions) -> tuple[int, int]:
    """(keys that a row of the table has room for, window). A longer window than that hides as little, and might make
    differences with it pass what 32 bits hold."""
    max_keys = meta.block_tables.shape[1] * cache.shape[2]
    return max_keys, min(options.window or 0, max_keys)


def _prefill(
    query: torch.Tensor,
    cache: torch.Tensor,
    meta: AttentionMetadata,
    factor: float,
    options: AttentionOptions,
    out: torch.Tensor,
) -> None:
    num_tokens, num_heads, head_dim = query.shape
    num_seqs, num_kv_heads = meta.context_lens.shape[0], cache.shape[3]
    group = num_heads // num_kv_heads
    max_query_len = None if meta.is_deterministic else meta.max_query_len
    sizes = prefill_sizes(head_dim, group, query.element_size(), capability(query.device), max_query_len)
    heads = min(group, sizes.block_m)
    launch(
        prefill_kernel,
        (num_tokens // (sizes.block_m // heads) + num_seqs, num_kv_heads * -(-group // heads)),
        query, cache, meta.block_tables, meta.query_starts, meta.context_lens, out, options.sinks,
        options.alibi_slopes, num_seqs,
        *_numbers(query, cache, meta, factor, options, out),
        GROUP=group, HEADS=heads, BLOCK_SIZE=cache.shape[2], HEAD_DIM=head_dim, D_PAD=padded_head_dim(head_dim),
        BLOCK_M=sizes.block_m, TILE=sizes.tile, HAS_WINDOW=options.window is not None,
        HAS_CAP=options.soft_cap is not None, num_warps=sizes.num_warps, num_stages=sizes.num_stages,
        maxnreg=_MAX_REGISTERS,
    )  # fmt: skip


def _decode(
    query: torch.Tensor,
    cache: torch.Tensor,
    meta: AttentionMetadata,
    factor: float,
    options: AttentionOptions,
    out: torch.Tensor,
) -> None:
    num_heads, head_dim = query.shape[1:]
    num_seqs, num_kv_heads = meta.context_lens.shape[0], cache.shape[3]
    group, d_pad = num_heads // num_kv_heads, padded_head_dim(head_dim)
    has_window = options.window is not None
    sizes = decode_sizes(head_dim, group, query.element_size())
    heads = min(group, sizes.block_m)
    split = decode_split(query, cache.unsqueeze(1), meta)
    num_splits = max(1, -(-meta.max_context_len // split))
    is_split = num_splits > 1
    target, stats = out, out
    if is_split:
        target = torch.empty((num_seqs, num_heads, num_splits, head_dim), dtype=torch.float32, device=query.device)
        stats = torch.empty((num_seqs, num_heads, num_splits, 2), dtype=torch.float32, device=query.device)
    launch(
        decode_kernel,
        (num_seqs, num_kv_heads * -(-group // heads), num_splits),
        query, cache, meta.block_tables, meta.query_starts, meta.context_lens, target, stats, options.sinks,
        options.alibi_slopes, num_splits, split, meta.max_query_len,
        *_numbers(query, cache, meta, factor, options, out),
        GROUP=group, HEADS=heads, ROWS=next_power_of_2(heads), BLOCK_SIZE=cache.shape[2], HEAD_DIM=head_dim,
        D_PAD=d_pad, TILE=sizes.tile, IS_SPLIT=is_split, HAS_WINDOW=has_window, HAS_CAP=options.soft_cap is not None,
        num_warps=sizes.num_warps, num_stages=sizes.num_stages,
    )  # fmt: skip
    if is_split:
        launch(
            merge_kernel,
            (num_seqs, num_heads),
            target, stats, meta.query_starts, meta.context_lens, out, options.sinks, num_splits, split,
            meta.max_query_len, *_key_bounds(cache, meta, options), float(options.v_scale), out.stride(0),
            out.stride(1), HEAD_DIM=head_dim, D_PAD=d_pad, CHUNK=_MERGED_SPLITS, HAS_WINDOW=has_window, num_warps=4,
            num_stages=1,
        )  # fmt: skip
