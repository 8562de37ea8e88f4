"""Causal attention of a ragged batch over the paged KV cache (Kwon et al., arXiv 2309.06180).

query rows    |--- sequence 0 ---|- sequence 1 -|...     sequence s owns rows query_starts[s] .. query_starts[s + 1]
keys of s     |<------------- context_lens[s] ------------->|
              |<-- computed before -->|<-- this step's ---->|     its last query row sees all keys, the one before
                                                                  one fewer, and so on
"""

from dataclasses import dataclass

import torch


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
    out = torch.empty_like(query) if out is None else out
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
