"""RMSNorm and the gated activation against their float64 twins."""

import logging

import pytest
import torch

from kernels import dispatch, reference
from kernels.activation import silu_and_mul
from kernels.errors import KernelInputError
from kernels.rms_norm import add_rms_norm, rms_norm
from tests.kernel.batches import error

pytestmark = pytest.mark.usefixtures("kernels_in_use")

SHAPES = [(0, 64), (1, 16), (1, 576), (3, 20), (5, 1)]
# The interpreter would take seconds for these.
MANY_ROWS = [(37, 576), (300, 2048)]


def rows(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    """Random rows as a slice of a wider tensor."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((shape[0], shape[1] + 7), generator=generator)[:, : shape[1]]


@pytest.mark.triton
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_equals_the_twin(shape: tuple[int, int]) -> None:
    x, weight = rows(shape), rows((1, shape[1]), seed=1)[0]
    assert error(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)) < 1e-6


@pytest.mark.triton
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm_equals_the_twin_and_updates_the_residual(shape: tuple[int, int]) -> None:
    x, residual, weight = rows(shape), rows(shape, seed=1), rows((1, shape[1]), seed=2)[0]
    wanted_residual = residual.clone()
    wanted = reference.add_rms_norm(x, wanted_residual, weight, 1e-5)
    assert error(add_rms_norm(x, residual, weight, 1e-5), wanted) < 1e-6
    assert torch.equal(residual, wanted_residual)


@pytest.mark.parametrize("shape", MANY_ROWS)
def test_many_rows_equal_the_twin(shape: tuple[int, int]) -> None:
    x, residual, weight = rows(shape), rows(shape, seed=1), rows((1, shape[1]), seed=2)[0]
    assert error(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)) < 1e-6
    assert error(silu_and_mul(x), reference.silu_and_mul(x)) < 1e-6
    wanted = reference.add_rms_norm(x, residual.clone(), weight, 1e-5)
    assert error(add_rms_norm(x, residual, weight, 1e-5), wanted) < 1e-6


@pytest.mark.triton
def test_rms_norm_of_zeros_is_zero_and_of_nan_is_nan() -> None:
    x = torch.zeros(2, 64)
    x[1, 5] = torch.nan
    result = rms_norm(x, torch.ones(64), 1e-5)
    assert torch.equal(result[0], torch.zeros(64))
    assert result[1].isnan().all()


@pytest.mark.triton
@pytest.mark.parametrize("shape", [(0, 32), (1, 32), (3, 20), (2, 3072)])
def test_silu_and_mul_equals_the_twin(shape: tuple[int, int]) -> None:
    gate_up = rows(shape) * 10
    assert error(silu_and_mul(gate_up), reference.silu_and_mul(gate_up)) < 1e-6


@pytest.mark.triton
def test_silu_of_extreme_gates_is_exact_at_both_ends() -> None:
    gate = torch.tensor([-1e4, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e4] * 4)
    result = silu_and_mul(torch.cat((gate, torch.ones(32))).unsqueeze(0))[0]
    assert torch.allclose(result.double(), gate.double().clamp(min=0), atol=1e-30)


@pytest.mark.triton
def test_a_row_has_the_same_bits_alone_and_among_others(kernels_in_use: str) -> None:
    num_rows = 9 if kernels_in_use == "triton" else 300
    x, weight = rows((num_rows, 576)), rows((1, 576), seed=1)[0]
    normed, gated = rms_norm(x, weight, 1e-5), silu_and_mul(x)
    for row in (0, num_rows // 3, num_rows - 1):
        assert torch.equal(rms_norm(x[row : row + 1], weight, 1e-5)[0], normed[row])
        assert torch.equal(silu_and_mul(x[row : row + 1])[0], gated[row])


@pytest.mark.triton
def test_wrong_shapes_are_refused_by_name() -> None:
    with pytest.raises(KernelInputError, match="weight"):
        rms_norm(torch.zeros(2, 64), torch.ones(32), 1e-5)
    with pytest.raises(KernelInputError, match="residual"):
        add_rms_norm(torch.zeros(2, 64), torch.zeros(3, 64), torch.ones(64), 1e-5)
    with pytest.raises(KernelInputError, match="gate_up"):
        silu_and_mul(torch.zeros(2, 33))


def test_rows_that_are_no_whole_vectors_fall_back_with_one_line_a_kernel(
    kernels_in_use: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_told", set())
    x = rows((2, 20))
    with caplog.at_level(logging.WARNING, logger="pagemill.kernels"):
        for _ in range(2):
            rms_norm(x, x[0], 1e-5)
            add_rms_norm(x, x.clone(), x[0], 1e-5)
            silu_and_mul(rows((2, 40)))
            rms_norm(rows((2, 32)), rows((1, 32))[0], 1e-5)
    told = [record.getMessage() for record in caplog.records]
    why = "falls back to torch's operators: it takes rows of adjacent elements, 16 at a time, and these have 20"
    both = [f"the {kernel} kernel {why}" for kernel in ("rms_norm", "silu_and_mul")]
    assert told == (both if kernels_in_use == "compiled" else [])
