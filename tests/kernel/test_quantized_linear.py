"""Linear layers of int8 and int4 weights against their float64 twin, and what their rows must not depend on."""

import logging
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import dispatch, reference
from kernels.dispatch import implementation
from kernels.errors import KernelInputError
from kernels.int4_weights import INT4
from kernels.quantized_linear import QuantizedLinear
from kernels.weight_formats import INT8, WeightFormat
from tests.kernel.batches import error

pytestmark = pytest.mark.usefixtures("kernels_in_use")


@pytest.fixture(params=[INT8, INT4], ids=lambda form: form.name)
def form(request: pytest.FixtureRequest) -> WeightFormat:
    """How the layer of a test keeps its weights."""
    chosen: WeightFormat = request.param
    return chosen


def rounded(weight: torch.Tensor, form: WeightFormat) -> torch.Tensor:
    """The weight as the layer has it, float64: int8's by a rule so plain that the twin has it, too."""
    return reference.rounded_weight(weight) if form is INT8 else QuantizedLinear(weight.clone(), form=form).weight()


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("num_out", "num_in"), [(1, 1), (16, 32), (17, 5), (130, 576), (100, 97), (33, 300)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_product_equals_the_twin_for_any_number_of_rows(
    num_out: int, num_in: int, has_bias: bool, form: WeightFormat
) -> None:
    weight, bias = matrix(num_out, num_in), matrix(num_out, seed=1) if has_bias else None
    layer = QuantizedLinear(weight.clone(), bias, form=form)
    x = matrix(70, num_in + 3, seed=2)[:, :num_in] * torch.logspace(-6, 6, 70)[:, None]
    wanted = reference.quantized_linear(x, rounded(weight, form), bias)
    for num_rows in (*range(1, 20), 33, 64, 70):
        result = layer(x[70 - num_rows :])
        assert result.shape == (num_rows, num_out)
        for row, twin in zip(result, wanted[70 - num_rows :], strict=True):
            assert error(row, twin) < 1e-6, f"{num_rows} rows"
    assert layer(x[:0]).shape == (0, num_out)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=st.tuples(st.integers(1, 70), st.integers(1, 130)), num_rows=st.integers(1, 20), data=st.data())
def test_any_shape_gives_the_twin_s_product_and_each_row_its_own_bits(
    shape: tuple[int, int], num_rows: int, data: st.DataObject, form: WeightFormat, kernels_in_use: str
) -> None:
    weight, x = matrix(*shape), matrix(num_rows, shape[1], seed=1)
    layer = QuantizedLinear(weight.clone(), form=form)
    result, wanted = layer(x), reference.quantized_linear(x, rounded(weight, form), None)
    assert bool(((result - wanted).abs() <= 1e-6 * (x.abs() @ weight.abs().T)).all())
    if kernels_in_use == "compiled":
        row = data.draw(st.integers(0, num_rows - 1))
        assert torch.equal(layer(x[row : row + 1])[0], result[row])


def test_the_loss_against_the_float_product_is_below_a_percent_and_with_int4_below_a_tenth(form: WeightFormat) -> None:
    weight, x = matrix(200, 576), matrix(40, 576, seed=1)
    loss = error(QuantizedLinear(weight.clone(), form=form)(x), reference.linear(x, weight, None))
    assert loss < (0.01 if form is INT8 else 0.1)


@pytest.mark.parametrize("kernels_in_use", ["compiled"], indirect=True)
@pytest.mark.parametrize(("num_out", "num_in"), [(960, 576), (72, 1536), (50, 70)])
def test_a_row_has_the_same_bits_in_any_number_of_rows(
    kernels_in_use: str, num_out: int, num_in: int, form: WeightFormat
) -> None:
    """Alone, in any batch and in any cut of a prompt, however loud the rows beside it are."""
    assert kernels_in_use == "compiled"
    layer = QuantizedLinear(matrix(num_out, num_in), matrix(num_out, seed=1), form=form)
    x = matrix(100, num_in, seed=2)
    x[::7] *= 1e4
    together = layer(x)
    for first, last in (*((row, row + 1) for row in range(0, 100, 9)), (3, 5), (10, 23), (50, 100), (0, 37), (61, 69)):
        assert torch.equal(layer(x[first:last]), together[first:last]), f"rows {first}..{last}"


