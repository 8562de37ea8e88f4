"""Rows of float32 → integers of 16 bits, with a scale for each row: what `quantized_product` takes as X."""

from math import inf, nan
from typing import Any, Final

from llvmlite import ir
from numba import float32
from numba.core import types
from numba.extending import intrinsic

from kernels.cpu.dot import HAS_BYTES, PAIR_ORDER, QUAD_BYTES, X_LIMIT
from kernels.cpu.helper import helper
from kernels.cpu.quantized_tile import GROUP, SUM_BYTES, X_GROUP_BYTES
from kernels.cpu.vector import (
    F32,
    I8,
    I16,
    I32,
    I64,
    INT_VECTOR,
    LANES,
    VECTOR_BYTES,
    call_llvm,
    constant,
    load_value,
    pointer,
    same,
    shuffle,
    splat_value,
    store_f32,
)

# A row whose largest magnitude is below this counts as zeros: X_LIMIT / magnitude must be finite.
MIN_MAGNITUDE: Final = 1e-30
# Adding 1.5 * 2^23 rounds to the nearest integer, of two to the even one, and leaves it in the low bits.
_MAGIC: Final = 12582912.0
_BYTES: Final = ir.VectorType(I8, LANES)
_SHORTS: Final = ir.VectorType(I16, LANES)
# The 16 high bytes (0-15) and low bytes (16-31) of four quads, or their 16 integers, as they are stored.
_BYTE_ORDER: Final = [part + quad + at for quad in range(0, LANES, 4) for part in (0, LANES) for at in range(4)]
_INTEGER_ORDER: Final = [quad + at for quad in range(0, LANES, 4) for at in PAIR_ORDER]


@intrinsic  # type: ignore[untyped-decorator]
def _largest(typingctx: Any, x: Any, num_vectors: Any) -> Any:
    """The largest magnitude among num_vectors * 16 floats at x; not finite where one isn't."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        x_value, count = values
        before, loop, done = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("done")
        builder.branch(loop)
        builder.position_at_end(loop)
        index, largest = builder.phi(I64), builder.phi(INT_VECTOR)
        address = builder.add(x_value, builder.mul(index, ir.Constant(I64, VECTOR_BYTES)))
        # Of magnitudes the bits are ordered as the numbers, with infinity and NaN above all.
        bits = builder.and_(load_value(builder, address, INT_VECTOR), same(0x7FFFFFFF, INT_VECTOR))
        larger = builder.select(builder.icmp_signed(">", bits, largest), bits, largest)
        following = builder.add(index, ir.Constant(I64, 1))
        for phi, first, later in ((index, ir.Constant(I64, 0), following), (largest, same(0, INT_VECTOR), larger)):
            phi.add_incoming(first, before)
            phi.add_incoming(later, loop)
        builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
        builder.position_at_end(done)
        return builder.bitcast(call_llvm(builder, "llvm.vector.reduce.umax.v16i32", I32, larger), F32)

    return types.float32(types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _quantize_group(typingctx: Any, x: Any, factor: Any, quads: Any) -> Any:
    """GROUP floats at x → the nearest integers to x * factor, as quads; gives their sum.

    factor is 0 for a row that isn't finite; what comes out is then of no account.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        x_value, factor_value, quads_value = values
        factors, total = splat_value(builder, factor_value), same(0, INT_VECTOR)
        for number, start in enumerate(range(0, GROUP, LANES)):
            vector = load_value(builder, builder.add(x_value, ir.Constant(I64, number * VECTOR_BYTES)))
            shifted = builder.fadd(builder.fmul(vector, factors), constant(_MAGIC))
            shorts = builder.trunc(builder.bitcast(shifted, INT_VECTOR), _SHORTS)
            total = builder.add(total, builder.sext(shorts, INT_VECTOR))
            if HAS_BYTES:
                high = builder.ashr(builder.add(shorts, same(128, _SHORTS)), same(8, _SHORTS))
                parts = builder.trunc(high, _BYTES), builder.trunc(shorts, _BYTES)
                stored = shuffle(builder, *parts, _BYTE_ORDER)
            else:
                stored = shuffle(builder, shorts, shorts, _INTEGER_ORDER)
            place = builder.add(quads_value, ir.Constant(I64, start // 4 * QUAD_BYTES))
            builder.store(stored, pointer(builder, place, stored.type), align=4)
        return builder.sitofp(call_llvm(builder, "llvm.vector.reduce.add.v16i32", I32, total), F32)

    return types.float32(types.int64, types.float32, types.int64), codegen


@helper
def quantize_row(x: int, num_groups: int, target: int) -> None:
    """GROUP * num_groups floats at x → a row of X at target.

    scale = largest magnitude / X_LIMIT, or NaN where that isn't finite, and the nearest integers to
    x * (X_LIMIT / largest magnitude).
    """
    sums = target + num_groups * X_GROUP_BYTES
    largest = _largest(x, num_groups * (GROUP // LANES))
    factor = scale = float32(0.0)
    if not largest < float32(inf):
        scale = float32(nan)
    elif largest >= float32(MIN_MAGNITUDE):
        factor, scale = float32(X_LIMIT) / largest, largest / float32(X_LIMIT)
    for group in range(num_groups):
        total = _quantize_group(x + group * (4 * GROUP), factor, target + group * X_GROUP_BYTES)
        store_f32(sums + group * SUM_BYTES, total)
    store_f32(sums + num_groups * SUM_BYTES, scale)
