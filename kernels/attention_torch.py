"""Attention of torch's operators: every device, dtype and option, one sequence after the other."""

import torch

from kernels.attention_inputs import FP8, AttentionMetadata, AttentionOptions


def attend_with_torch(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    meta: AttentionMetadata,
    scale: float,
    options: AttentionOptions,
    out: torch.Tensor,
) -> None:
    """As paged_attention, into `out`. Reads the lengths on the host, so that a CUDA device is waited for."""
    block_size, num_kv_heads, head_dim = kv_cache.shape[3:]
    starts, lens = meta.query_starts.tolist(), meta.context_lens.tolist()
    is_plain = options.is_plain and kv_cache.dtype is query.dtype
    capacity = meta.block_tables.shape[1] * block_size
    for seq, length in enumerate(lens):
        context_len = min(length, capacity)
        first, last = starts[seq], starts[seq + 1]
        query_len = last - first
        if query_len == 0:
            continue
        if context_len == 0:
            out[first:last] = 0
            continue
        blocks = meta.block_tables[seq, : -(-context_len // block_size)].long()
        keys, values = (_gather(kv_cache, blocks, layer, kv, context_len) for kv in (0, 1))
        # The group of query heads that shares a KV head becomes extra query rows, [num_kv_heads, G * query_len, D]:
        # one pass over the keys serves the whole group.
        q = query[first:last].reshape(query_len, num_kv_heads, -1, head_dim)
        q = q.permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
        if is_plain:
            rows = _plain_rows(q, keys, values, query_len, scale)
        else:
            rows = _rows(q, keys, values, query_len, scale, options)
        rows = rows.view(num_kv_heads, -1, query_len, head_dim).permute(2, 0, 1, 3)
        out[first:last] = rows.reshape(query_len, -1, head_dim)


def _gather(kv_cache: torch.Tensor, blocks: torch.Tensor, layer: int, kv: int, context_len: int) -> torch.Tensor:
    """Keys or values of a sequence, [num_kv_heads, context_len, head_dim]."""
    # Torch doesn't index every dtype of 8 bits.
    cache = kv_cache.view(torch.uint8) if kv_cache.dtype is FP8 else kv_cache
    return cache[blocks, layer, kv].view(kv_cache.dtype).flatten(0, 1)[:context_len].transpose(0, 1)


def _plain_rows(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, query_len: int, scale: float
) -> torch.Tensor:
    """[num_kv_heads, G * query_len, head_dim] by torch's own fused attention."""
    context_len = keys.shape[1]
    mask = None
    if query_len > 1:
        last_key = torch.arange(context_len - query_len, context_len, device=q.device)
        mask = torch.arange(context_len, device=q.device) <= last_key.unsqueeze(1)
        mask = mask.repeat(q.shape[1] // query_len, 1)
    return torch.nn.functional.scaled_dot_product_attention(
        q.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), attn_mask=mask, scale=scale
    )


def _rows(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, query_len: int, scale: float, options: AttentionOptions
) -> torch.Tensor:
    """The same with options, step by step and in float32 (float64 stays)."""
    num_kv_heads, num_rows, _ = q.shape
    group, context_len = num_rows // query_len, keys.shape[1]
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    scores = q.to(wide) @ keys.to(wide).transpose(1, 2) * (scale * options.k_scale)
    scores = scores.view(num_kv_heads, group, query_len, context_len)
    if options.soft_cap is not None:
        scores = options.soft_cap * (scores / options.soft_cap).tanh()
    position = torch.arange(context_len - query_len, context_len, device=q.device).unsqueeze(1)
    distance = torch.arange(context_len, device=q.device) - position
    if options.alibi_slopes is not None:
        scores = scores + options.alibi_slopes.to(wide).view(num_kv_heads, group, 1, 1) * distance
    is_hidden = distance > 0
    if options.window is not None:
        is_hidden = is_hidden | (distance <= -options.window)
    scores = scores.masked_fill(is_hidden, -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.to(wide).view(num_kv_heads, group, 1, 1).expand(-1, -1, query_len, -1)
        scores = torch.cat((scores, sinks), dim=3)
    # A row before the first key has no key at all, and gives zeros.
    weights = torch.softmax(scores, dim=3)[..., :context_len].masked_fill(position < 0, 0)
    rows = weights.view(num_kv_heads, num_rows, context_len) @ values.to(wide) * options.v_scale
    return rows.to(q.dtype)
