"""Rows of float32 → int8 in groups, each with a scale of its own: what `quantized_product` takes as X."""

from typing import Any, Final

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from kernels.cpu.dot import HAS_PAIRS, I8, I16, QUAD_BYTES
from kernels.cpu.helper import helper
from kernels.cpu.quantized_tile import FACT_BYTES, GROUP, NUM_QUADS
from kernels.cpu.vector import (
    F32,
    I32,
    I64,
    INT_VECTOR,
    LANES,
    VECTOR,
    VECTOR_BYTES,
    call_llvm,
    constant,
    load_value,
    pointer,
    shuffle,
    splat_value,
)

# Below this a group counts as zeros: 127 / maximum must be finite.
MIN_MAXIMUM: Final = 1e-30
# Adding 1.5 * 2^23 rounds to the nearest integer, of two to the even one, and leaves it in the low bits.
_MAGIC: Final = 12582912.0


def _fold(builder: ir.IRBuilder, vector: ir.Value, combine: Any) -> ir.Value:
    """The lanes combined into one."""
    for half in (8, 4, 2, 1):
        folded = shuffle(builder, vector, vector, [(lane + half) % LANES for lane in range(LANES)])
        vector = combine(vector, folded)
    return builder.extract_element(vector, ir.Constant(I32, 0))


@intrinsic  # type: ignore[untyped-decorator]
def _quantize_group(typingctx: Any, x: Any, quads: Any, facts: Any) -> Any:
    """GROUP floats at x → as many integers of -127 ... 127 at quads, and their scale and sum at facts.

    scale = maximum / 127, each the nearest integer to x * (127 / maximum). Where one is not finite the scale is NaN.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        x_value, quads_value, facts_value = values

        def larger(a: ir.Value, b: ir.Value) -> ir.Value:
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        offsets = [ir.Constant(I64, at) for at in range(0, 4 * GROUP, VECTOR_BYTES)]
        vectors = [load_value(builder, builder.add(x_value, offset)) for offset in offsets]
        largest, spoiled = constant(0.0), constant(0.0)
        for vector in vectors:
            largest = larger(call_llvm(builder, "llvm.fabs.v16f32", VECTOR, vector), largest)
            spoiled = builder.fadd(spoiled, builder.fmul(vector, constant(0.0)))
        maximum = _fold(builder, largest, larger)
        is_tiny = builder.fcmp_ordered("<", maximum, ir.Constant(F32, MIN_MAXIMUM))
        safe = builder.select(is_tiny, ir.Constant(F32, 1.0), maximum)
        limit, zero = ir.Constant(F32, 127.0), ir.Constant(F32, 0.0)
        factor = builder.select(is_tiny, zero, builder.fdiv(limit, safe))
        scale = builder.select(is_tiny, zero, builder.fdiv(maximum, limit))
        scale = builder.fadd(scale, _fold(builder, spoiled, builder.fadd))
        total = ir.Constant(INT_VECTOR, [0] * LANES)
        for index, vector in enumerate(vectors):
            shifted = builder.fadd(builder.fmul(vector, splat_value(builder, factor)), constant(_MAGIC))
            bits = builder.bitcast(shifted, INT_VECTOR)
            bytes_ = builder.trunc(bits, ir.VectorType(I8, LANES))
            total = builder.add(total, builder.sext(bytes_, INT_VECTOR))
            stored = bytes_
            if HAS_PAIRS:
                order = [4 * (lane // 4) + (0, 2, 1, 3)[lane % 4] for lane in range(LANES)]
                wide = builder.sext(bytes_, ir.VectorType(I16, LANES))
                stored = shuffle(builder, wide, wide, order)
            address = builder.add(quads_value, ir.Constant(I64, index * (LANES // 4) * QUAD_BYTES))
            builder.store(stored, pointer(builder, address, stored.type), align=4)
        builder.store(scale, pointer(builder, facts_value, F32), align=4)
        place = builder.add(facts_value, ir.Constant(I64, 4))
        builder.store(_fold(builder, total, builder.add), pointer(builder, place, I32), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@helper
def quantize_row(x: int, num_groups: int, target: int) -> None:
    """GROUP * num_groups floats at x → a row of X at target."""
    facts = target + num_groups * (NUM_QUADS * QUAD_BYTES)
    for group in range(num_groups):
        quads = target + group * (NUM_QUADS * QUAD_BYTES)
        _quantize_group(x + group * (4 * GROUP), quads, facts + group * FACT_BYTES)
