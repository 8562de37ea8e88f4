"""The packed linear layer against its float64 twin."""

import threading

import pytest
import torch

from kernels import reference
from kernels.dispatch import implementation
from kernels.errors import KernelInputError
from kernels.linear import PackedLinear
from tests.kernel.batches import error

pytestmark = pytest.mark.usefixtures("kernels_in_use")


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("num_out", "num_in"), [(1, 1), (16, 16), (17, 5), (960, 576), (100, 1536), (33, 2500)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_product_equals_the_twin_for_any_number_of_rows(num_out: int, num_in: int, has_bias: bool) -> None:
    weight, bias = matrix(num_out, num_in), matrix(num_out, seed=1) if has_bias else None
    layer = PackedLinear(weight.clone(), bias)
    for num_rows in (*range(14), 31, 64, 100):
        x = matrix(num_rows, num_in + 3, seed=num_rows)[:, :num_in]
        result = layer(x)
        assert result.shape == (num_rows, num_out)
        assert error(result, reference.linear(x, weight, bias)) < 1e-6, f"{num_rows} rows"


@pytest.mark.parametrize("kernels_in_use", ["compiled"], indirect=True)
def test_a_row_has_the_same_bits_in_any_number_of_rows(kernels_in_use: str) -> None:
    """Of the compiled products alone: torch's choose their order of sums by the number of rows."""
    assert kernels_in_use == "compiled"
    layer, x = PackedLinear(matrix(3072, 576), matrix(3072, seed=1)), matrix(100, 576, seed=2)
    together = layer(x)
    for first, last in ((0, 1), (99, 100), (3, 5), (10, 23), (50, 100), (0, 37)):
        assert torch.equal(layer(x[first:last]), together[first:last]), f"rows {first}..{last}"


def test_rows_and_weight_give_back_what_was_packed() -> None:
    weight = matrix(50, 24)
    layer = PackedLinear(weight.clone())
    assert torch.equal(layer.weight(), weight)
    ids = torch.tensor([49, 0, 16, 15, 16])
    assert torch.equal(layer.rows(ids), weight[ids])
    assert layer.rows(torch.empty(0, dtype=torch.int64)).shape == (0, 24)
    for wrong in (-1, 50):
        with pytest.raises((KernelInputError, IndexError)):
            layer.rows(torch.tensor([0, wrong]))


def test_a_layer_of_another_dtype_is_converted() -> None:
    weight, x = matrix(40, 32), matrix(3, 32, seed=1)
    layer = PackedLinear(weight, matrix(40, seed=2), dtype=torch.bfloat16)
    assert layer.dtype is torch.bfloat16
    assert error(layer(x.bfloat16()), reference.linear(x, weight, matrix(40, seed=2))) < 1e-2


def test_a_packed_layer_still_answers_when_compiled_kernels_are_switched_off() -> None:
    weight, bias, x = matrix(40, 32), matrix(40, seed=2), matrix(3, 32, seed=1)
    layer = PackedLinear(weight, bias)
    with implementation("torch"):
        assert error(layer(x), reference.linear(x, weight, bias)) < 1e-6
        assert torch.equal(layer.rows(torch.tensor([39, 3])), weight[[39, 3]])


def test_wrong_shapes_and_dtypes_are_refused_by_name() -> None:
    with pytest.raises(KernelInputError, match="out_features"):
        PackedLinear(matrix(4, 4), matrix(5))
    layer = PackedLinear(matrix(4, 4))
    with pytest.raises(KernelInputError, match="must be"):
        layer(matrix(2, 5))
    with pytest.raises(KernelInputError, match="must be"):
        layer(matrix(2, 4).double())


def test_threads_that_call_at_once_do_not_disturb_each_other() -> None:
    layer, x = PackedLinear(matrix(960, 576)), matrix(9, 576, seed=1)
    wanted = layer(x)
    results: list[bool] = []

    def call() -> None:
        results.extend(torch.equal(layer(x), wanted) for _ in range(30))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 90
