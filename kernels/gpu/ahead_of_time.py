"""Compiling kernels for a GPU that isn't there: a driver that only names the target, and launches that only compile.

Works in a process without TRITON_INTERPRET alone; nothing of it is called in the product.
"""

import importlib
import pkgutil
import re
import subprocess
import tempfile
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


def compile_case(case: Case, capability: int) -> list[Compiled]:
    """Compile what the case launches, for this capability (90 is sm_90). Nothing runs, nor can it later in the process.

    Raises KernelError under the interpreter, where nothing can be compiled.
    """
    if IS_INTERPRETED:
        raise KernelError("TRITON_INTERPRET=1 is set: unset it, since interpreted kernels can't be compiled")
    compiled: list[Compiled] = []

    def compile_only(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        binary = kernel.warmup(*args, grid=grid, **options)
        compiled.append(_examined(kernel.__name__, binary, capability))

    triton.runtime.driver.set_active(_NamesTarget(capability))
    with launching_by(compile_only):
        case.run()
    return compiled


def _examined(name: str, binary: Any, capability: int) -> Compiled:
    ptx: str = binary.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        cubin.write_bytes(binary.asm["cubin"])
        usage = _output(triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin))
        spill_bytes = 0
        # What is spilled lies in the stack. Only ptxas tells how much, and takes as long as it took to compile.
        if max(_numbers(r"STACK:(\d+)", usage)):
            target = re.search(r"^\.target\s+(sm_\w+)", ptx, re.MULTILINE)
            assert target is not None, "PTX names its target"
            ptxas = get_ptxas(capability).path
            told = _output(ptxas, "-v", f"--gpu-name={target[1]}", str(source), "-o", str(cubin))
            spill_bytes = sum(_numbers(r"(\d+) bytes spill (?:stores|loads)", told))
    return Compiled(
        kernel=name,
        num_registers=max(_numbers(r"REG:(\d+)", usage)),
        spill_bytes=spill_bytes,
        shared_bytes=binary.metadata.shared,
        num_matrix_instructions=len(_MATRIX.findall(ptx)),
    )


def _output(*command: str) -> str:
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    return told.stdout + told.stderr


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
