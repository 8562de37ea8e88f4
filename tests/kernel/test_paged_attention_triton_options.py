"""Options of the Triton attention against the float64 twin. On CUDA, or by the interpreter."""

import pytest
import torch

from kernels.attention_inputs import FP8, AttentionOptions
from tests.kernel.attention_options import options_on
from tests.kernel.batches import Batch, error, pick
from tests.kernel.triton_attention import (
    DEVICE,
    MIXED,
    TOLERANCE,
    attend,
    expected,
    make_batch,
    needs_triton,
    triton_alone,
)

__all__ = ["triton_alone"]

pytestmark = [needs_triton, pytest.mark.usefixtures("triton_alone")]

OPTIONS = options_on(DEVICE)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_gives_what_the_twin_gives(name: str) -> None:
    """The soft cap's tanh is made of an exponential, which costs a bit or two."""
    batch = make_batch(MIXED, num_heads=4, num_kv_heads=2, head_dim=16)
    assert error(attend(batch, OPTIONS[name]), expected(batch, OPTIONS[name])) < 5e-6


@pytest.mark.parametrize("name", ["sinks", "all", "window over tiles"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_options_in_half_precision_equal_the_twin(name: str, dtype: torch.dtype) -> None:
    batch = make_batch(MIXED, num_heads=4, num_kv_heads=2, head_dim=80, dtype=dtype)
    assert error(attend(batch, OPTIONS[name]), expected(batch, OPTIONS[name])) < TOLERANCE[dtype]


@pytest.mark.parametrize("window", [1, 16, 100, 511, 512, 513, 700])
def test_a_window_begins_anywhere_in_a_split(window: int) -> None:
    """Splits before the window have no keys: they write nothing, and the merge does not look at them."""
    batch = make_batch([(1, 1030), (1, 40)], num_heads=2, num_kv_heads=1, head_dim=16)
    options = AttentionOptions(window=window)
    assert error(attend(batch, options), expected(batch, options)) < TOLERANCE[torch.float32]


def test_keys_before_the_window_are_not_read() -> None:
    batch = make_batch([(1, 600), (5, 100)], num_heads=2, num_kv_heads=1, head_dim=16)
    options = AttentionOptions(window=33)
    wanted = expected(batch, options)
    for seq, first in ((0, 600 - 33), (1, 100 - 5 + 1 - 33)):
        batch.kv_cache[batch.meta.block_tables[seq, : first // 16].long()] = torch.nan
        last_block = int(batch.meta.block_tables[seq, first // 16])
        batch.kv_cache[last_block, :, :, : first % 16] = torch.nan
    assert error(attend(batch, options), wanted) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", ["sinks", "all"])
def test_options_keep_the_bits_of_a_row_alone(name: str) -> None:
    batch = make_batch([(1, 30), (9, 20), (1, 1100), (1, 600)], num_heads=4, num_kv_heads=1, head_dim=16)
    together = attend(batch, OPTIONS[name])
    for seq, row in ((0, 0), (2, 10), (3, 11)):
        assert torch.equal(attend(pick(batch, seq), OPTIONS[name])[0], together[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_a_cache_in_fp8_is_read_with_its_scales(head_dim: int, dtype: torch.dtype) -> None:
    """What is unwritten or another's is NaN in FP8, too. The twin reads the same 8 bits."""
    batch = make_batch(MIXED, num_heads=4, num_kv_heads=2, head_dim=head_dim, dtype=dtype, cache_dtype=FP8)
    options = AttentionOptions(k_scale=0.5, v_scale=3.0)
    assert error(attend(batch, options), expected(batch, options)) < TOLERANCE[dtype]


@pytest.mark.parametrize("value", [448.0, -448.0, 2.0**-9])
def test_the_ends_of_fp8_are_read_right(value: float) -> None:
    batch = make_batch([(1, 20), (3, 5)], num_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float16)
    cache = torch.full_like(batch.kv_cache, value).to(FP8)
    same = Batch(batch.query, cache, batch.meta)
    assert torch.equal(attend(same), torch.full((4, 4, 16), value, dtype=torch.float16))


def test_a_scale_of_zero_gives_zeros_and_no_nan() -> None:
    batch = make_batch(MIXED, num_heads=4, num_kv_heads=2, head_dim=16, cache_dtype=FP8)
    assert (attend(batch, AttentionOptions(v_scale=0.0)) == 0).all()
    options = AttentionOptions(k_scale=0.0)
    assert error(attend(batch, options), expected(batch, options)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("size", [1.0, 1e4])
def test_a_soft_cap_holds_enormous_scores(size: float) -> None:
    batch = make_batch([(3, 70), (1, 33)], num_heads=4, num_kv_heads=2, head_dim=16)
    scaled = Batch(batch.query * size, batch.kv_cache, batch.meta)
    options = AttentionOptions(soft_cap=30.0)
    assert error(attend(scaled, options), expected(scaled, options)) < 5e-5
