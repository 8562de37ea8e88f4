"""Sixteen keys side by side: rows of a paged cache into the panels that `product` reads as its right-hand side."""

from typing import Any, Final

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from kernels.cpu.vector import I64, LANES, VECTOR, VECTOR_BYTES, load_value, pointer, shuffle

# Lane numbers (0-15 of the first operand, 16-31 of the second) of the two interleavings within groups of four lanes.
_LOW: Final = [lane for g in range(0, 16, 4) for lane in (g, g + 16, g + 1, g + 17)]
_HIGH: Final = [lane for g in range(0, 16, 4) for lane in (g + 2, g + 18, g + 3, g + 19)]
_LOW_PAIRS: Final = [lane for g in range(0, 16, 4) for lane in (g, g + 1, g + 16, g + 17)]
_HIGH_PAIRS: Final = [lane for g in range(0, 16, 4) for lane in (g + 2, g + 3, g + 18, g + 19)]
# Groups of four lanes, taken even and odd from two vectors.
_EVEN_GROUPS: Final = [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27]
_ODD_GROUPS: Final = [lane + 4 for lane in _EVEN_GROUPS]


def _transposed(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """The 16 columns of 16 vectors: two rounds within groups of four lanes, two of whole groups."""
    quads = []  # quads[g][j]: rows 4g .. 4g + 3 of columns j, 4 + j, 8 + j, 12 + j
    for g in range(0, LANES, 4):
        a, b, c, d = rows[g : g + 4]
        ab_low, ab_high = shuffle(builder, a, b, _LOW), shuffle(builder, a, b, _HIGH)
        cd_low, cd_high = shuffle(builder, c, d, _LOW), shuffle(builder, c, d, _HIGH)
        quads.append(
            [
                shuffle(builder, ab_low, cd_low, _LOW_PAIRS),
                shuffle(builder, ab_low, cd_low, _HIGH_PAIRS),
                shuffle(builder, ab_high, cd_high, _LOW_PAIRS),
                shuffle(builder, ab_high, cd_high, _HIGH_PAIRS),
            ]
        )
    columns: list[ir.Value] = [None] * LANES
    for j in range(4):
        top, bottom = (quads[0][j], quads[1][j]), (quads[2][j], quads[3][j])
        for parity, groups in ((0, _EVEN_GROUPS), (1, _ODD_GROUPS)):
            upper, lower = shuffle(builder, *top, groups), shuffle(builder, *bottom, groups)
            columns[j + 4 * parity] = shuffle(builder, upper, lower, _EVEN_GROUPS)
            columns[j + 4 * parity + 8] = shuffle(builder, upper, lower, _ODD_GROUPS)
    return columns


@intrinsic  # type: ignore[untyped-decorator]
def transpose_panel(typingctx: Any, addresses: Any, offset: Any, target: Any) -> Any:
    """Write elements offset .. offset + 15 of 16 rows as 16 vectors at `target`, one per element, a lane per row.

    addresses: of an array of 16 int64, the rows' addresses; offset in bytes from there.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        addresses_value, offset_value, target_value = values
        rows = []
        for lane in range(LANES):
            entry = builder.add(addresses_value, ir.Constant(I64, 8 * lane))
            row = load_value(builder, entry, I64)
            rows.append(load_value(builder, builder.add(row, offset_value)))
        for element, column in enumerate(_transposed(builder, rows)):
            address = builder.add(target_value, ir.Constant(I64, VECTOR_BYTES * element))
            builder.store(column, pointer(builder, address, VECTOR), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen
