"""Finding, compiling, caching and switching off the compiled kernels."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import kernels
from kernels import compiled
from kernels.activation import silu_and_mul
from kernels.compiled import launch
from kernels.cpu import build, code_cache, pool
from kernels.dispatch import implementation, selected, use_compiled
from kernels.errors import KernelError
from kernels.linear import PackedLinear

KERNEL = "silu_and_mul"
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
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_second_process_loads_what_the_first_has_compiled(tmp_path: Path) -> None:
    first = run_python(ONE_KERNEL, NUMBA_CACHE_DIR=str(tmp_path))
    assert first.stdout.split() == ["False", "True"], first.stderr
    second = run_python(ONE_KERNEL, NUMBA_CACHE_DIR=str(tmp_path))
    assert second.stdout.split() == ["True", "True"], second.stderr


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def garble(path: Path) -> None:
    """Change the machine code, which unpickling doesn't notice."""
    data = bytearray(path.read_bytes())
    for at in range(len(data) // 3, len(data) // 3 + 64):
        data[at] ^= 0xA5
    path.write_bytes(bytes(data))


def remove(path: Path) -> None:
    path.unlink()


@pytest.fixture(scope="module")
def sound_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache on disk with one kernel."""
    root = tmp_path_factory.mktemp("kernels")
    with fresh_start(root):
        build.address(KERNEL)
    return root


@pytest.fixture
def cache_copy(sound_cache: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may damage."""
    return Path(shutil.copytree(sound_cache, tmp_path / "copy"))


@contextmanager
def fresh_start(root: Path) -> Iterator[None]:
    """As if a process began, with this folder for its kernels."""
    before = build._loaded.copy()
    kernels.set_cache_root(root)
    code_cache.open_cache.cache_clear()
    compiled._address.cache_clear()
    build._loaded.clear()
    try:
        yield
    finally:
        kernels.set_cache_root(None)
        compiled._address.cache_clear()
        build._loaded.clear()
        build._loaded.update(before)


def start(root: Path, caplog: pytest.LogCaptureFixture) -> tuple[bool, list[str]]:
    """Load the kernel with this cache and run it: whether it was in the cache, and what was logged."""
    caplog.clear()
    with fresh_start(root):
        was_cached = build.is_cached(KERNEL)
        x = torch.randn(4, 64)
        assert torch.allclose(silu_and_mul(x), torch.nn.functional.silu(x[:, :32]) * x[:, 32:], atol=1e-6)
    return was_cached, [record.getMessage() for record in caplog.records]


def test_a_folder_that_was_chosen_wins_over_the_environment(
    cache_copy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert start(cache_copy, caplog) == (True, [])
    assert start(tmp_path / "chosen", caplog) == (False, [])
    assert list((tmp_path / "chosen").glob("*/*/*.nbc"))
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("pattern", "damage"),
    [("*.nbc", garble), ("*.nbc", zero), ("*.nbc", remove), ("*.nbi", cut), ("*.nb?", empty), ("*.ready", zero)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_damaged_cache_is_compiled_anew_with_one_line(
    cache_copy: Path, caplog: pytest.LogCaptureFixture, pattern: str, damage: Callable[[Path], None]
) -> None:
    damaged = list(cache_copy.rglob(pattern))
    assert damaged
    for path in damaged:
        damage(path)
    was_cached, (line,) = start(cache_copy, caplog)
    assert not was_cached
    assert f"{cache_copy}" in line
    assert "is damaged: they are compiled again" in line
    assert start(cache_copy, caplog) == (True, [])


def test_files_that_numba_can_not_read_are_compiled_anew(cache_copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Their digests are right: they were written so, by another version of what numba stands on."""
    for path in cache_copy.rglob("*.nbc"):
        zero(path)
    (folder,) = cache_copy.iterdir()
    code_cache.CodeCache(folder).seal(KERNEL, build.BODIES[KERNEL][0])
    was_cached, (line,) = start(cache_copy, caplog)
    assert was_cached
    assert "is damaged" in line
    assert start(cache_copy, caplog) == (True, [])


def test_code_that_was_never_completed_is_not_looked_at(cache_copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A process was killed between writing the code and saying that it is complete."""
    for path in cache_copy.rglob("*.nbc"):
        garble(path)
    for path in cache_copy.rglob("*.ready"):
        path.unlink()
    assert start(cache_copy, caplog) == (False, [])
    assert start(cache_copy, caplog) == (True, [])


def test_code_of_another_processor_is_not_run_even_in_the_place_of_ours(sound_cache: Path, tmp_path: Path) -> None:
    """An image of a disk that moved, folder names and all: numba's index names the processor, too."""
    root, theirs = tmp_path / "ours", tmp_path / "theirs"
    other = run_python(ONE_KERNEL, NUMBA_CACHE_DIR=str(theirs), NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")
    assert (other.stdout.split(), other.stderr) == (["False", "True"], "")
    (ours,), (folder,) = sound_cache.iterdir(), theirs.iterdir()
    assert folder.name != ours.name
    shutil.copytree(folder, root / ours.name)
    result = run_python(ONE_KERNEL, NUMBA_CACHE_DIR=str(root))
    assert (result.returncode, result.stderr) == (0, "")


def test_where_no_cache_can_be_written_kernels_still_run_and_it_is_said(tmp_path: Path) -> None:
    file = tmp_path / "a file, so no folder can be made below it"
    file.touch()
    result = run_python(ONE_KERNEL, NUMBA_CACHE_DIR=str(file))
    assert result.stdout.split() == ["False", "False"], result.stderr
    (line,) = result.stderr.splitlines()
    assert "compiled at every start" in line
    assert "set cache_dir" in line


# As on a full disk: files can be made, and nothing written to them.
FULL_DISK = (
    """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
"""
    + ONE_KERNEL
)


def test_on_a_full_disk_kernels_still_run_and_it_is_said(tmp_path: Path) -> None:
    result = run_python(FULL_DISK, NUMBA_CACHE_DIR=str(tmp_path))
    assert result.stdout.split() == ["False", "False"], result.stderr
    (line,) = result.stderr.splitlines()
    assert "File too large" in line
    assert "compiled at every start" in line


def test_without_numba_the_torch_operators_serve() -> None:
    result = run_python(WITHOUT_NUMBA)
    assert result.returncode == 0, result.stderr


def test_the_environment_can_choose_the_torch_operators() -> None:
    code = "import torch; from kernels.dispatch import use_compiled; print(use_compiled('linear', torch.zeros(1)))"
    assert run_python(code, PAGEMILL_KERNELS="torch").stdout.strip() == "False"
    assert run_python(code, PAGEMILL_KERNELS="").stdout.strip() == "True", "an empty variable counts as unset"
    wrong = run_python(code, PAGEMILL_KERNELS="fast")
    assert wrong.returncode != 0
    assert "PAGEMILL_KERNELS is 'fast'; 'fast' must be one of auto, torch, triton" in wrong.stderr


def fail() -> None:
    assert not use_compiled("linear", torch.zeros(1))
    raise RuntimeError


def test_the_switch_is_put_back_after_an_error() -> None:
    before = selected("linear")
    with pytest.raises(RuntimeError), implementation("torch"):
        fail()
    assert selected("linear") == before
    with pytest.raises(KernelError, match="must be one of auto, torch, triton"), implementation("fast"):
        pass


def test_one_kernel_is_switched_without_the_others() -> None:
    row = torch.zeros(1, 16)
    with implementation("sample=torch,rms_norm=triton"):
        assert not use_compiled("sample", row)
        assert not use_compiled("rms_norm", row)
        assert use_compiled("attention", row)
        assert [selected(kernel) for kernel in ("sample", "rms_norm", "attention")] == ["torch", "triton", "auto"]


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_warm_up_tells_its_progress_and_leaves_nothing_to_compile(quantization: str) -> None:
    told: list[tuple[int, int]] = []
    names: list[str] = []

    def tell(done: int, total: int, name: str) -> None:
        told.append((done, total))
        names.append(name)

    kernels.warmup(torch.float32, 64, 9, 3, tell, quantization)
    count = len(names) - 1
    assert told == [(n, count) for n in range(count + 1)]
    # Of the linear layers' bodies those that the model calls, and all others.
    plain, int8 = {"linear", "gather_rows"}, {"quantize_rows", "quantized_linear", "gather_quantized_rows"}
    others = {"none": int8 | {"int4_linear"}, "int8": plain | {"int4_linear"}, "int4": plain}[quantization]
    assert set(names[:-1]) == set(build.BODIES) - others
    assert kernels.is_compiled(torch.float32, 64, 9, 3, quantization)


def test_a_model_is_compiled_once_all_its_kernels_are_loaded_or_on_disk(
    cache_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "BODIES", {KERNEL: build.BODIES[KERNEL]})
    with fresh_start(cache_copy):
        assert kernels.is_compiled(torch.float32, 64, 9, 3)
        empty(next(cache_copy.rglob("*.nbc")))
        assert not kernels.is_compiled(torch.float32, 64, 9, 3)
        build.address(KERNEL)
        shutil.rmtree(cache_copy)
        assert kernels.is_compiled(torch.float32, 64, 9, 3)


def test_a_model_of_another_dtype_compiles_what_chooses_its_tokens_and_nothing_else() -> None:
    """Its logits become float32 for that. What isn't compiled at the start would be in a step of the first request."""
    names: list[str] = []
    kernels.warmup(torch.bfloat16, 64, 9, 3, lambda done, total, name: names.append(name))
    assert set(names[:-1]) == {"sample", "penalties", "top_logprobs", "run_on_pool", "help_pool"}
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