@pytest.mark.parametrize("kernels_in_use", ["compiled"], indirect=True)
def test_a_row_has_the_same_bits_on_any_number_of_threads(kernels_in_use: str, form: WeightFormat) -> None:
    assert kernels_in_use == "compiled"
    layer, x = QuantizedLinear(matrix(3072, 576), form=form), matrix(33, 576, seed=2)
    num_threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results += [torch.cat([layer(x[:2]), layer(x)])]
    finally:
        torch.set_num_threads(num_threads)
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_row_that_is_not_finite_gives_nan_and_spoils_no_other(form: WeightFormat) -> None:
    layer, x = QuantizedLinear(matrix(40, 64), form=form), matrix(9, 64, seed=1)
    wanted = layer(x)
    x[2, 5], x[4, 40], x[7, 0] = torch.nan, torch.inf, -torch.inf
    result = layer(x)
    spoiled = torch.zeros(9, dtype=torch.bool)
    spoiled[[2, 4, 7]] = True
    assert result[spoiled].isnan().all()
    assert error(result[~spoiled], wanted[~spoiled].double()) < 1e-6


def test_rows_of_zeros_and_of_tiny_numbers_give_zeros(form: WeightFormat) -> None:
    layer, x = QuantizedLinear(matrix(40, 64), form=form), torch.zeros(6, 64)
    x[1], x[2] = 1e-38, -1e-44
    assert torch.equal(layer(x), torch.zeros(6, 40))
    assert torch.equal(QuantizedLinear(torch.zeros(40, 64), form=form)(matrix(3, 64)), torch.zeros(3, 40))


@pytest.mark.parametrize("num_in", [64, 70])
def test_rows_and_weight_are_the_dequantized_weight(num_in: int, form: WeightFormat) -> None:
    weight = matrix(50, num_in)
    layer = QuantizedLinear(weight.clone(), form=form)
    dequantized = layer.weight()
    assert dequantized.shape == weight.shape
    assert error(dequantized, weight.double()) < (0.01 if form is INT8 else 0.1)
    ids = torch.tensor([49, 0, 16, 15, 16])
    assert torch.equal(layer.rows(ids), dequantized[ids])
    assert layer.rows(torch.empty(0, dtype=torch.int64)).shape == (0, num_in)
    for wrong in (-1, 50):
        with pytest.raises(KernelInputError, match="ids"):
            layer.rows(torch.tensor([0, wrong]))


@pytest.mark.parametrize("kernels_in_use", ["compiled"], indirect=True)
def test_weights_of_four_bits_lose_next_to_nothing(kernels_in_use: str) -> None:
    """Sixteen steps lie on the 256: so files of 4 bits with groups of 32, which are dequantized when they are read."""
    assert kernels_in_use == "compiled"
    steps = torch.randint(0, 16, (48, 2, 32), generator=torch.Generator().manual_seed(0))
    steps[..., 0], steps[..., 1] = 0, 15
    weight = (steps * (0.01 + matrix(48, 2, 1).abs()) + matrix(48, 2, 1, seed=1)).view(48, 64)
    assert error(QuantizedLinear(weight.clone()).weight(), weight.double()) < 1e-3


def test_a_layer_takes_little_more_than_its_integers(form: WeightFormat) -> None:
    layer = QuantizedLinear(matrix(160, 640), form=form)
    held = sum(value.nbytes for value in vars(layer).values() if isinstance(value, torch.Tensor))
    assert held < form.bytes_per_weight * 160 * 640 + 1000
    assert form.bytes_per_weight == (1.125 if form is INT8 else 0.625)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_fall_back_with_one_line(
    dtype: torch.dtype, form: WeightFormat, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch, "_told", set())
    weight, bias, x = matrix(40, 64), matrix(40, seed=1), matrix(5, 64, seed=2)
    layer = QuantizedLinear(weight, bias, dtype, form)
    with caplog.at_level(logging.WARNING, "pagemill.kernels"):
        for _ in range(3):
            result = layer(x.to(dtype))
    assert result.dtype is dtype
    assert error(result, reference.quantized_linear(x.to(dtype).float(), rounded(weight, form), bias)) < 2e-2
    assert len(caplog.records) == 1
    assert str(dtype).removeprefix("torch.") in caplog.text
    assert form.name in caplog.text


def test_both_implementations_read_the_same_weights(form: WeightFormat) -> None:
    weight, bias, x = matrix(40, 70), matrix(40, seed=2), matrix(3, 70, seed=1)
    layer = QuantizedLinear(weight.clone(), bias, form=form)
    wanted = reference.quantized_linear(x, rounded(weight, form), bias)
    with implementation("torch"):
        assert error(layer(x), wanted) < 1e-6
    with implementation("auto"):
        assert error(layer(x), wanted) < 1e-6


