"""Lengths on the device that break the bounds on the host: nothing is lost, and nothing is wrong in silence.

By Triton on CUDA, or by the interpreter.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.attention_inputs import AttentionOptions
from kernels.errors import KernelInputError
from tests.kernel.batches import Batch, error
from tests.kernel.triton_attention import TOLERANCE, attend, expected, make_batch, needs_triton, triton_alone

__all__ = ["triton_alone"]

pytestmark = [needs_triton, pytest.mark.usefixtures("triton_alone")]

FP32 = TOLERANCE[torch.float32]


def bounded(batch: Batch, **bounds: Any) -> Batch:
    return Batch(batch.query, batch.kv_cache, replace(batch.meta, **bounds))


@pytest.mark.parametrize("max_context_len", [0, 40, 512, 513])
@pytest.mark.parametrize("window", [None, 30, 700])
def test_keys_beyond_the_longest_context_are_not_lost(max_context_len: int, window: int | None) -> None:
    options = AttentionOptions(window=window)
    batch = make_batch([(1, 1300), (1, 40)], num_heads=2, num_kv_heads=1, head_dim=16)
    lying = bounded(batch, max_context_len=max_context_len)
    assert error(attend(lying, options), expected(batch, options)) < FP32


def test_a_bound_that_is_kept_leaves_every_bit_as_it_is() -> None:
    batch = make_batch([(1, 600), (1, 40)], num_heads=2, num_kv_heads=1, head_dim=16)
    assert torch.equal(attend(bounded(batch, max_context_len=608)), attend(batch))
    assert not torch.equal(attend(bounded(batch, max_context_len=40)), attend(batch)), "one split instead of two"


def test_more_query_rows_than_said_are_computed_beside_other_chunks() -> None:
    batch = make_batch([(9, 30), (1, 20), (3, 3)], num_heads=2, num_kv_heads=1, head_dim=16)
    assert error(attend(bounded(batch, max_query_len=2)), expected(batch)) < FP32


@pytest.mark.parametrize("max_query_len", [0, 1])
@pytest.mark.parametrize("longest", [20, 600])
def test_rows_of_a_chunk_among_what_should_be_decodes_are_nan(longest: int, max_query_len: int) -> None:
    """As many rows as sequences, so that no shape tells: a sampler takes no token from NaN, and says so."""
    batch = make_batch([(1, longest), (2, 9), (0, 30), (1, 17)], num_heads=3, num_kv_heads=1, head_dim=80)
    result, wanted = attend(bounded(batch, max_query_len=max_query_len)), expected(batch)
    assert result[1:3].isnan().all()
    assert error(result[[0, 3]], wanted[[0, 3]]) < FP32


def test_more_query_rows_than_sequences_are_refused_where_each_should_have_one() -> None:
    batch = make_batch([(1, 20), (2, 9)], num_heads=2, num_kv_heads=1, head_dim=16)
    with pytest.raises(KernelInputError, match="max_query_len is 1, but 2 sequences have 3 query rows"):
        attend(bounded(batch, max_query_len=1))


def test_a_window_of_any_size_hides_nothing_from_rows_before_the_first_key() -> None:
    batch = make_batch([(9, 2), (40, 20), (1, 5)], num_heads=2, num_kv_heads=1, head_dim=16)
    for window in (60, 2**31 - 1, 2**40):
        options = AttentionOptions(window=window)
        assert error(attend(batch, options), expected(batch, options)) < FP32, window
