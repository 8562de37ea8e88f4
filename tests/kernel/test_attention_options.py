"""Window, soft cap, sinks, ALiBi and a cache in FP8: each implementation against the twin; what is refused."""

import logging
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels import dispatch
from kernels.attention_inputs import FP8, PLAIN, AttentionOptions
from kernels.dispatch import implementation
from kernels.errors import KernelInputError
from kernels.paged_attention import paged_attention
from tests.kernel.attention_options import OPTIONS
from tests.kernel.batches import Batch, error, ragged_batch
from tests.kernel.triton_attention import MIXED, attend, expected

TOLERANCE = 5e-6


def batch_of_four_heads(**changes: Any) -> Batch:
    return ragged_batch(MIXED, num_heads=4, num_kv_heads=2, head_dim=16, **changes)


@pytest.mark.usefixtures("kernels_in_use")
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_gives_what_the_twin_gives(name: str) -> None:
    batch = batch_of_four_heads()
    assert error(attend(batch, OPTIONS[name]), expected(batch, OPTIONS[name])) < TOLERANCE


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_a_cache_in_fp8_is_read_with_its_scales(dtype: torch.dtype, tolerance: float) -> None:
    batch = batch_of_four_heads(dtype=dtype, cache_dtype=FP8)
    options = AttentionOptions(k_scale=0.5, v_scale=3.0)
    result = attend(batch, options)
    assert result.dtype is dtype
    assert error(result, expected(batch, options)) < tolerance
    assert error(attend(batch), expected(batch)) < tolerance


def test_the_twin_agrees_with_a_formula_written_out_by_hand() -> None:
    """One head, two keys of one element each: the last row sees both."""
    cache = torch.zeros(1, 1, 2, 16, 1, 1)
    cache[0, 0, 0, :2, 0, 0] = torch.tensor([1.0, 2.0])
    cache[0, 0, 1, :2, 0, 0] = torch.tensor([5.0, 7.0])
    batch = ragged_batch([(1, 2)], num_heads=1, num_kv_heads=1, head_dim=1, num_layers=1)
    table = torch.zeros(1, 1, dtype=torch.int32)
    batch = Batch(torch.full((1, 1, 1), 3.0), cache, replace(batch.meta, block_tables=table))
    options = AttentionOptions(
        soft_cap=2.0, sinks=torch.tensor([0.25]), alibi_slopes=torch.tensor([0.5]), k_scale=0.5, v_scale=4.0
    )
    scores = [2 * math.tanh(3 * 0.5 * 1 * 0.1 / 2) - 0.5, 2 * math.tanh(3 * 0.5 * 2 * 0.1 / 2)]
    weights = [math.exp(score) for score in scores]
    wanted = 4 * (5 * weights[0] + 7 * weights[1]) / (sum(weights) + math.exp(0.25))
    assert expected(batch, options, layer=0, scale=0.1).item() == pytest.approx(wanted, rel=1e-12)


def test_options_that_change_nothing_give_the_same_bits() -> None:
    batch = batch_of_four_heads()
    assert torch.equal(attend(batch, AttentionOptions()), attend(batch, PLAIN))


def test_a_fallback_is_told_once_with_its_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_told", set())
    batch = batch_of_four_heads()
    with caplog.at_level(logging.WARNING, logger="pagemill.kernels"):
        for _ in range(2):
            attend(batch, AttentionOptions(window=5, soft_cap=3.0, sinks=torch.ones(4)))
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "the attention kernel falls back to torch's operators: the compiled kernel doesn't compute soft_cap, sinks"
    ]


def test_torch_that_was_asked_for_is_no_fallback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_told", set())
    with implementation("torch"), caplog.at_level(logging.WARNING, logger="pagemill.kernels"):
        attend(batch_of_four_heads(), AttentionOptions(soft_cap=5.0))
    assert not caplog.records


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 0}, "window is 0"),
        ({"window": -4}, "window is -4"),
        ({"soft_cap": 0.0}, "soft_cap is 0.0"),
        ({"soft_cap": math.inf}, "soft_cap is inf"),
        ({"soft_cap": math.nan}, "soft_cap is nan"),
        ({"k_scale": -1.0}, "k_scale is -1.0"),
        ({"v_scale": math.nan}, "v_scale is nan"),
        ({"v_scale": math.inf}, "v_scale is inf"),
        ({"sinks": torch.zeros(2, 2)}, "sinks is"),
        ({"alibi_slopes": torch.zeros(4, dtype=torch.int64)}, "alibi_slopes is"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelInputError, match=message):
        AttentionOptions(**changes)


def test_an_option_of_another_number_of_heads_is_refused_by_name() -> None:
    five = torch.zeros(5)
    for name, options in (
        ("sinks", AttentionOptions(sinks=five)),
        ("alibi_slopes", AttentionOptions(alibi_slopes=five)),
    ):
        with pytest.raises(KernelInputError, match=f"{name} has 5 entries, the queries 4 heads"):
            attend(batch_of_four_heads(), options)


def test_what_does_not_belong_together_is_refused_by_name() -> None:
    batch = batch_of_four_heads()
    with pytest.raises(KernelInputError, match="layer is 2, and the cache has layers 0 to 1"):
        attend(batch, layer=2)
    with pytest.raises(KernelInputError, match="layer is -1"):
        attend(batch, layer=-1)
    with pytest.raises(KernelInputError, match="max_context_len is 999"):
        attend(Batch(batch.query, batch.kv_cache, replace(batch.meta, max_context_len=999)))
    with pytest.raises(KernelInputError, match="kv_cache is on meta, query on cpu"):
        attend(Batch(batch.query, batch.kv_cache.to("meta"), batch.meta))
    for out in (torch.empty(3, 4, 16), batch.query.half()):
        with pytest.raises(KernelInputError, match="out is"):
            paged_attention(batch.query, batch.kv_cache, 1, batch.meta, 0.125, out=out)
    with pytest.raises(KernelInputError, match="must be"):
        attend(Batch(batch.query.double(), batch.kv_cache.to(FP8), batch.meta))
