"""Compiling kernels for a GPU that isn't there: a driver that only names the target, and launches that only compile.

Works in a process without TRITON_INTERPRET alone; nothing of it is called in the product.
"""

import importlib
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas

import kernels.gpu
from kernels.dispatch import IS_INTERPRETED
from kernels.errors import KernelError
from kernels.gpu.case import Case
from kernels.gpu.common import launching_by

# Matrix instructions in PTX: Ampere's and Ada's, Hopper's, Blackwell's.
_MATRIX = re.compile(r"^\s*(?:@\S+\s+)?(mma\.sync|wgmma\.mma_async|tcgen05\.mma)", re.MULTILINE)


class _NamesTarget:
    """Triton's driver, of which compiling asks only these. Each capability is a device of its own, with its cache."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", self._capability, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel as it was compiled for one target."""

    kernel: str
    num_registers: int
    spill_bytes: int
    shared_bytes: int
    num_matrix_instructions: int


@contextmanager
def _target(capability: int) -> Iterator[None]:
    driver = triton.runtime.driver
    previous = driver._active
    driver.set_active(_NamesTarget(capability))
    try:
        yield
    finally:
        driver._active = previous


def compile_case(case: Case, capability: int) -> list[Compiled]:
    """Compile what the case launches, for this capability (90 is sm_90). Nothing runs.

    Raises KernelError under the interpreter, where nothing can be compiled.
    """
    if IS_INTERPRETED:
        raise KernelError("TRITON_INTERPRET=1 is set: unset it, since interpreted kernels can't be compiled")
    compiled: list[Compiled] = []

    def compile_only(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        binary = kernel.warmup(*args, grid=grid, **options)
        compiled.append(_examined(kernel.__name__, binary, capability))

    with _target(capability), launching_by(compile_only):
        case.run()
    return compiled


def _examined(name: str, binary: Any, capability: int) -> Compiled:
    """Registers and spills are what ptxas says of the PTX: the binary itself would have to be loaded to tell them."""
    ptx: str = binary.asm["ptx"]
    target = re.search(r"^\.target\s+(sm_\w+)", ptx, re.MULTILINE)
    assert target is not None, "PTX names its target"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={target[1]}", str(source), "-o", f"{folder}/cubin"]
        told = subprocess.run(command, capture_output=True, text=True, check=True)
    report = told.stdout + told.stderr
    return Compiled(
        kernel=name,
        num_registers=max(_numbers(r"Used (\d+) registers", report)),
        spill_bytes=sum(_numbers(r"(\d+) bytes spill (?:stores|loads)", report)),
        shared_bytes=binary.metadata.shared,
        num_matrix_instructions=len(_MATRIX.findall(ptx)),
    )


def _numbers(pattern: str, text: str) -> list[int]:
    return [int(number) for number in re.findall(pattern, text)]


def modules() -> list[Any]:
    """Every module of kernels/gpu, imported."""
    names = sorted(module.name for module in pkgutil.iter_modules(kernels.gpu.__path__))
    return [importlib.import_module(f"kernels.gpu.{name}") for name in names]


def all_cases() -> list[Case]:
    """The `CASES` of every module, in the modules' order of names."""
    return [case for module in modules() for case in getattr(module, "CASES", ())]


def all_kernels() -> set[str]:
    """Names of all jit functions that are launched: by agreement those that end in `_kernel`."""
    return {name for module in modules() for name in vars(module) if name.endswith("_kernel")}
