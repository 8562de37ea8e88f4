"""Launches of the attention that `make kernels-aot` compiles: models' shapes, through the product's own launches."""

from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from kernels.attention_inputs import FP8, PLAIN, AttentionMetadata, AttentionOptions
from kernels.gpu.case import TARGETS, Case, meta
from kernels.gpu.paged_attention import attend_with_triton

_NUM_SEQS: Final = 64
_NUM_LAYERS: Final = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's attention, and the targets that it is compiled for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    options: AttentionOptions = PLAIN
    targets: tuple[int, ...] = TARGETS


def _attend(shape: Shape, query_len: int, context_len: int, *, is_deterministic: bool = True) -> None:
    num_blocks = -(-context_len // shape.block_size)
    # A slice of the fused q, k and v, as the model's layers hand it over.
    width = shape.num_heads + 2 * shape.num_kv_heads
    fused = meta(_NUM_SEQS * query_len, width, shape.head_dim, dtype=shape.dtype)
    cache_shape = (num_blocks, _NUM_LAYERS, 2, shape.block_size, shape.num_kv_heads, shape.head_dim)
    batch = AttentionMetadata(
        meta(_NUM_SEQS, num_blocks, dtype=torch.int32),
        meta(_NUM_SEQS + 1, dtype=torch.int32),
        meta(_NUM_SEQS, dtype=torch.int32),
        query_len,
        context_len,
        is_deterministic,
    )
    query = fused[:, : shape.num_heads]
    out = meta(*query.shape, dtype=shape.dtype)
    cache = meta(*cache_shape, dtype=shape.cache_dtype or shape.dtype)
    attend_with_triton(query, cache, 0, batch, shape.head_dim**-0.5, shape.options, out)


def _heads(num_heads: int) -> torch.Tensor:
    return meta(num_heads, dtype=torch.float32)


# Sizes change before and from Hopper on. 89 has the least shared memory, 80 spills first, 90 and 100 have matrix
# instructions of their own. Each takes about a second to compile for one target, so what is rare gets one or two.
SHAPES: Final = {
    "32/8 heads of 128": Shape(32, 8, 128),
    "32/8 heads of 128, fp16": Shape(32, 8, 128, dtype=torch.float16),
    "9/3 heads of 64": Shape(9, 3, 64, targets=(80, 90)),
    "28/4 heads of 128, blocks of 32": Shape(28, 4, 128, 32, targets=(90,)),
    "64/8 heads of 128, blocks of 8": Shape(64, 8, 128, 8, targets=(89,)),
    "71/1 heads of 64, blocks of 64": Shape(71, 1, 64, 64, targets=(80,)),
    "32/1 heads of 128": Shape(32, 1, 128, targets=(100,)),
    "32/32 heads of 80": Shape(32, 32, 80, targets=(80, 90)),
    "32/32 heads of 96, window": Shape(32, 32, 96, options=AttentionOptions(window=2047), targets=(80, 100)),
    "8/4 heads of 256, soft cap, window": Shape(
        8, 4, 256, options=AttentionOptions(window=4096, soft_cap=50.0), targets=(80, 90)
    ),
    "64/8 heads of 64, sinks, window": Shape(
        64, 8, 64, options=AttentionOptions(window=128, sinks=_heads(64)), targets=(89, 100)
    ),
    "32/32 heads of 128, ALiBi": Shape(
        32, 32, 128, options=AttentionOptions(alibi_slopes=_heads(32)), targets=(80, 90)
    ),
    "32/8 heads of 128, fp8": Shape(
        32, 8, 128, cache_dtype=FP8, options=AttentionOptions(k_scale=0.5, v_scale=0.5), targets=(89, 90)
    ),
    "9/3 heads of 64, fp16, fp8": Shape(9, 3, 64, 16, torch.float16, FP8, targets=(100,)),
    "8/4 heads of 256, fp8": Shape(8, 4, 256, cache_dtype=FP8, targets=(89,)),
    "9/3 heads of 64, fp32": Shape(9, 3, 64, dtype=torch.float32, targets=(90,)),
    "40/40 heads of 128, fp32": Shape(40, 40, 128, dtype=torch.float32, targets=(80,)),
    "8/4 heads of 256, fp32": Shape(8, 4, 256, dtype=torch.float32, targets=(89,)),
}


def _cases() -> list[Case]:
    """Decodes over several splits; prefills over one, which launch the decode without a merge as well."""
    cases = []
    for name, shape in SHAPES.items():
        # Products of float32 are made by the ordinary units: the matrix units would round to TF32.
        has_matrix_units = shape.dtype is not torch.float32
        for kind, query_len, context_len in (("decode", 1, 4096), ("prefill", 512, 512)):
            run = partial(_attend, shape, query_len, context_len)
            cases.append(Case(f"{kind} {name}", run, has_matrix_units, shape.targets))
    for name, targets in (
        ("9/3 heads of 64", (80,)),
        ("32/8 heads of 128", (89, 100)),
        ("8/4 heads of 256, soft cap, window", (90,)),
    ):
        run = partial(_attend, SHAPES[name], 4, 4096, is_deterministic=False)
        cases.append(Case(f"short prefill {name}", run, is_decode=True, targets=targets))
    return cases


CASES: Final = _cases()
