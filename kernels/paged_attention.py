"""Causal attention of a ragged batch over the paged KV cache (Kwon et al., arXiv 2309.06180).

query rows    |--- sequence 0 ---|- sequence 1 -|...     sequence s owns rows query_starts[s] .. query_starts[s + 1]
keys of s     |<------------- context_lens[s] ------------->|
              |<-- computed before -->|<-- this step's ---->|     its last query row sees all keys, the one before
                                                                  one fewer, and so on
"""

from dataclasses import dataclass
from functools import cache

import torch

from kernels.compiled import LANES, float_bits, launch, product_address, scratch
from kernels.dispatch import use_compiled
from kernels.errors import KernelInputError


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """What the attention of one step needs to know of its batch.

    block_tables    int32 [num_seqs, max_blocks]; rows may be slices of a wider table (stride > max_blocks), and what
                    stands past a sequence's last block is never read
    query_starts    int32 [num_seqs + 1], ascending from 0: first query row of each sequence
    context_lens    int32 [num_seqs]: keys of each sequence, this step's included
    max_query_len   most query rows of one sequence
    max_context_len most keys of one sequence
    """

    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    max_query_len: int
    max_context_len: int


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    meta: AttentionMetadata,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale * q kᵀ) v for every query row, over the keys of its own sequence up to its own position.

    query [num_tokens, num_heads, head_dim]; kv_cache [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim] of
    the same dtype, this step's keys and values already written. num_heads is a multiple of num_kv_heads, and
    consecutive query heads share a KV head. Returns [num_tokens, num_heads, head_dim], written to `out` if given.
    A sequence of no keys gives rows of zeros. A row's result does not depend on the other sequences in the batch.
    """
    _check(query, kv_cache, meta)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    if _can_launch(query, kv_cache, meta, out):
        _launch(query, kv_cache, layer, meta, scale, out)
        return out
    _attend_with_torch(query, kv_cache, layer, meta, scale, out)
    return out


def _attend_with_torch(
    query: torch.Tensor, kv_cache: torch.Tensor, layer: int, meta: AttentionMetadata, scale: float, out: torch.Tensor
) -> None:
    """One sequence after the other: gather its keys and values, then torch's own fused attention."""
    block_size, num_kv_heads, head_dim = kv_cache.shape[3:]
    starts, lens = meta.query_starts.tolist(), meta.context_lens.tolist()
    for seq, context_len in enumerate(lens):
        first, last = starts[seq], starts[seq + 1]
        query_len = last - first
        if query_len == 0:
            continue
        if context_len == 0:
            out[first:last] = 0
            continue
        blocks = meta.block_tables[seq, : -(-context_len // block_size)].long()
        keys, values = (kv_cache[blocks, layer, kv].flatten(0, 1)[:context_len].transpose(0, 1) for kv in (0, 1))
        # The group of query heads that shares a KV head becomes extra query rows, [num_kv_heads, G * query_len, D]:
        # one pass over the keys serves the whole group.
        q = query[first:last].reshape(query_len, num_kv_heads, -1, head_dim)
        q = q.permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
        mask = None
        if query_len > 1:
            last_key = torch.arange(context_len - query_len, context_len, device=query.device)
            mask = torch.arange(context_len, device=query.device) <= last_key.unsqueeze(1)
            mask = mask.repeat(q.shape[1] // query_len, 1)
        rows = torch.nn.functional.scaled_dot_product_attention(
            q.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), attn_mask=mask, scale=scale
        )
        rows = rows.view(num_kv_heads, -1, query_len, head_dim).permute(2, 0, 1, 3)
        out[first:last] = rows.reshape(query_len, -1, head_dim)


def _check(query: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata) -> None:
    num_seqs = meta.context_lens.shape[0]
    if query.ndim != 3 or kv_cache.ndim != 6 or query.shape[2] != kv_cache.shape[5] or query.dtype != kv_cache.dtype:
        raise KernelInputError(
            f"query is {query.dtype} {tuple(query.shape)}, kv_cache {kv_cache.dtype} {tuple(kv_cache.shape)};"
            " they must be [num_tokens, num_heads, head_dim] and"
            " [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim] of one dtype"
        )
    if query.shape[1] % kv_cache.shape[4]:
        raise KernelInputError(f"{query.shape[1]} query heads are no multiple of {kv_cache.shape[4]} KV heads")
    if meta.block_tables.shape[0] != num_seqs or meta.query_starts.shape[0] != num_seqs + 1:
        raise KernelInputError(
            f"{num_seqs} context lengths, but block_tables {tuple(meta.block_tables.shape)}"
            f" and query_starts {tuple(meta.query_starts.shape)}"
        )


def _can_launch(query: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, out: torch.Tensor) -> bool:
    """What the compiled kernel relies on: heads adjacent, whole vectors, int32 metadata with adjacent entries."""
    head_dim = query.shape[2]
    adjacent = (head_dim, 1)
    return (
        use_compiled("attention", query)
        and head_dim % LANES == 0
        and kv_cache.stride()[4:] == query.stride()[1:] == out.stride()[1:] == adjacent
        and meta.block_tables.dtype is meta.query_starts.dtype is meta.context_lens.dtype is torch.int32
        and meta.block_tables.stride(1) == meta.query_starts.stride(0) == meta.context_lens.stride(0) == 1
    )


@cache
def _scratch_bytes(head_dim: int, group: int) -> int:
    from kernels.cpu.attention import MAX_ROWS, scratch_bytes

    return scratch_bytes(head_dim, max(group, MAX_ROWS))


def _launch(
    query: torch.Tensor, kv_cache: torch.Tensor, layer: int, meta: AttentionMetadata, scale: float, out: torch.Tensor
) -> None:
    num_kv_heads, head_dim = kv_cache.shape[4], kv_cache.shape[5]
    group = query.shape[1] // num_kv_heads
    # A row of the table is read up to its last needed entry only, so its width does not matter here.
    block_stride, layer_stride, value_stride, slot_stride = (4 * n for n in kv_cache.stride()[:4])
    num_threads = torch.get_num_threads()
    thread_bytes = _scratch_bytes(head_dim, group)
    launch(
        "attention",
        (
            query.data_ptr(), query.stride(0) * 4, out.data_ptr(), out.stride(0) * 4,
            kv_cache.data_ptr() + layer * layer_stride, block_stride, value_stride, slot_stride, kv_cache.shape[3],
            meta.block_tables.data_ptr(), meta.block_tables.stride(0) * 4, meta.query_starts.data_ptr(),
            meta.context_lens.data_ptr(), meta.context_lens.shape[0], num_kv_heads, group, head_dim, float_bits(scale),
            scratch(num_threads * thread_bytes).data_ptr(), thread_bytes, product_address(),
        ),
        num_threads,
    )  # fmt: skip
