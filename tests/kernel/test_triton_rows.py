"""Triton's row kernels where the other implementations have nothing to show: half precision, launches, offsets."""

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import reference
from kernels.activation import silu_and_mul
from kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks
from kernels.checksum import block_checksums
from kernels.dispatch import implementation
from kernels.errors import KernelInputError
from kernels.kv_cache_write import rope_and_write
from kernels.rms_norm import add_rms_norm, rms_norm
from tests.kernel.batches import error
from tests.kernel.test_kv_cache_write import cos_sin_table

pytestmark = pytest.mark.usefixtures("triton_in_use")

# Norm of the error, relative. The interpreter cuts numbers off to bfloat16, where a GPU rounds them: twice the error.
TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
FP8 = torch.float8_e4m3fn


@pytest.fixture
def launched() -> Iterator[list[str]]:
    """Names of the kernels launched in the test so far."""
    from kernels.gpu.common import launching_by

    names: list[str] = []

    def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        names.append(kernel.__name__)
        kernel[grid](*args, **options)

    with launching_by(launch):
        yield names


@pytest.fixture
def red_zones(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What lies around each tensor that a kernel's launch makes for its results, all of it NaN."""
    importlib.import_module("kernels.gpu.case")  # which keeps torch.empty as it finds it
    around: list[torch.Tensor] = []
    empty: Callable[..., torch.Tensor] = torch.empty

    def made(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        memory = empty(torch.Size(shape).numel() + 128, dtype=dtype, device=device).fill_(torch.nan)
        around.extend((memory[:64], memory[-64:]))
        return memory[64:-64].view(shape)

    monkeypatch.setattr(torch, "empty", made)
    return around


def rows(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random rows as a slice of a wider tensor of NaN."""
    wide = torch.full((shape[0], shape[1] + 7), torch.nan, dtype=dtype)
    wide[:, : shape[1]] = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return wide[:, : shape[1]]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("hidden", [1, 80, 576])
def test_norms_and_gates_equal_their_twins(hidden: int, dtype: torch.dtype, red_zones: list[torch.Tensor]) -> None:
    x, residual, weight = rows((3, hidden), dtype), rows((3, hidden), dtype, 1), rows((1, hidden), dtype, 2)[0]
    assert error(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)) < TOLERANCES[dtype]
    wanted_residual = residual.clone()
    wanted = reference.add_rms_norm(x, wanted_residual, weight, 1e-5)
    assert error(add_rms_norm(x, residual, weight, 1e-5), wanted) < 2 * TOLERANCES[dtype]
    assert error(residual, wanted_residual) < TOLERANCES[dtype]
    gate_up = rows((3, 2 * hidden), dtype) * 10
    assert error(silu_and_mul(gate_up), reference.silu_and_mul(gate_up)) < TOLERANCES[dtype]
    assert len(red_zones) == 6
    assert all(zone.isnan().all() for zone in red_zones)


def test_rows_may_lie_one_element_apart() -> None:
    x, weight = torch.randn(80, 3).T, torch.randn(160)[::2]
    assert error(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)) < 1e-6
    assert error(silu_and_mul(x), reference.silu_and_mul(x)) < 1e-6
    residual = torch.randn(80, 3).T
    wanted = reference.add_rms_norm(x, residual.clone(), weight, 1e-5)
    assert error(add_rms_norm(x, residual, weight, 1e-5), wanted) < 1e-6
    overlapping = torch.randn(40).as_strided((5, 32), (1, 1))
    assert (
        error(rms_norm(overlapping, torch.ones(32), 1e-5), reference.rms_norm(overlapping, torch.ones(32), 1e-5)) < 1e-6
    )


def test_a_row_that_is_too_long_for_registers_goes_to_torch(launched: list[str]) -> None:
    x, weight = torch.randn(1, 40000), torch.randn(40000)
    assert error(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)) < 1e-6
    assert launched == []


def test_float64_goes_to_torch(launched: list[str]) -> None:
    x = torch.randn(2, 64, dtype=torch.float64)
    assert error(rms_norm(x, x[0], 1e-5), reference.rms_norm(x, x[0], 1e-5)) < 1e-12
    assert error(silu_and_mul(x), reference.silu_and_mul(x)) < 1e-12
    assert launched == []


def written(
    dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int = 64, rotary_dim: int = 64, *scales: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and the slots written, as the kernel and as its twin make them, of 5 tokens of 3 and 2 heads.

    Slots are out of order, one token has none, the cache's last axes are a slice of wider ones.
    """
    qkv = rows((5, 7 * head_dim), dtype)
    cache = torch.zeros((6, 2, 2, 8, 3, head_dim + 16)).to(cache_dtype)[:, :, :, :, :2, :head_dim]
    wanted_cache = torch.zeros(cache.shape).to(cache_dtype)
    slots = torch.tensor([47, 3, -1, 0, 17])
    args = (qkv, cos_sin_table(rotary_dim), torch.tensor([9, 0, 59, 1, 2]), slots)
    query = rope_and_write(*args, cache, 1, 3, 2, *scales)
    wanted = reference.rope_and_write(*args, wanted_cache, 1, 3, 2, *scales)
    return query, wanted, cache.float(), wanted_cache.float()


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(32, 32), (80, 32), (96, 96)])
def test_the_rotation_and_the_write_equal_the_twin(
    head_dim: int, rotary_dim: int, dtype: torch.dtype, red_zones: list[torch.Tensor]
) -> None:
    query, wanted, cache, wanted_cache = written(dtype, dtype, head_dim, rotary_dim)
    assert error(query, wanted) < TOLERANCES[dtype]
    assert error(cache, wanted_cache) < TOLERANCES[dtype]
    assert torch.equal(cache[:, :, 1], wanted_cache[:, :, 1]), "values are copied bit by bit"
    assert torch.equal(cache == 0, wanted_cache == 0), "other slots and layers are left alone"
    assert all(zone.isnan().all() for zone in red_zones)


@pytest.mark.parametrize("choice", ["triton", "torch"])
def test_a_cache_of_float8_holds_numbers_divided_by_their_scale(choice: str) -> None:
    """The interpreter rounds to float8 wrongly: up to two of its steps of an eighth."""
    with implementation(choice):
        query, wanted, cache, wanted_cache = written(torch.bfloat16, FP8, 64, 64, 0.01, 0.02)
    assert error(query, wanted) < 4e-3
    assert error(cache, wanted_cache) < (0.1 if choice == "triton" else 1e-2)
    assert float(cache.abs().max()) <= 448
    assert float(cache.abs().max()) > 100


@pytest.mark.parametrize("choice", ["triton", "torch"])
def test_numbers_that_float8_does_not_have_become_its_largest(choice: str) -> None:
    qkv, cache = torch.full((1, 4 * 32), 1e4), torch.zeros(1, 1, 2, 8, 1, 32).to(FP8)
    qkv[0, 100:] = -torch.inf
    nothing = torch.zeros(1, dtype=torch.int64)
    with implementation(choice):
        rope_and_write(qkv, cos_sin_table(32), nothing, nothing, cache, 0, 2, 1, 1.0, 1.0)
        assert cache.float()[0, 0, :, 0, 0].abs().tolist() == [[448.0] * 32] * 2
        rope_and_write(qkv.clamp(-9, 9), cos_sin_table(32), nothing, nothing, cache, 0, 2, 1, 0.0, 0.0)
        assert not cache.float().any(), "a scale of 0 says that all numbers are 0"


def test_scales_are_refused_where_the_cache_has_none_or_they_are_no_scales() -> None:
    with pytest.raises(KernelInputError, match=r"k_scale is 0\.5, but the cache is torch\.float32"):
        written(torch.float32, torch.float32, 64, 64, 0.5)
    with pytest.raises(KernelInputError, match="v_scale is -1"):
        written(torch.float32, FP8, 64, 64, 1.0, -1.0)


def test_each_call_is_one_launch_and_none_of_nothing_is_launched(launched: list[str]) -> None:
    x, cache, ids = torch.randn(2, 64), torch.randn(4, 1, 2, 8, 1, 16), torch.tensor([1, 2])
    for count in (0, 2):
        part, some = x[:count], ids[:count]
        rms_norm(part, x[0], 1e-5)
        add_rms_norm(part, part.clone(), x[0], 1e-5)
        silu_and_mul(part)
        rope_and_write(part, cos_sin_table(16), some, some, cache, 0, 2, 1)
        copy_blocks(cache, some, some + 1)
        gather_blocks(cache, some, cache[:count].clone())
        scatter_blocks(cache[:count].clone(), some, cache)
        block_checksums(cache[:count])
        assert count or launched == []
    norms, moves = ["rms_norm_kernel"] * 2, ["move_blocks_kernel"] * 3
    assert launched == [*norms, "silu_and_mul_kernel", "rope_and_write_kernel", *moves, "block_checksums_kernel"]


WITHOUT_TRITON = """
import sys
from importlib.machinery import PathFinder

class Hidden:
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] == "triton" else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not PathFinder] + [Hidden()]
"""

CALLS = """
import sys
import torch
import kernels, model.model_runner, worker.engine_process, ops.cli
from kernels.activation import silu_and_mul
from kernels.block_copy import copy_blocks
from kernels.checksum import block_checksums
from kernels.rms_norm import rms_norm

x = torch.randn(2, 64)
rms_norm(x, x[0], 1e-5)
silu_and_mul(x)
copy_blocks(x.clone(), torch.tensor([0]), torch.tensor([1]))
block_checksums(x.view(2, 1, 2, 32))
print("triton" in sys.modules)
"""


def test_without_triton_every_call_is_served() -> None:
    assert run_python(WITHOUT_TRITON + CALLS).stdout == "False\n"


def test_on_the_cpu_triton_is_not_imported_unless_it_is_chosen() -> None:
    assert run_python(CALLS, choice="auto").stdout == "False\n"


def run_python(code: str, choice: str = "triton") -> subprocess.CompletedProcess[str]:
    """A process of its own, since a wrong offset or an import is for the whole process."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env={"PATH": "", "TRITON_INTERPRET": "1", "PAGEMILL_KERNELS": choice, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
