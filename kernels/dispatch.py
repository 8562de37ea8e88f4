"""Which implementation a kernel call takes: numba's on the CPU, Triton's on CUDA, or torch's own operators.

    PAGEMILL_KERNELS              meaning
    auto (default)                numba for what it computes on the CPU, Triton for what it computes on CUDA, torch's
                                  operators for everything else
    torch                         torch's operators everywhere
    triton                        Triton wherever it can compute the call: on CUDA, and on the CPU under
                                  TRITON_INTERPRET=1, which is for tests; torch's operators for everything else
    attention=torch,sample=torch  one of these for each kernel named (`KERNELS`), auto for the others

Every kernel asks `use_compiled` and `use_triton` on each call, so `implementation("torch")` switches a running process.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Final

import torch

from kernels.errors import KernelError

ENV_VAR: Final = "PAGEMILL_KERNELS"
CHOICES: Final = ("auto", "torch", "triton")
KERNELS: Final = (
    *("attention", "rope_and_write", "rms_norm", "silu_and_mul", "linear", "sample", "top_logprobs"),
    *("block_copy", "checksum", "penalties"),
)

log = logging.getLogger("pagemill.kernels")


def parse_choices(text: str) -> Mapping[str, str]:
    """The choice for each of `KERNELS`, from a value of the environment variable.

    Raises KernelError that names what is wrong with it.
    """
    parts = [part.strip() for part in text.split(",")]
    chosen = dict.fromkeys(KERNELS, "auto")
    for part in parts:
        kernel, is_named, choice = part.rpartition("=")
        if choice not in CHOICES:
            raise KernelError(f"{ENV_VAR} is {text!r}; {choice!r} must be one of {', '.join(CHOICES)}")
        if is_named and kernel not in KERNELS:
            raise KernelError(f"{ENV_VAR} is {text!r}; the kernels that it can name are {', '.join(KERNELS)}")
        if not is_named and len(parts) > 1:
            raise KernelError(f"{ENV_VAR} is {text!r}; a list names kernels, like attention=torch,sample=torch")
        chosen.update({kernel: choice} if is_named else dict.fromkeys(KERNELS, choice))
    return chosen


# What Triton's kernels compute with; the KV cache may hold others.
TRITON_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
_HAS_NUMBA: Final = find_spec("numba") is not None
_HAS_TRITON: Final = find_spec("triton") is not None
# Triton itself reads the variable when it is imported, once and for all.
IS_INTERPRETED: Final = os.environ.get("TRITON_INTERPRET", "0") == "1"
_selected = parse_choices(os.environ.get(ENV_VAR) or "auto")
_told: set[tuple[str, str]] = set()


def selected(kernel: str) -> str:
    """The choice in force for a kernel of `KERNELS`: one of `CHOICES`."""
    return _selected[kernel]


@contextmanager
def implementation(choice: str) -> Iterator[None]:
    """Force a choice, written as in the environment variable, for the calls inside the block.

    For tests, and for comparing implementations in one process.
    """
    global _selected  # noqa: PLW0603 - one process-wide switch is the point
    previous, _selected = _selected, parse_choices(choice)
    try:
        yield
    finally:
        _selected = previous


def has_compiled(kernel: str | None = None) -> bool:
    """True where numba's kernel exists and the switch doesn't turn it off; without a name: where all of them do."""
    names = KERNELS if kernel is None else (kernel,)
    return _HAS_NUMBA and all(_selected[name] == "auto" for name in names)


def use_compiled(kernel: str, tensor: torch.Tensor) -> bool:
    """True where a call on `tensor` (and on its companions, of the same device and dtype) takes numba's kernel."""
    return tensor.dtype is torch.float32 and tensor.device.type == "cpu" and _HAS_NUMBA and _selected[kernel] == "auto"


def use_triton(kernel: str, tensor: torch.Tensor) -> bool:
    """True where a call on `tensor` takes Triton's kernel, if that computes such a call at all."""
    return takes_triton(kernel, tensor.device)


def takes_triton(kernel: str, device: torch.device) -> bool:
    """The same of calls on tensors of a device."""
    if _selected[kernel] == "torch" or not _HAS_TRITON:
        return False
    if device.type == "cuda":
        return True
    return IS_INTERPRETED and _selected[kernel] == "triton" and device.type == "cpu"


@cache
def capability_of_cuda(device: torch.device) -> int:
    """Compute capability of a CUDA device, 10 * major + minor: 90 for 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def tell_fallback(kernel: str, why: str) -> None:
    """One log line, once a process, that calls of a kernel take a slower path, and why."""
    if (kernel, why) not in _told:
        _told.add((kernel, why))
        log.warning("the %s kernel falls back to torch's operators: %s", kernel, why)
