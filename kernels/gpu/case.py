"""What `make kernels-aot` compiles: launches with tensors that have no memory."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from kernels.cache_dtype import FP8_CAPABILITY

# Compute capabilities that kernels are compiled for, 10 * major + minor.
TARGETS: Final = (80, 89, 90, 100)
# Those that can read and write e4m3.
FP8_TARGETS: Final = tuple(target for target in TARGETS if target >= FP8_CAPABILITY)


@dataclass(frozen=True, slots=True)
class Case:
    """Launches that stand for a kernel in real shapes. A module of kernels/gpu lists its own as `CASES`.

    `run` calls the function that launches in the product, on tensors of `meta`, so that a changed launch changes what
    is checked. `is_decode`: the kernels that it launches must hold matrix instructions, at least one of them.
    `targets`: those of `TARGETS` that it is compiled for. Two stand for all where a case differs little from another.
    """

    name: str
    run: Callable[[], object]
    is_decode: bool = False
    targets: tuple[int, ...] = TARGETS


# A tensor without memory, of this shape and dtype: `meta(4, 128, dtype=torch.bfloat16)`.
meta: Final = partial(torch.empty, device="meta")
