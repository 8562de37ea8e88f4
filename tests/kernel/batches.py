"""Ragged batches over a paged cache in which everything that must not be read is NaN, and tensors with red zones."""

from dataclasses import dataclass

import torch

from kernels.paged_attention import AttentionMetadata

GARBAGE_IDS = (-1, -7, 2**31 - 1)
RED_ZONE = 64  # elements


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of one attention call."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    meta: AttentionMetadata


def ragged_batch(
    seqs: list[tuple[int, int]],
    *,
    num_heads: int = 9,
    num_kv_heads: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
    num_layers: int = 2,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Batch:
    """A batch of (query_len, context_len) sequences.

    Blocks are shuffled; block 0 and some others are nobody's. What no sequence owns and what is not yet written holds
    NaN, table entries past a sequence's blocks hold garbage, and the table and the queries are slices of wider tensors.
    The cache has the dtype of the queries unless another is named.
    """
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-context_len // block_size) for _, context_len in seqs]
    num_blocks = sum(needed) + 4
    free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    kv_cache = torch.full((num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim), torch.nan)
    width = max(needed, default=0) + 3
    tables = torch.empty((len(seqs), width + 5), dtype=torch.int32)
    for column in range(width + 5):
        tables[:, column] = GARBAGE_IDS[column % len(GARBAGE_IDS)]
    for seq, (_, context_len) in enumerate(seqs):
        for index in range(needed[seq]):
            block = free.pop()
            tables[seq, index] = block
            num_written = min(block_size, context_len - index * block_size)
            shape = (num_layers, 2, num_written, num_kv_heads, head_dim)
            kv_cache[block, :, :, :num_written] = torch.randn(shape, generator=generator)
    query_lens = torch.tensor([0] + [query_len for query_len, _ in seqs])
    num_tokens = int(query_lens.sum())
    fused = torch.randn((num_tokens, num_heads + 2, head_dim), generator=generator).to(dtype)
    meta = AttentionMetadata(
        block_tables=tables.to(device)[:, :width],
        query_starts=query_lens.cumsum(0).int().to(device),
        context_lens=torch.tensor([context_len for _, context_len in seqs], dtype=torch.int32, device=device),
        max_query_len=int(query_lens.max()),
        max_context_len=max((context_len for _, context_len in seqs), default=0),
    )
    return Batch(fused.to(device)[:, :num_heads], kv_cache.to(cache_dtype or dtype).to(device), meta)


def pick(batch: Batch, seq: int, first: int = 0, last: int | None = None) -> Batch:
    """One sequence of a batch alone, and of it the query rows first .. last - 1 as one chunk."""
    start, end = batch.meta.query_starts[seq : seq + 2].tolist()
    last = end - start if last is None else last
    context_len = int(batch.meta.context_lens[seq]) - (end - start - last)
    meta = AttentionMetadata(
        block_tables=batch.meta.block_tables[seq : seq + 1],
        query_starts=torch.tensor([0, last - first], dtype=torch.int32, device=batch.query.device),
        context_lens=torch.tensor([context_len], dtype=torch.int32, device=batch.query.device),
        max_query_len=last - first,
        max_context_len=context_len,
    )
    return Batch(batch.query[start + first : start + last], batch.kv_cache, meta)


def guarded(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """A contiguous tensor of NaN inside a larger one; the second result views the red zones around it."""
    count = torch.Size(shape).numel()
    memory = torch.full((count + 2 * RED_ZONE,), torch.nan, dtype=dtype)
    return memory[RED_ZONE : RED_ZONE + count].view(shape), torch.cat((memory[:RED_ZONE], memory[-RED_ZONE:]))


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference, relative to that of the expected values."""
    assert actual.shape == expected.shape
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-30))
