"""What must not reach a kernel: tensors of another device or dtype, each refused by the name of its argument."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
import torch

from kernels.activation import silu_and_mul
from kernels.attention_inputs import AttentionMetadata, AttentionOptions
from kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks
from kernels.checksum import block_checksums
from kernels.errors import KernelInputError
from kernels.int4_weights import INT4
from kernels.kv_cache_write import rope_and_write, write_kv
from kernels.linear import PackedLinear
from kernels.paged_attention import paged_attention
from kernels.penalties import Penalties, apply_penalties
from kernels.quantized_linear import QuantizedLinear
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.sampling import sample
from kernels.top_logprobs import top_logprobs

Tensors = dict[str, torch.Tensor]
Call = tuple[Callable[..., Any], Tensors]


def ints(*numbers: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype)


def attend(
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    sinks: torch.Tensor,
    alibi_slopes: torch.Tensor,
    **others: torch.Tensor,
) -> torch.Tensor:
    meta = AttentionMetadata(block_tables, query_starts, context_lens, 1, 5)
    return paged_attention(
        **others, layer=0, meta=meta, scale=0.1, options=AttentionOptions(sinks=sinks, alibi_slopes=alibi_slopes)
    )


def penalise(logits: torch.Tensor, **penalties: torch.Tensor) -> None:
    apply_penalties(logits, Penalties(**penalties))


def call_linear(
    kind: Callable[[torch.Tensor], PackedLinear | QuantizedLinear], x: torch.Tensor, weight: torch.Tensor, ids: Any
) -> None:
    layer = kind(weight)
    layer(x)
    layer.rows(ids)


def calls() -> dict[str, Call]:
    """Every public call of a kernel with all tensors that it takes; each would be served."""
    cache, x = torch.zeros(3, 1, 2, 8, 2, 16), torch.randn(2, 32)
    lens = {"block_tables": ints(1, 2).view(2, 1), "query_starts": ints(0, 1, 2), "context_lens": ints(3, 5)}
    query = {"query": torch.randn(2, 2, 16), "kv_cache": cache, "out": torch.zeros(2, 2, 16)}
    heads = {"sinks": torch.zeros(2), "alibi_slopes": torch.zeros(2)}
    written = {"slot_mapping": ints(4, -1), "kv_cache": cache}
    table = {"cos_sin": torch.ones(9, 16), "positions": ints(1, 2)}
    ids, staging = ints(1, 2), torch.zeros(2, 1, 2, 8, 2, 16)
    rows: Tensors = {name: torch.ones(2) for name in ("temperature", "top_p", "min_p")}
    rows |= {name: ints(1, 2) for name in ("top_k", "seeds", "positions")}
    penalties: Tensors = {name: torch.ones(2) for name in ("repetition", "frequency", "presence")}
    penalties |= {name: ints(0, 1) for name in ("sequences", "num_prompt", "num_tokens")}
    penalties["token_ids"] = torch.ones(2, 3, dtype=torch.int64)
    layer = {"x": x, "weight": torch.randn(16, 32), "ids": ids}
    return {
        "attention": (attend, lens | query | heads),
        "rope_and_write": (
            lambda **t: rope_and_write(**t, layer=0, num_heads=2, num_kv_heads=2),
            {"qkv": torch.randn(2, 96)} | table | written,
        ),
        "write_kv": (
            lambda **t: write_kv(**t, layer=0),
            {"keys": torch.zeros(2, 2, 16), "values": torch.zeros(2, 2, 16)} | written,
        ),
        "rms_norm": (lambda **t: rms_norm(**t, eps=1e-5), {"x": x, "weight": x[0]}),
        "add_rms_norm": (lambda **t: add_rms_norm(**t, eps=1e-5), {"x": x, "residual": x.clone(), "weight": x[0]}),
        "silu_and_mul": (silu_and_mul, {"gate_up": x}),
        "copy_blocks": (copy_blocks, {"kv_cache": cache, "src": ids, "dst": ids - 1}),
        "gather_blocks": (gather_blocks, {"kv_cache": cache, "ids": ids, "staging": staging}),
        "scatter_blocks": (scatter_blocks, {"kv_cache": cache, "ids": ids, "staging": staging}),
        "block_checksums": (block_checksums, {"blocks": cache}),
        "sample": (lambda **t: sample(**t, vocab_limit=32), {"logits": x} | rows),
        "top_logprobs": (lambda **t: top_logprobs(**t, k=2, vocab_limit=32), {"logits": x}),
        "apply_penalties": (penalise, {"logits": torch.randn(2, 32)} | penalties),
        "linear": (lambda **t: call_linear(PackedLinear, **t), layer),
        "int8_linear": (lambda **t: call_linear(QuantizedLinear, **t), layer),
        "int4_linear": (lambda **t: call_linear(partial(QuantizedLinear, form=INT4), **t), layer),
    }


CALLS: Final = calls()
# Whole numbers of other calls may be of any width: each is made int64.
WHOLE_NUMBERS: Final = (
    *(("attention", name) for name in ("block_tables", "query_starts", "context_lens")),
    *(("rope_and_write", name) for name in ("positions", "slot_mapping")),
    ("write_kv", "slot_mapping"),
    *(("copy_blocks", name) for name in ("src", "dst")),
    *((call, "ids") for call in ("gather_blocks", "scatter_blocks")),
    *(("apply_penalties", name) for name in ("token_ids", "sequences", "num_prompt", "num_tokens")),
)
# Those that are read as int32, too.
OF_TWO_WIDTHS: Final = ("block_tables", "query_starts", "context_lens", "positions")


@pytest.mark.parametrize("name", [name for name, (_, tensors) in CALLS.items() if len(tensors) > 1])
def test_a_tensor_on_another_device_is_refused_by_name(name: str) -> None:
    call, tensors = calls()[name]
    call(**tensors)
    for argument, tensor in tensors.items():
        with pytest.raises(KernelInputError, match=rf"\b{argument}\b.* must be on one device"):
            call(**{**tensors, argument: tensor.to("meta")})


@pytest.mark.parametrize(("name", "argument"), WHOLE_NUMBERS)
def test_numbers_of_another_dtype_are_refused_by_name(name: str, argument: str) -> None:
    """Ids, lengths and slots that are no whole numbers would be read as some; so would ones of half the width."""
    call, tensors = calls()[name]
    for dtype in (torch.float32, torch.int16 if argument in OF_TWO_WIDTHS else torch.int32):
        with pytest.raises(KernelInputError, match=rf"{argument} is {dtype}; it must be torch\.int"):
            call(**{**tensors, argument: tensors[argument].to(dtype)})


@pytest.mark.parametrize("name", ["sample", "top_logprobs"])
def test_logits_that_are_no_floats_are_refused(name: str) -> None:
    call, tensors = calls()[name]
    with pytest.raises(KernelInputError, match=r"logits are torch\.int64"):
        call(**{**tensors, "logits": tensors["logits"].long()})
