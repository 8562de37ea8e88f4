"""Vectors of 16 float32 for kernel bodies, and the loads, stores and atomics that go with them.

A body handles raw addresses (int64, in bytes) and `f32x16` values, which LLVM keeps in one AVX-512 register, two of
AVX2 or four of NEON. Each operation is one IEEE operation per lane in the order written: nothing here is fast-math, so
the bits of a result depend on the written order alone. Only `fma` fuses.
"""

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, models, register_model

LANES: Final = 16
VECTOR_BYTES: Final = 4 * LANES

F32: Final = ir.FloatType()
F64: Final = ir.DoubleType()
I8: Final = ir.IntType(8)
I16: Final = ir.IntType(16)
I32: Final = ir.IntType(32)
I64: Final = ir.IntType(64)
VECTOR: Final = ir.VectorType(F32, LANES)
INT_VECTOR: Final = ir.VectorType(I32, LANES)


class _F32x16(types.Type):
    def __init__(self) -> None:
        super().__init__(name="f32x16")


f32x16: Final = _F32x16()


@register_model(_F32x16)
class _F32x16Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, VECTOR)


def pointer(builder: ir.IRBuilder, address: ir.Value, pointee: ir.Type) -> ir.Value:
    """The address as a pointer to `pointee`."""
    return builder.inttoptr(address, pointee.as_pointer())


