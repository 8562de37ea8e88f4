"""Dot products of four bytes: sums[lane] += w[4 lane] x[0] + ... + w[4 lane + 3] x[3], with w unsigned and x signed.

Sixteen lanes side by side share the four values of x, a "quad". Sums are of int32 and exact, in whatever order and on
whatever processor: each gets what it has for this. One instruction with AVX-512 VNNI, AVX-VNNI and NEON's dot product;
with plain AVX-512 and AVX2 two multiplications of 16-bit pairs (the one of bytes saturates); else ordinary arithmetic.
"""

from typing import Final

from llvmlite import ir
from numba.core.registry import cpu_target

from kernels.cpu.vector import I32, I64, INT_VECTOR, LANES, call_llvm, load_value, shuffle, splat_value

I8: Final = ir.IntType(8)
I16: Final = ir.IntType(16)
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


def instruction_of(triple: str, features: str) -> str:
    """The kind of instruction that a processor with these features, as LLVM writes them, should use."""
    has = set(features.split(",")).__contains__
    if triple.startswith("x86_64"):
        order = (("+avx512vnni", "vnni512"), ("+avxvnni", "vnni256"), ("+avx512bw", "pairs512"), ("+avx2", "pairs256"))
        return next((kind for feature, kind in order if has(feature)), "plain")
    return "sdot" if triple.startswith(("aarch64", "arm64")) and has("+dotprod") else "plain"


INSTRUCTION: Final = instruction_of(_TRIPLE, _FEATURES)
# A quad of x in memory: four int8, or four int16 in the order 0, 2, 1, 3.
HAS_PAIRS: Final = INSTRUCTION.startswith("pairs")
QUAD_BYTES: Final = 8 if HAS_PAIRS else 4


def _same(value: int, kind: ir.Type, lanes: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(kind, lanes), [value] * lanes)


def load_quad(builder: ir.IRBuilder, address: ir.Value) -> list[ir.Value]:
    """x as `add_products` takes it: vectors whose lanes are all the same."""
    if INSTRUCTION == "plain":
        quad = [load_value(builder, builder.add(address, ir.Constant(I64, at)), I8) for at in range(4)]
        return [splat_value(builder, builder.sext(each, I32), INT_VECTOR) for each in quad]
    offsets = range(0, QUAD_BYTES, 4)
    words = [load_value(builder, builder.add(address, ir.Constant(I64, at)), I32) for at in offsets]
    return [splat_value(builder, word, INT_VECTOR) for word in words]


def prepare_weights(builder: ir.IRBuilder, words: ir.Value) -> list[ir.Value]:
    """Four unsigned bytes in each of 16 int32, as `add_products` takes them for the x of any number of rows."""
    if INSTRUCTION == "plain":
        shifted = [builder.lshr(words, _same(8 * at, I32, LANES)) for at in range(4)]
        return [builder.and_(each, _same(255, I32, LANES)) for each in shifted]
    if HAS_PAIRS:
        halves = builder.bitcast(words, ir.VectorType(I16, 2 * LANES))
        even = builder.and_(halves, _same(255, I16, 2 * LANES))
        odd = builder.lshr(halves, _same(8, I16, 2 * LANES))
        return [builder.bitcast(each, INT_VECTOR) for each in (even, odd)]
    if INSTRUCTION == "sdot":  # which takes signed bytes: 128 less, and `first_sum` knows it
        return [builder.xor(words, _same(-0x7F7F7F80, I32, LANES))]
    return [words]


def first_sum(builder: ir.IRBuilder, x_sum: ir.Value, zero_point: int) -> ir.Value:
    """What sums begin with, so that they end at those of (w - zero_point) x. x_sum: int32, of all x to come."""
    factor = (128 if INSTRUCTION == "sdot" else 0) - zero_point
    return splat_value(builder, builder.mul(x_sum, ir.Constant(I32, factor)), INT_VECTOR)


def add_products(builder: ir.IRBuilder, sums: ir.Value, weights: list[ir.Value], x: list[ir.Value]) -> ir.Value:
    """The 16 sums with a quad's products added."""
    lanes, name = _INSTRUCTIONS[INSTRUCTION]
    if INSTRUCTION == "plain":
        for w, value in zip(weights, x, strict=True):
            sums = builder.add(sums, builder.mul(w, value))
        return sums
    pieces = []
    for start in range(0, LANES, lanes):
        piece = _piece(builder, sums, start, lanes)
        for w, value in zip(weights, x, strict=True):
            operands = _piece(builder, w, start, lanes), _piece(builder, value, start, lanes)
            piece = _product(builder, name, piece, *operands)
        pieces.append(piece)
    while len(pieces) > 1:
        joined = list(range(2 * pieces[0].type.count))
        pieces = [shuffle(builder, a, b, joined) for a, b in zip(pieces[::2], pieces[1::2], strict=True)]
    return pieces[0]


def _piece(builder: ir.IRBuilder, vector: ir.Value, start: int, lanes: int) -> ir.Value:
    return vector if lanes == LANES else shuffle(builder, vector, vector, list(range(start, start + lanes)))


def _product(builder: ir.IRBuilder, name: str, sums: ir.Value, weights: ir.Value, x: ir.Value) -> ir.Value:
    kind, lanes = sums.type, sums.type.count
    if HAS_PAIRS:
        halves = ir.VectorType(I16, 2 * lanes)
        products = call_llvm(builder, name, kind, builder.bitcast(weights, halves), builder.bitcast(x, halves))
        return builder.add(sums, products)
    if INSTRUCTION == "sdot":
        quads = ir.VectorType(I8, 4 * lanes)
        return call_llvm(builder, name, kind, sums, builder.bitcast(weights, quads), builder.bitcast(x, quads))
    return call_llvm(builder, name, kind, sums, weights, x)
