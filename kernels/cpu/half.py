"""Sixteen float16 as a vector of float32."""

from typing import Any, Final

from llvmlite import ir
from numba.core import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from kernels.cpu.vector import I16, I32, INT_VECTOR, LANES, VECTOR, constant, load_value, same

_TRIPLE, _, _FEATURES = cpu_target.target_context.codegen().magic_tuple()
# Else LLVM would call a function of the compiler's library, which nobody has linked.
HAS_CONVERSION: Final = "+f16c" in _FEATURES.split(",") or _TRIPLE.startswith(("aarch64", "arm64"))
_HALF: Final = ir.HalfType()


def load_halves(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """The numbers at an address."""
    if HAS_CONVERSION:
        return builder.fpext(load_value(builder, address, ir.VectorType(_HALF, LANES)), VECTOR)
    bits = builder.zext(load_value(builder, address, ir.VectorType(I16, LANES)), INT_VECTOR)
    sign = builder.shl(builder.and_(bits, same(0x8000, INT_VECTOR)), same(16, INT_VECTOR))
    # The exponent is 112 too small, or all ones and to stay so.
    magnitude = builder.shl(builder.and_(bits, same(0x7FFF, INT_VECTOR)), same(13, INT_VECTOR))
    number = builder.fmul(builder.bitcast(magnitude, VECTOR), constant(2.0**112))
    is_special = builder.icmp_unsigned(">=", magnitude, same(0x7C00 << 13, INT_VECTOR))
    special = builder.or_(magnitude, same(0x7F800000, INT_VECTOR))
    magnitude = builder.select(is_special, special, builder.bitcast(number, INT_VECTOR))
    return builder.bitcast(builder.or_(magnitude, sign), VECTOR)


@intrinsic  # type: ignore[untyped-decorator]
def half_at(typingctx: Any, address: Any, lane: Any) -> Any:
    """One of the sixteen numbers, as float32."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return builder.extract_element(load_halves(builder, values[0]), builder.trunc(values[1], I32))

    return types.float32(types.int64, types.int64), codegen