def test_wrong_shapes_and_dtypes_are_refused_by_name() -> None:
    with pytest.raises(KernelInputError, match="out_features"):
        QuantizedLinear(matrix(4, 4), matrix(5))
    layer = QuantizedLinear(matrix(4, 4))
    for wrong in (matrix(2, 5), matrix(2, 4).double(), matrix(4)):
        with pytest.raises(KernelInputError, match="must be"):
            layer(wrong)


@pytest.mark.parametrize("kernels_in_use", ["compiled"], indirect=True)
@pytest.mark.parametrize(
    ("triple", "features", "instruction"),
    [
        ("x86_64-unknown-linux-gnu", "+avx2,+avx512bw,+avx512vnni", "vnni512"),
        ("x86_64-unknown-linux-gnu", "+avx2,+avxvnni,-avx512vnni", "vnni256"),
        ("x86_64-unknown-linux-gnu", "+avx2,+avx512bw,-avx512vnni", "pairs512"),
        ("x86_64-unknown-linux-gnu", "+avx2,-avx512bw", "pairs256"),
        ("x86_64-unknown-linux-gnu", "+sse2", "plain"),
        ("arm64-apple-darwin", "+dotprod,+neon", "sdot"),
        ("aarch64-unknown-linux-gnu", "+neon", "plain"),
    ],
)
def test_each_processor_gets_its_instruction(kernels_in_use: str, triple: str, features: str, instruction: str) -> None:
    assert kernels_in_use == "compiled"
    from kernels.cpu.dot import instruction_of

    assert instruction_of(triple, features) == instruction


DIGEST = """
import hashlib, torch
from kernels.cpu.dot import INSTRUCTION
from kernels.int4_weights import INT4
from kernels.quantized_linear import QuantizedLinear
from kernels.weight_formats import INT8
digest = hashlib.sha256()
for num_out, num_in, form in ((130, 576, INT8), (50, 70, INT8), (130, 576, INT4), (50, 70, INT4)):
    generator = torch.Generator().manual_seed(num_in)
    layer = QuantizedLinear(torch.randn(num_out, num_in, generator=generator), form=form)
    x = torch.randn(20, num_in, generator=generator)
    for num_rows in (1, 2, 3, 4, 6, 8, 20):
        digest.update(layer(x[:num_rows]).numpy().tobytes())
    digest.update(layer.rows(torch.arange(num_out)).numpy().tobytes())
print(INSTRUCTION, digest.hexdigest())
"""
COMPILE = "import sys; from kernels.cpu.build import address; address(sys.argv[1])"
PROCESSORS = {
    "pairs512": ("skylake-avx512", "+avx,+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512cd"),
    "pairs256": ("haswell", "+avx,+avx2,+fma,+f16c"),
    "plain": ("x86-64", "+sse2"),
}


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for x86-64 processors")
@pytest.mark.parametrize("kernels_in_use", ["compiled"], indirect=True)
@pytest.mark.parametrize("instruction", PROCESSORS)
def test_code_for_another_processor_gives_the_same_bits(kernels_in_use: str, instruction: str, tmp_path: Path) -> None:
    """Of those whose instructions this one has too: code for a smaller one runs on a larger one."""
    assert kernels_in_use == "compiled"
    from numba.core.registry import cpu_target

    name, features = PROCESSORS[instruction]
    here = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    if missing := [feature for feature in features.split(",") if feature not in here]:
        pytest.skip(f"this processor has no {' '.join(missing)}")

    other = output_of(tmp_path, DIGEST, NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features)
    assert other[0] == instruction
    assert other[1] == output_of(tmp_path, DIGEST)[1]


@pytest.mark.slow
@pytest.mark.parametrize("kernels_in_use", ["compiled"], indirect=True)
def test_bodies_that_other_processes_have_compiled_don_t_mix_up_their_functions(
    kernels_in_use: str, tmp_path: Path
) -> None:
    """Each is compiled by a process of its own, which numbers its functions from the same number on."""
    assert kernels_in_use == "compiled"
    for body in ("quantized_linear", "int4_linear"):
        output_of(tmp_path / "apart", COMPILE, body)
    assert output_of(tmp_path / "apart", DIGEST) == output_of(tmp_path / "together", DIGEST)


def output_of(cache: Path, program: str, *words: str, **environment: str) -> list[str]:
    """What a program prints, word by word; it keeps compiled code in `cache`."""
    ran = subprocess.run(
        [sys.executable, "-c", program, *words],
        env=os.environ | {"NUMBA_CACHE_DIR": str(cache)} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()
