"""y = x Wᵀ + b over a weight of int4: as quantized_linear.py, but that two quads lie in one vector of bytes.

a panel of W, group after group of 32
┌───────────┬───────────┬────────────────────────────────────┐
│ 16 scales │ 16 minima │ 4 × 16 × 4 bytes: of quad 2 n, and │ ...
│ (float16) │ (float16) │ 16 times those of quad 2 n + 1     │
└───────────┴───────────┴────────────────────────────────────┘
"""

from typing import Final

from llvmlite import ir

from kernels.cpu.quantized_linear import linear_over
from kernels.cpu.quantized_tile import NUM_QUADS, QUADS_AT, Layout, load_words
from kernels.cpu.vector import INT_VECTOR, VECTOR_BYTES, same


def _load_quad(builder: ir.IRBuilder, quads: ir.Value, quad: int) -> ir.Value:
    """One of the two quads of a vector; the compiler loads it once for both."""
    words = load_words(builder, quads, quad // 2)
    if quad % 2:
        words = builder.lshr(words, same(4, INT_VECTOR))
    return builder.and_(words, same(0x0F0F0F0F, INT_VECTOR))


NIBBLES: Final = Layout("int4", QUADS_AT + VECTOR_BYTES * NUM_QUADS // 2, _load_quad)
_linear: Final = linear_over(NIBBLES)


def int4_linear(task: int) -> None:
    """Work item and words of the task: as of `quantized_linear`."""
    _linear(task)
