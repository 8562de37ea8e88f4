"""What tests of the Triton attention share: the device, calls that may not fall back, and the twin's answer.

Needs torch, triton, numpy and pytest alone, so that a bare GPU machine can run them.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Final

import pytest
import torch

from kernels import reference
from kernels.attention_inputs import PLAIN, AttentionOptions
from kernels.dispatch import IS_INTERPRETED, implementation
from kernels.paged_attention import paged_attention
from tests.kernel.batches import Batch, ragged_batch
from tests.kernel.promises import IS_TRITON_PROMISED

HAS_CUDA: Final = torch.cuda.is_available()
DEVICE: Final = "cuda" if HAS_CUDA else "cpu"
needs_triton: Final = pytest.mark.skipif(
    not IS_TRITON_PROMISED and (find_spec("triton") is None or not (HAS_CUDA or IS_INTERPRETED)),
    reason="needs triton, and a CUDA device or TRITON_INTERPRET=1 from the start",
)
# Relative norms of the error. The interpreter cuts off where it makes bfloat16 of float32, a GPU rounds.
TOLERANCE: Final = {
    torch.float32: 2e-6,
    torch.float16: 5e-4,
    torch.bfloat16: 4e-3 if HAS_CUDA else 8e-3,
}
# A decode, a chunk with context, a fresh prompt, a prompt of one token, one without queries, one without keys.
MIXED: Final = [(1, 40), (21, 50), (17, 17), (1, 1), (0, 30), (2, 0), (1, 33)]

make_batch: Final = partial(ragged_batch, device=DEVICE)


@pytest.fixture
def triton_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attention is Triton's, and a call that would fall back fails."""

    def refuse(*_: object) -> None:
        raise AssertionError("the Triton kernel did not take this call")

    monkeypatch.setattr("kernels.paged_attention.attend_with_torch", refuse)
    with implementation("attention=triton"):
        yield


def attend(batch: Batch, options: AttentionOptions = PLAIN, layer: int = 1, scale: float = 0.125) -> torch.Tensor:
    """The result, on the CPU."""
    return paged_attention(batch.query, batch.kv_cache, layer, batch.meta, scale, options=options).cpu()


def expected(batch: Batch, options: AttentionOptions = PLAIN, layer: int = 1, scale: float = 0.125) -> torch.Tensor:
    """The twin's result, on the CPU."""
    meta = replace(
        batch.meta,
        block_tables=batch.meta.block_tables.cpu(),
        query_starts=batch.meta.query_starts.cpu(),
        context_lens=batch.meta.context_lens.cpu(),
    )
    sinks, slopes = (None if x is None else x.cpu() for x in (options.sinks, options.alibi_slopes))
    options = replace(options, sinks=sinks, alibi_slopes=slopes)
    return reference.paged_attention(batch.query.cpu(), batch.kv_cache.cpu(), layer, meta, scale, options)
