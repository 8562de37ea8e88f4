"""The linear layer of int8 weights against its float64 twin, and what its rows must not depend on."""

import logging

import pytest
import torch

from kernels import dispatch, reference
from kernels.dispatch import implementation
from kernels.errors import KernelInputError
from kernels.quantized_linear import BYTES_PER_WEIGHT, QuantizedLinear
from tests.kernel.batches import error

pytestmark = pytest.mark.usefixtures("kernels_in_use")


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("num_out", "num_in"), [(1, 1), (16, 32), (17, 5), (130, 576), (100, 97), (33, 300)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_product_equals_the_twin_for_any_number_of_rows(num_out: int, num_in: int, has_bias: bool) -> None:
    weight, bias = matrix(num_out, num_in), matrix(num_out, seed=1) if has_bias else None
    layer = QuantizedLinear(weight.clone(), bias)
    x = matrix(70, num_in + 3, seed=2)[:, :num_in] * torch.logspace(-6, 6, 70)[:, None]
    wanted = reference.quantized_linear(x, weight, bias)
    for num_rows in (*range(1, 20), 33, 64, 70):
        result = layer(x[70 - num_rows :])
        assert result.shape == (num_rows, num_out)
        for row, twin in zip(result, wanted[70 - num_rows :], strict=True):
            assert error(row, twin) < 1e-6, f"{num_rows} rows"
    assert layer(x[:0]).shape == (0, num_out)


def test_the_loss_against_the_float_product_is_below_a_percent() -> None:
    weight, x = matrix(200, 576), matrix(40, 576, seed=1)
    assert error(QuantizedLinear(weight.clone())(x), reference.linear(x, weight, None)) < 0.01


@pytest.mark.parametrize("kernels_in_use", ["compiled"], indirect=True)
@pytest.mark.parametrize(("num_out", "num_in"), [(960, 576), (72, 1536), (50, 70)])
def test_a_row_has_the_same_bits_in_any_number_of_rows(kernels_in_use: str, num_out: int, num_in: int) -> None:
    """Alone, in any batch and in any cut of a prompt, however loud the rows beside it are."""
    assert kernels_in_use == "compiled"
    layer, x = QuantizedLinear(matrix(num_out, num_in), matrix(num_out, seed=1)), matrix(100, num_in, seed=2)
    x[::7] *= 1e4
    together = layer(x)
    for first, last in (*((row, row + 1) for row in range(0, 100, 9)), (3, 5), (10, 23), (50, 100), (0, 37), (61, 69)):
        assert torch.equal(layer(x[first:last]), together[first:last]), f"rows {first}..{last}"


@pytest.mark.parametrize("kernels_in_use", ["compiled"], indirect=True)
def test_a_row_has_the_same_bits_on_any_number_of_threads(kernels_in_use: str) -> None:
    assert kernels_in_use == "compiled"
    layer, x = QuantizedLinear(matrix(3072, 576)), matrix(33, 576, seed=2)
    num_threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results += [torch.cat([layer(x[:2]), layer(x)])]
    finally:
        torch.set_num_threads(num_threads)
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_row_that_is_not_finite_gives_nan_and_spoils_no_other() -> None:
    layer, x = QuantizedLinear(matrix(40, 64)), matrix(9, 64, seed=1)
    wanted = layer(x)
    x[2, 5], x[4, 40], x[7, 0] = torch.nan, torch.inf, -torch.inf
    result = layer(x)
    spoiled = torch.zeros(9, dtype=torch.bool)
    spoiled[[2, 4, 7]] = True
    assert result[spoiled].isnan().all()
    assert error(result[~spoiled], wanted[~spoiled].double()) < 1e-6


def test_rows_of_zeros_and_of_tiny_numbers_give_zeros() -> None:
    layer, x = QuantizedLinear(matrix(40, 64)), torch.zeros(6, 64)
    x[1], x[2] = 1e-38, -1e-44
    assert torch.equal(layer(x), torch.zeros(6, 40))
    assert torch.equal(QuantizedLinear(torch.zeros(40, 64))(matrix(3, 64)), torch.zeros(3, 40))


@pytest.mark.parametrize("num_in", [64, 70])
def test_rows_and_weight_are_the_dequantized_weight(num_in: int) -> None:
    weight = matrix(50, num_in)
    layer = QuantizedLinear(weight.clone())
    rounded = layer.weight()
    assert rounded.shape == weight.shape
    assert error(rounded, weight.double()) < 0.01
    ids = torch.tensor([49, 0, 16, 15, 16])
    assert torch.equal(layer.rows(ids), rounded[ids])
    assert layer.rows(torch.empty(0, dtype=torch.int64)).shape == (0, num_in)
    for wrong in (-1, 50):
        with pytest.raises(KernelInputError, match="ids"):
            layer.rows(torch.tensor([0, wrong]))


def test_what_is_quantized_already_stays_as_it_is() -> None:
    """So a file of 8 bits with groups of 32 loses nothing more."""
    once = QuantizedLinear(matrix(48, 64)).weight()
    assert error(QuantizedLinear(once.clone()).weight(), once.double()) < 1e-7


def test_a_layer_takes_little_more_than_a_byte_a_weight() -> None:
    layer = QuantizedLinear(matrix(160, 640))
    held = sum(value.nbytes for value in vars(layer).values() if isinstance(value, torch.Tensor))
    assert held < BYTES_PER_WEIGHT * 160 * 640 + 1000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_fall_back_with_one_line(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch, "_told", set())
    weight, bias, x = matrix(40, 64), matrix(40, seed=1), matrix(5, 64, seed=2)
    layer = QuantizedLinear(weight, bias, dtype=dtype)
    with caplog.at_level(logging.WARNING, "pagemill.kernels"):
        for _ in range(3):
            result = layer(x.to(dtype))
    assert result.dtype is dtype
    assert error(result, reference.quantized_linear(x.to(dtype).float(), weight, bias)) < 2e-2
    assert len(caplog.records) == 1
    assert str(dtype).removeprefix("torch.") in caplog.text
    assert "int8" in caplog.text


def test_both_implementations_read_the_same_weights() -> None:
    weight, bias, x = matrix(40, 70), matrix(40, seed=2), matrix(3, 70, seed=1)
    layer = QuantizedLinear(weight.clone(), bias)
    with implementation("torch"):
        assert error(layer(x), reference.quantized_linear(x, weight, bias)) < 1e-6
    with implementation("auto"):
        assert error(layer(x), reference.quantized_linear(x, weight, bias)) < 1e-6


def test_wrong_shapes_and_dtypes_are_refused_by_name() -> None:
    with pytest.raises(KernelInputError, match="out_features"):
        QuantizedLinear(matrix(4, 4), matrix(5))
    layer = QuantizedLinear(matrix(4, 4))
    for wrong in (matrix(2, 5), matrix(2, 4).double(), matrix(4)):
        with pytest.raises(KernelInputError, match="must be"):
            layer(wrong)
