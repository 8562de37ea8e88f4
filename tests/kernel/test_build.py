"""Finding, compiling, caching and switching off the compiled kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels
from kernels.compiled import launch
from kernels.cpu import build, pool
from kernels.dispatch import implementation, selected, use_compiled
from kernels.errors import KernelError
from kernels.linear import PackedLinear

# Uses one small kernel, which compiles in under a second.
ONE_KERNEL = """
import torch
from kernels.activation import silu_and_mul
from kernels.cpu.build import is_cached
was_cached = is_cached("silu_and_mul")
x = torch.randn(4, 64)
assert torch.allclose(silu_and_mul(x), torch.nn.functional.silu(x[:, :32]) * x[:, 32:], atol=1e-6)
print(was_cached, is_cached("silu_and_mul"))
"""

WITHOUT_NUMBA = """
import sys
from importlib.machinery import PathFinder

class NoNumba:
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in ("numba", "llvmlite") else PathFinder.find_spec(name, path, target)

sys.meta_path = [finder for finder in sys.meta_path if finder is not PathFinder] + [NoNumba()]
import torch
import kernels
from kernels.dispatch import has_compiled
from kernels.linear import PackedLinear
from kernels.rms_norm import rms_norm
assert not has_compiled() and kernels.is_compiled(torch.float32, 64, 9, 3)
kernels.warmup(torch.float32, 64, 9, 3)
weight, x = torch.randn(8, 16), torch.randn(2, 16)
assert torch.allclose(PackedLinear(weight)(x), x @ weight.T, atol=1e-5)
assert rms_norm(x, torch.ones(16), 1e-5).isfinite().all()
assert "numba" not in sys.modules
"""


def run_python(code: str, **changes: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **changes}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_second_process_loads_what_the_first_has_compiled(tmp_path: Path) -> None:
    first = run_python(ONE_KERNEL, NUMBA_CACHE_DIR=str(tmp_path))
    assert first.stdout.split() == ["False", "True"], first.stderr
    second = run_python(ONE_KERNEL, NUMBA_CACHE_DIR=str(tmp_path))
    assert second.stdout.split() == ["True", "True"], second.stderr


def test_where_no_cache_can_be_written_kernels_still_run(tmp_path: Path) -> None:
    file = tmp_path / "a file, so no folder can be made below it"
    file.touch()
    result = run_python(ONE_KERNEL, NUMBA_CACHE_DIR=str(file))
    assert result.stdout.split() == ["False", "False"], result.stderr


def test_without_numba_the_torch_operators_serve() -> None:
    result = run_python(WITHOUT_NUMBA)
    assert result.returncode == 0, result.stderr


def test_the_environment_can_choose_the_torch_operators() -> None:
    code = "import torch; from kernels.dispatch import use_compiled; print(use_compiled(torch.zeros(1)))"
    assert run_python(code, PAGEMILL_KERNELS="torch").stdout.strip() == "False"
    wrong = run_python(code, PAGEMILL_KERNELS="fast")
    assert wrong.returncode != 0
    assert "PAGEMILL_KERNELS is 'fast'; it must be one of auto, torch" in wrong.stderr


def fail() -> None:
    assert not use_compiled(torch.zeros(1))
    raise RuntimeError


def test_the_switch_is_put_back_after_an_error() -> None:
    before = selected()
    with pytest.raises(RuntimeError), implementation("torch"):
        fail()
    assert selected() == before
    with pytest.raises(KernelError, match="no implementation"), implementation("fast"):
        pass


def test_warm_up_tells_its_progress_and_leaves_nothing_to_compile() -> None:
    told: list[tuple[int, int]] = []
    kernels.warmup(torch.float32, 64, 9, 3, lambda done, total, name: told.append((done, total)))
    assert told == [(n, len(build.BODIES)) for n in range(len(build.BODIES) + 1)]
    assert kernels.is_compiled(torch.float32, 64, 9, 3)


def test_a_model_of_another_dtype_has_nothing_to_compile() -> None:
    told: list[int] = []
    kernels.warmup(torch.bfloat16, 64, 9, 3, lambda done, total, name: told.append(total))
    assert told == []
    assert kernels.is_compiled(torch.bfloat16, 64, 9, 3)


def test_every_source_of_the_compiled_code_counts_in_the_name_of_its_folder() -> None:
    """A stale helper would otherwise be served from the cache: numba looks at the calling function's file alone."""
    imported = {
        Path(module.__file__).resolve()
        for name, module in sys.modules.items()
        if name.startswith("kernels.cpu.") and module.__file__
    }
    assert imported <= set(build.sources())
    assert any(path.name == "noise.py" for path in build.sources())


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same_bits(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = PackedLinear(torch.randn(960, 576)), torch.randn(7, 576)
    wanted = layer(x)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    assert torch.equal(layer(x), wanted)


def test_python_threads_serve_where_the_system_calls_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = PackedLinear(torch.randn(960, 576)), torch.randn(7, 576)
    wanted = layer(x)
    monkeypatch.setattr(pool, "SYS_FUTEX", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(layer(x), wanted)


def test_an_unknown_body_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        launch("no such body", ())
