"""What a call of the attention gets beside its tensors, and the checks of all of it."""

import math
from dataclasses import dataclass
from typing import Final

import torch

from kernels.checks import INTEGERS, check_devices, check_dtypes
from kernels.errors import KernelInputError

# Of a cache whose keys and values are kept in 8 bits: 4 of exponent, 3 of mantissa, no infinities, at most 448.
FP8: Final = torch.float8_e4m3fn
# What queries of a cache in FP8 may be.
_FP8_QUERIES: Final = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """What the attention of one step needs to know of its batch.

    block_tables     int32 [num_seqs, max_blocks]; rows may be slices of a wider table (stride > max_blocks), and what
                     stands past a sequence's last block is never read
    query_starts     int32 [num_seqs + 1], ascending from 0: first query row of each sequence
    context_lens     int32 [num_seqs]: keys of each sequence, this step's included
    max_query_len    no sequence has more query rows
    max_context_len  no sequence has more keys. Both bounds may be larger than what is there, up to what the table
                     holds: launches on CUDA are sized by them alone, so that a captured graph serves any lengths below

    The three tensors may be int64, too. What stands in them is on the device, and to check it would be to wait for it.
    So a length that breaks its bound does no harm: a sequence of more keys than max_context_len is computed all the
    same (on CUDA its last split is longer: slower, and added up in another order), and keys past the end of the table
    don't exist. Where max_query_len is 1 or less, more query rows than sequences are refused; rows of a sequence of
    several beside one of none, of which shapes tell nothing, are NaN on CUDA, which no sampler takes for a token.

    is_deterministic tiles and splits are sized by the model alone, so that a row has the same bits in any batch, where
                     the kernel on CUDA could else size them by the batch. The compiled kernel on the CPU always does
    """

    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    max_query_len: int
    max_context_len: int
    is_deterministic: bool = True


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What some models want of their attention. Query row at position p, its head h, key j of value v_j:

        x_j = scale * k_scale * q·k_j
        x_j = soft_cap * tanh(x_j / soft_cap)               with a soft cap (Gemma 2)
        x_j = x_j + alibi_slopes[h] * (j - p)               with ALiBi (Press et al., arXiv 2108.12409)
        out = v_scale * Σ exp(x_j) v_j / (Σ exp(x_j) + exp(sinks[h]))     over j in (p - window, p]

    window        keys that a row sees, its own included; None: all
    soft_cap      above 0; None: no cap
    sinks         [num_heads]: a logit that takes weight and gives no value (GPT-OSS); None: none
    alibi_slopes  [num_heads]; None: none
    k_scale, v_scale  what the cache's numbers are multiplied by, for a cache in FP8; 0 is allowed: all were 0

    Raises KernelInputError for a number that is out of range or a tensor that has no shape of one dimension.
    """

    window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise KernelInputError(f"window is {self.window}: a row sees at least its own key, so 1 or more, or None")
        if self.soft_cap is not None and not 0 < self.soft_cap < math.inf:
            raise KernelInputError(f"soft_cap is {self.soft_cap}: it must be above 0 and finite, or None")
        for name in ("k_scale", "v_scale"):
            if not 0 <= getattr(self, name) < math.inf:
                raise KernelInputError(f"{name} is {getattr(self, name)}: it must be finite and not below 0")
        for name in ("sinks", "alibi_slopes"):
            tensor = getattr(self, name)
            if tensor is not None and (tensor.ndim != 1 or not tensor.is_floating_point()):
                raise KernelInputError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}: it must be floats [num_heads]")

    @property
    def is_plain(self) -> bool:
        """True where nothing is asked for but softmax(scale * q kᵀ) v."""
        return not self.names

    @property
    def names(self) -> tuple[str, ...]:
        """The options that are asked for, in the words of the fields."""
        asked = tuple(
            name for name in ("window", "soft_cap", "sinks", "alibi_slopes") if getattr(self, name) is not None
        )
        return asked + tuple(name for name in ("k_scale", "v_scale") if getattr(self, name) != 1.0)


PLAIN: Final = AttentionOptions()


def check(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    meta: AttentionMetadata,
    options: AttentionOptions,
    out: torch.Tensor | None,
) -> None:
    """Raise KernelInputError unless these belong together. Looks at shapes and dtypes alone, never at contents."""
    check_devices(
        "query",
        query,
        kv_cache=kv_cache,
        block_tables=meta.block_tables,
        query_starts=meta.query_starts,
        context_lens=meta.context_lens,
        out=out,
        sinks=options.sinks,
        alibi_slopes=options.alibi_slopes,
    )
    _check_tensors(query, kv_cache, layer, out)
    _check_batch(query, kv_cache, meta)
    for name in ("sinks", "alibi_slopes"):
        tensor = getattr(options, name)
        if tensor is not None and tensor.shape[0] != query.shape[1]:
            raise KernelInputError(f"{name} has {tensor.shape[0]} entries, the queries {query.shape[1]} heads")


def _check_tensors(query: torch.Tensor, kv_cache: torch.Tensor, layer: int, out: torch.Tensor | None) -> None:
    is_one_dtype = query.dtype == kv_cache.dtype or (kv_cache.dtype is FP8 and query.dtype in _FP8_QUERIES)
    has_axes = query.ndim == 3 and kv_cache.ndim == 6
    if not (has_axes and query.shape[2] == kv_cache.shape[5] and kv_cache.shape[2] == 2 and is_one_dtype):
        raise KernelInputError(
            f"query is {query.dtype} {tuple(query.shape)}, kv_cache {kv_cache.dtype} {tuple(kv_cache.shape)};"
            " they must be [num_tokens, num_heads, head_dim] and"
            " [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim] of one dtype, or the cache float8_e4m3fn"
        )
    if query.shape[1] % kv_cache.shape[4]:
        raise KernelInputError(f"{query.shape[1]} query heads are no multiple of {kv_cache.shape[4]} KV heads")
    if not 0 <= layer < kv_cache.shape[1]:
        raise KernelInputError(f"layer is {layer}, and the cache has layers 0 to {kv_cache.shape[1] - 1}")
    if out is not None and (out.shape != query.shape or out.dtype != query.dtype):
        raise KernelInputError(
            f"out is {out.dtype} {tuple(out.shape)}; it must be like query, {query.dtype} {tuple(query.shape)}"
        )


def _check_batch(query: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata) -> None:
    tables, starts, lens = meta.block_tables, meta.query_starts, meta.context_lens
    check_dtypes(INTEGERS, block_tables=tables, query_starts=starts, context_lens=lens)
    num_seqs = lens.numel()
    if lens.ndim != 1 or tables.ndim != 2 or tables.shape[0] != num_seqs or starts.shape != (num_seqs + 1,):
        raise KernelInputError(
            f"context_lens are {tuple(lens.shape)}, block_tables {tuple(tables.shape)} and query_starts"
            f" {tuple(starts.shape)}; they must be [num_seqs], [num_seqs, max_blocks] and [num_seqs + 1]"
        )
    if meta.max_query_len <= 1 and query.shape[0] > num_seqs:
        raise KernelInputError(
            f"max_query_len is {meta.max_query_len}, but {num_seqs} sequences have {query.shape[0]} query rows"
        )
    capacity = meta.block_tables.shape[1] * kv_cache.shape[3]
    if meta.max_context_len > capacity:
        raise KernelInputError(
            f"max_context_len is {meta.max_context_len}, but block_tables {tuple(meta.block_tables.shape)}"
            f" of blocks of {kv_cache.shape[3]} hold {capacity} keys a sequence"
        )
