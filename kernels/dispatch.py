"""Which implementation a kernel call takes: the compiled one, or the one that is made of torch operators.

    PAGEMILL_KERNELS   meaning
    auto (default)     compiled where it applies (float32 on the CPU, numba installed), torch operators elsewhere
    torch              torch operators everywhere

Every kernel asks `use_compiled(...)` on each call, so `implementation("torch")` switches a running process.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Final

import torch

from kernels.errors import KernelError

ENV_VAR: Final = "PAGEMILL_KERNELS"
CHOICES: Final = ("auto", "torch")


def _from_environment() -> str:
    chosen = os.environ.get(ENV_VAR, "auto")
    if chosen not in CHOICES:
        raise KernelError(f"{ENV_VAR} is {chosen!r}; it must be one of {', '.join(CHOICES)}")
    return chosen


_HAS_NUMBA: Final = find_spec("numba") is not None
_selected = _from_environment()


def selected() -> str:
    """The choice in force: "auto" or "torch"."""
    return _selected


@contextmanager
def implementation(choice: str) -> Iterator[None]:
    """Force a choice of `CHOICES` for the calls inside the block; for tests and for comparing the two."""
    global _selected  # noqa: PLW0603 - one process-wide switch is the point
    if choice not in CHOICES:
        raise KernelError(f"{choice!r} is no implementation; choose one of {', '.join(CHOICES)}")
    previous, _selected = _selected, choice
    try:
        yield
    finally:
        _selected = previous


def has_compiled() -> bool:
    """True where compiled kernels exist and the switch does not turn them off."""
    return _HAS_NUMBA and _selected == "auto"


def use_compiled(tensor: torch.Tensor) -> bool:
    """True where a call on `tensor` (and on its companions, of the same device and dtype) takes the compiled kernel."""
    return has_compiled() and tensor.dtype is torch.float32 and tensor.device.type == "cpu"
