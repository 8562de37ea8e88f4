"""Dot products of bytes with 16-bit integers: sums[lane] += w[4 lane] x[0] + ... + w[4 lane + 3] x[3].

Sixteen lanes side by side share four values of x, a "quad". w is unsigned, x signed; x is kept so that |x| <= X_LIMIT.
Sums are exact, in whatever order and on whatever processor, as long as they fit int32: each gets what it has for this.

- AVX-512 VNNI, AVX-VNNI and NEON's dot product take four bytes by four bytes: x is 256 high + low, and the sums of both
  are kept apart until the end.
- AVX-512 without it and AVX2 multiply pairs of 16-bit integers.
- Else ordinary arithmetic.
"""

from typing import Final

from llvmlite import ir
from numba.core.registry import cpu_target

from kernels.cpu.vector import (
    I8,
    I16,
    I32,
    I64,
    INT_VECTOR,
    LANES,
    call_llvm,
    load_value,
    pointer,
    same,
    shuffle,
    splat_value,
)

_TRIPLE, _, _FEATURES = cpu_target.target_context.codegen().magic_tuple()

# Kind of instruction → lanes of it, its name in LLVM.
_INSTRUCTIONS: Final = {
    "vnni512": (16, "llvm.x86.avx512.vpdpbusd.512"),
    "vnni256": (8, "llvm.x86.avx512.vpdpbusd.256"),
    "pairs512": (16, "llvm.x86.avx512.pmaddw.d.512"),
    "pairs256": (8, "llvm.x86.avx2.pmadd.wd"),
    "sdot": (4, "llvm.aarch64.neon.sdot.v4i32.v16i8"),
    "plain": (16, ""),
}
# The high byte is one of -127 ... 127 then, and so is -x.
X_LIMIT: Final = 127 * 256
# A quad of x in memory: four high bytes and four low ones, or four int16 in the order 0, 2, 1, 3.
QUAD_BYTES: Final = 8
PAIR_ORDER: Final = (0, 2, 1, 3)


def instruction_of(triple: str, features: str) -> str:
    """The kind of instruction that a processor with these features, as LLVM writes them, should use."""
    has = set(features.split(",")).__contains__
    if triple.startswith("x86_64"):
        order = (("+avx512vnni", "vnni512"), ("+avxvnni", "vnni256"), ("+avx512bw", "pairs512"), ("+avx2", "pairs256"))
        return next((kind for feature, kind in order if has(feature)), "plain")
    return "sdot" if triple.startswith(("aarch64", "arm64")) and has("+dotprod") else "plain"


INSTRUCTION: Final = instruction_of(_TRIPLE, _FEATURES)
HAS_BYTES: Final = INSTRUCTION in ("vnni512", "vnni256", "sdot")
# Vectors of sums for each 16 outputs: those of high and of low bytes.
NUM_SUMS: Final = 2 if HAS_BYTES else 1

Sums = list[ir.Value]


def load_quad(builder: ir.IRBuilder, address: ir.Value) -> Sums:
    """x as `add_products` takes it: vectors whose lanes are all the same."""
    if INSTRUCTION == "plain":
        at = [builder.add(address, ir.Constant(I64, 2 * PAIR_ORDER.index(k))) for k in range(4)]
        quad = [builder.load(pointer(builder, place, I16), align=2) for place in at]
        return [splat_value(builder, builder.sext(each, I32), INT_VECTOR) for each in quad]
    words = [load_value(builder, builder.add(address, ir.Constant(I64, at)), I32) for at in (0, 4)]
    return [splat_value(builder, word, INT_VECTOR) for word in words]


def prepare_weights(builder: ir.IRBuilder, words: ir.Value) -> list[ir.Value]:
    """Four unsigned bytes in each of 16 int32, as `add_products` takes them for the x of any number of rows."""
    if INSTRUCTION == "plain":
        shifted = [builder.lshr(words, same(8 * at, INT_VECTOR)) for at in range(4)]
        return [builder.and_(each, same(255, INT_VECTOR)) for each in shifted]
    if INSTRUCTION == "sdot":  # which takes signed bytes: 128 less, and `finished` makes up for it
        words = builder.xor(words, same(-0x7F7F7F80, INT_VECTOR))
    if HAS_BYTES:
        return [words, words]
    pairs = ir.VectorType(I16, 2 * LANES)
    halves = builder.bitcast(words, pairs)
    even, odd = builder.and_(halves, same(255, pairs)), builder.lshr(halves, same(8, pairs))
    return [builder.bitcast(each, INT_VECTOR) for each in (even, odd)]


def no_sums() -> Sums:
    """Sums to begin with."""
    return [same(0, INT_VECTOR)] * NUM_SUMS


def add_products(builder: ir.IRBuilder, sums: Sums, weights: list[ir.Value], x: list[ir.Value]) -> Sums:
    """The sums with a quad's products added."""
    if HAS_BYTES:
        return [_added(builder, *each) for each in zip(sums, weights, x, strict=True)]
    total = sums[0]
    for w, value in zip(weights, x, strict=True):
        total = _added(builder, total, w, value)
    return [total]


def finished(builder: ir.IRBuilder, sums: Sums, x_sum: ir.Value) -> ir.Value:
    """The 16 sums, int32. x_sum: the sum of all x that were there, int32."""
    if not HAS_BYTES:
        return sums[0]
    high, low = sums
    total = builder.add(builder.shl(high, same(8, INT_VECTOR)), low)
    if INSTRUCTION == "sdot":
        return builder.add(total, splat_value(builder, builder.mul(x_sum, ir.Constant(I32, 128)), INT_VECTOR))
    return total


def _added(builder: ir.IRBuilder, sums: ir.Value, weights: ir.Value, x: ir.Value) -> ir.Value:
    """One instruction's worth, for as many lanes at a time as it takes."""
    lanes, name = _INSTRUCTIONS[INSTRUCTION]
    if INSTRUCTION == "plain":
        return builder.add(sums, builder.mul(weights, x))
    pieces = []
    for start in range(0, LANES, lanes):
        parts = [_piece(builder, vector, start, lanes) for vector in (sums, weights, x)]
        pieces.append(_product(builder, name, *parts))
    while len(pieces) > 1:
        joined = list(range(2 * pieces[0].type.count))
        pieces = [shuffle(builder, a, b, joined) for a, b in zip(pieces[::2], pieces[1::2], strict=True)]
    return pieces[0]


def _piece(builder: ir.IRBuilder, vector: ir.Value, start: int, lanes: int) -> ir.Value:
    return vector if lanes == LANES else shuffle(builder, vector, vector, list(range(start, start + lanes)))


def _product(builder: ir.IRBuilder, name: str, sums: ir.Value, weights: ir.Value, x: ir.Value) -> ir.Value:
    kind, lanes = sums.type, sums.type.count
    if not HAS_BYTES:
        pairs = ir.VectorType(I16, 2 * lanes)
        return builder.add(
            sums, call_llvm(builder, name, kind, builder.bitcast(weights, pairs), builder.bitcast(x, pairs))
        )
    if INSTRUCTION == "sdot":
        quads = ir.VectorType(I8, 4 * lanes)
        return call_llvm(builder, name, kind, sums, builder.bitcast(weights, quads), builder.bitcast(x, quads))
    return call_llvm(builder, name, kind, sums, weights, x)
