"""What `make kernels-aot` compiles: launches with tensors that have no memory."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch


@dataclass(frozen=True, slots=True)
class Case:
    """Launches that stand for a kernel in real shapes. A module of kernels/gpu lists its own as `CASES`.

    `run` calls the function that launches in the product, on tensors of `meta`, so that a changed launch changes what
    is checked. `is_decode`: the kernels that it launches must hold matrix instructions, at least one of them.
    `min_capability`: the least target, 10 * major + minor, that can hold it (89 where e4m3 is read or written).
    """

    name: str
    run: Callable[[], object]
    is_decode: bool = False
    min_capability: int = 80


# A tensor without memory, of this shape and dtype: `meta(4, 128, dtype=torch.bfloat16)`.
meta: Final = partial(torch.empty, device="meta")