def splat_value(builder: ir.IRBuilder, scalar: ir.Value, vector: ir.VectorType = VECTOR) -> ir.Value:
    """All lanes of a vector set to one value."""
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(I32, 0))
    zeros = ir.Constant(INT_VECTOR, [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def same(value: int, kind: ir.VectorType) -> ir.Constant:
    """A constant vector of integers."""
    return ir.Constant(kind, [value] * kind.count)


def constant(value: float) -> ir.Constant:
    """A vector constant."""
    return ir.Constant(VECTOR, [value] * LANES)


def call_llvm(builder: ir.IRBuilder, name: str, result: ir.Type, *operands: ir.Value) -> ir.Value:
    """Call an LLVM intrinsic function by its full name."""
    function_type = ir.FunctionType(result, [operand.type for operand in operands])
    function = builder.module.globals.get(name) or ir.Function(builder.module, function_type, name)
    return builder.call(function, operands)


def fma_value(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c with one rounding."""
    return call_llvm(builder, "llvm.fma.v16f32", VECTOR, a, b, c)


def load_value(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type = VECTOR) -> ir.Value:
    """Load from an address that is aligned to 4 bytes only."""
    return builder.load(pointer(builder, address, kind), align=4)


def shuffle(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: list[int]) -> ir.Value:
    """Lanes of a (0-15) and b (16-31) by number."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def _operation(result: Any, arguments: tuple[Any, ...], emit: Callable[..., ir.Value]) -> Callable[..., Any]:
    """An intrinsic of fixed argument types from a function that emits its code."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        emitted = emit(builder, *values)
        return context.get_dummy_value() if result is types.void else emitted

    names = ", ".join(f"a{i}" for i in range(len(arguments)))
    scope: dict[str, Any] = {"signature": result(*arguments), "codegen": codegen}
    # numba reads the number of arguments off the function, so it has to be written out.
    exec(f"def operation(typingctx, {names}):\n    return signature, codegen", scope)  # noqa: S102
    return intrinsic(scope["operation"])  # type: ignore[no-any-return]


def _store(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    builder.store(value, pointer(builder, address, value.type), align=4)


def prefetch_value(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Ask for the cache line of an address, which need not be one that may be read."""
    byte_pointer = pointer(builder, address, ir.IntType(8))
    read, locality, data = (ir.Constant(I32, n) for n in (0, 2, 1))
    call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), byte_pointer, read, locality, data)


def _halving(combine: Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value]) -> Callable[..., ir.Value]:
    """Reduce the lanes by folding the upper half onto the lower, four times: a fixed order."""

    def emit(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
        for half in (8, 4, 2, 1):
            folded = shuffle(builder, vector, vector, [(lane + half) % LANES for lane in range(LANES)])
            vector = combine(builder, vector, folded)
        return builder.extract_element(vector, ir.Constant(I32, 0))

    return emit


def _maximum(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """exp(x) for x <= 88, relative error below 2e-7, exactly 0 below -87 and at -inf, NaN for NaN.

    x log2(e) = n + f with |f| <= 1/2; 2^n is made in the exponent field, and e^(f ln 2) is a polynomial of degree 7.
    """
    is_zero = builder.fcmp_ordered("<", x, constant(-87.0))
    x = builder.select(is_zero, constant(0.0), x)
    # Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits; no conversion that NaN would upset.
    magic = constant(12582912.0)
    shifted = fma_value(builder, x, constant(1.4426950408889634), magic)
    n = builder.fsub(shifted, magic)
    # ln 2 in two parts, the first of few bits, so that n * ln 2 is subtracted without a loss.
    r = fma_value(builder, n, constant(-0.693359375), x)
    r = fma_value(builder, n, constant(2.12194440054690583e-4), r)
    y = constant(1.0 / 5040)
    for factorial in (720, 120, 24, 6, 2, 1, 1):
        y = fma_value(builder, y, r, constant(1.0 / factorial))
    biased = builder.add(builder.bitcast(shifted, INT_VECTOR), ir.Constant(INT_VECTOR, [127] * LANES))
    power = builder.bitcast(builder.shl(biased, ir.Constant(INT_VECTOR, [23] * LANES)), VECTOR)
    return builder.select(is_zero, constant(0.0), builder.fmul(y, power))


def _first_lanes(builder: ir.IRBuilder, vector: ir.Value, count: ir.Value, other: ir.Value) -> ir.Value:
    lane = ir.Constant(ir.VectorType(I64, LANES), list(range(LANES)))
    is_kept = builder.icmp_signed("<", lane, splat_value(builder, count, ir.VectorType(I64, LANES)))
    return builder.select(is_kept, vector, splat_value(builder, other))


def _lanes_from(builder: ir.IRBuilder, vector: ir.Value, first: ir.Value, other: ir.Value) -> ir.Value:
    lane = ir.Constant(ir.VectorType(I64, LANES), list(range(LANES)))
    is_kept = builder.icmp_signed(">=", lane, splat_value(builder, first, ir.VectorType(I64, LANES)))
    return builder.select(is_kept, vector, splat_value(builder, other))


def _sigmoid(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """1 / (1 + exp(-x)), from the exponential of -|x|, which cannot overflow."""
    e = _exp(builder, builder.fneg(call_llvm(builder, "llvm.fabs.v16f32", VECTOR, x)))
    numerator = builder.select(builder.fcmp_ordered(">=", x, constant(0.0)), constant(1.0), e)
    return builder.fdiv(numerator, builder.fadd(constant(1.0), e))


def _finite_or(builder: ir.IRBuilder, x: ir.Value, other: ir.Value) -> ir.Value:
    size = call_llvm(builder, "llvm.fabs.v16f32", VECTOR, x)
    return builder.select(builder.fcmp_ordered("<", size, constant(float("inf"))), x, splat_value(builder, other))


def _select_greater(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered(">", a, b), x, y)


def _lanes_less(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    mask = builder.bitcast(builder.fcmp_ordered("<", a, b), ir.IntType(LANES))
    return builder.zext(mask, I64)


_int, _f32, _void = types.int64, types.float32, types.void
_v = f32x16

load: Final = _operation(_v, (_int,), load_value)
store: Final = _operation(_void, (_int, _v), _store)
splat: Final = _operation(_v, (_f32,), splat_value)
add: Final = _operation(_v, (_v, _v), lambda b, x, y: b.fadd(x, y))
sub: Final = _operation(_v, (_v, _v), lambda b, x, y: b.fsub(x, y))
mul: Final = _operation(_v, (_v, _v), lambda b, x, y: b.fmul(x, y))
div: Final = _operation(_v, (_v, _v), lambda b, x, y: b.fdiv(x, y))
maximum: Final = _operation(_v, (_v, _v), _maximum)
fma: Final = _operation(_v, (_v, _v, _v), fma_value)
exp: Final = _operation(_v, (_v,), _exp)
reduce_add: Final = _operation(_f32, (_v,), _halving(lambda b, x, y: b.fadd(x, y)))
reduce_max: Final = _operation(_f32, (_v,), _halving(_maximum))
# The first `count` lanes of a vector, a scalar in the others.
first_lanes: Final = _operation(_v, (_v, _int, _f32), _first_lanes)
# The lanes from number `first` on, a scalar in those before.
lanes_from: Final = _operation(_v, (_v, _int, _f32), _lanes_from)

sigmoid: Final = _operation(_v, (_v,), _sigmoid)
# Lanes of x where they are finite, a scalar where not.
finite_or: Final = _operation(_v, (_v, _f32), _finite_or)
# Per lane: x where a > b, else y.
select_greater: Final = _operation(_v, (_v, _v, _v, _v), _select_greater)
# Bit i is set where lane i of a is less than that of b.
lanes_less: Final = _operation(_int, (_v, _v), _lanes_less)

load_f32: Final = _operation(_f32, (_int,), lambda b, a: load_value(b, a, F32))
load_f64: Final = _operation(types.float64, (_int,), lambda b, a: load_value(b, a, F64))
load_i32: Final = _operation(_int, (_int,), lambda b, a: b.sext(load_value(b, a, I32), I64))
load_i64: Final = _operation(_int, (_int,), lambda b, a: load_value(b, a, I64))
f64_bits: Final = _operation(_int, (types.float64,), lambda b, x: b.bitcast(x, I64))
bits_f64: Final = _operation(types.float64, (_int,), lambda b, x: b.bitcast(x, F64))
store_f64: Final = _operation(_void, (_int, types.float64), _store)
store_f32: Final = _operation(_void, (_int, _f32), _store)
store_i64: Final = _operation(_void, (_int, _int), _store)
prefetch: Final = _operation(_void, (_int,), prefetch_value)
# Add to a counter that threads share; gives what stood there before.
fetch_add: Final = _operation(_int, (_int, _int), lambda b, a, n: b.atomic_rmw("add", pointer(b, a, I64), n, "seq_cst"))
