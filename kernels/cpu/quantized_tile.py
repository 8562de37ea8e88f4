"""The register tile of quantized products: C[m, 16 n] = bias + X[m, K] · W[K, 16 n], both in groups along k.

    a panel of W: 16 outputs, group after group     a row of X: quads, then what goes with each group
    ┌───────────┬──────────────────────────┐         ┌─────────────┬────────────────────┐
    │ 16 scales │ GROUP / 4 × 16 × 4 bytes │ ...     │ K / 4 quads │ scale, sum (int32) │ ...
    └───────────┴──────────────────────────┘         └─────────────┴────────────────────┘

Within a group the products are of integers and their sum is exact (dot.py). Groups are added in order, each with one
multiplication by the weights' scale and one fused multiply-add with the row's: so a row's bits depend neither on how
many rows come with it nor on the processor.
"""

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from kernels.cpu.dot import QUAD_BYTES, add_products, first_sum, load_quad, prepare_weights
from kernels.cpu.helper import helper
from kernels.cpu.tile import HAS_WIDE_REGISTERS
from kernels.cpu.vector import (
    F32,
    I32,
    I64,
    INT_VECTOR,
    VECTOR,
    VECTOR_BYTES,
    fma_value,
    load_value,
    pointer,
    splat_value,
)

# Values along k that share a scale, in the weight and in a row.
GROUP: Final = 32
NUM_QUADS: Final = GROUP // 4
GROUP_BYTES: Final = VECTOR_BYTES * (1 + NUM_QUADS)
# What goes with each group of a row: its scale and its sum.
FACT_BYTES: Final = 8
ZERO_POINT: Final = 128
# Quads between two tests of the loop.
UNROLL: Final = 2


def _emit_tile(builder: ir.IRBuilder, num_rows: int, num_vectors: int, values: tuple[ir.Value, ...]) -> None:
    x, x_row, w, w_panel, bias, bias_panel, c, c_row, num_groups = values
    rows, columns = range(num_rows), range(num_vectors)

    def number(n: int) -> ir.Constant:
        return ir.Constant(I64, n)

    def at(base: ir.Value, stride: ir.Value, n: int) -> ir.Value:
        return builder.add(base, builder.mul(stride, number(n)))

    facts = builder.add(x, builder.mul(num_groups, number(NUM_QUADS * QUAD_BYTES)))
    first_results = [load_value(builder, at(bias, bias_panel, n)) for n in columns]
    before = builder.block
    group, quads, scale, done = (builder.append_basic_block(name) for name in ("group", "quads", "scale", "done"))
    builder.branch(group)

    builder.position_at_end(group)
    g = builder.phi(I64)
    results = [[builder.phi(VECTOR) for _ in columns] for _ in rows]
    g_facts = builder.add(facts, builder.mul(g, number(FACT_BYTES)))
    x_sums = [load_value(builder, builder.add(at(g_facts, x_row, r), number(4)), I32) for r in rows]
    starts = [first_sum(builder, x_sum, ZERO_POINT) for x_sum in x_sums]
    g_w = builder.add(w, builder.mul(g, number(GROUP_BYTES)))
    w_quads = builder.add(g_w, number(VECTOR_BYTES))
    x_quads = builder.add(x, builder.mul(g, number(NUM_QUADS * QUAD_BYTES)))
    builder.branch(quads)

    builder.position_at_end(quads)
    quad = builder.phi(I64)
    sums = [[builder.phi(INT_VECTOR) for _ in columns] for _ in rows]
    values_now: list[list[ir.Value]] = [list(row) for row in sums]
    for step in range(UNROLL):
        index = builder.add(quad, number(step))
        w_offset, x_offset = builder.mul(index, number(VECTOR_BYTES)), builder.mul(index, number(QUAD_BYTES))
        weights = [
            prepare_weights(builder, load_value(builder, builder.add(at(w_quads, w_panel, n), w_offset), INT_VECTOR))
            for n in columns
        ]
        for r in rows:
            factor = load_quad(builder, builder.add(at(x_quads, x_row, r), x_offset))
            for n in columns:
                values_now[r][n] = add_products(builder, values_now[r][n], weights[n], factor)
    following = builder.add(quad, number(UNROLL))
    quad.add_incoming(number(0), group)
    quad.add_incoming(following, quads)
    for r in rows:
        for n in columns:
            sums[r][n].add_incoming(starts[r], group)
            sums[r][n].add_incoming(values_now[r][n], quads)
    builder.cbranch(builder.icmp_signed("<", following, number(NUM_QUADS)), quads, scale)

    builder.position_at_end(scale)
    w_scales = [load_value(builder, at(g_w, w_panel, n)) for n in columns]
    next_g = builder.add(g, number(1))
    g.add_incoming(number(0), before)
    g.add_incoming(next_g, scale)
    last = []
    for r in rows:
        x_scale = splat_value(builder, load_value(builder, at(g_facts, x_row, r), F32))
        for n in columns:
            product = builder.fmul(builder.sitofp(values_now[r][n], VECTOR), w_scales[n])
            last.append(fma_value(builder, product, x_scale, results[r][n]))
            results[r][n].add_incoming(first_results[n], before)
            results[r][n].add_incoming(last[-1], scale)
    builder.cbranch(builder.icmp_signed("<", next_g, num_groups), group, done)

    builder.position_at_end(done)
    for r in rows:
        for n in columns:
            address = builder.add(at(c, c_row, r), number(VECTOR_BYTES * n))
            builder.store(last[r * num_vectors + n], pointer(builder, address, VECTOR), align=4)


def _tile(num_rows: int, num_vectors: int) -> Callable[..., None]:
    """The intrinsic of a tile of num_rows × (16 * num_vectors); its arguments are int64."""

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(
        typingctx: Any, x: Any, x_row: Any, w: Any, w_panel: Any, bias: Any, bias_panel: Any, c: Any, c_row: Any,
        num_groups: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
            _emit_tile(builder, num_rows, num_vectors, tuple(values))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), codegen

    return tile  # type: ignore[no-any-return]


MAX_TILE_ROWS: Final = 8 if HAS_WIDE_REGISTERS else 4
# Vectors per tile by number of rows: as many sums, of integers and of floats, as the registers hold.
_VECTORS: Final = (4, 4, 4, 3, 2, 2, 1, 1) if HAS_WIDE_REGISTERS else (2, 1, 1, 1)


def _row_block(num_rows: int) -> Any:
    """A function that covers `num_panels` vectors of columns for a block of exactly num_rows rows."""
    num_vectors = _VECTORS[num_rows - 1]
    wide, narrow = _tile(num_rows, num_vectors), _tile(num_rows, 1)

    @helper
    def row_block(
        x: int, x_row: int, w: int, w_panel: int, num_panels: int, bias: int, bias_panel: int, c: int, c_row: int,
        num_groups: int,
    ) -> None:  # fmt: skip
        panel = 0
        while panel + num_vectors <= num_panels:
            wide(
                x, x_row, w + panel * w_panel, w_panel, bias + panel * bias_panel, bias_panel,
                c + panel * VECTOR_BYTES, c_row, num_groups,
            )  # fmt: skip
            panel += num_vectors
        while panel < num_panels:
            narrow(
                x, x_row, w + panel * w_panel, w_panel, bias + panel * bias_panel, bias_panel,
                c + panel * VECTOR_BYTES, c_row, num_groups,
            )  # fmt: skip
            panel += 1

    return row_block


_rows_1, _rows_2, _rows_3, _rows_4 = (_row_block(n) for n in range(1, 5))
# Never called where tiles are lower, and not compiled there.
_rows_5, _rows_6, _rows_7, _rows_8 = (_row_block(n) for n in range(5, 9)) if MAX_TILE_ROWS == 8 else [_rows_4] * 4


@helper
def quantized_product(
    x: int, x_row: int, num_rows: int, w: int, w_panel: int, num_panels: int, bias: int, bias_panel: int, c: int,
    c_row: int, num_groups: int,
) -> None:  # fmt: skip
    """C[num_rows, 16 * num_panels] = bias + X · W over quantized rows and panels; addresses and strides in bytes.

    bias: one vector a panel, `bias_panel` bytes apart (0 where all share one). Rows are cut into equal blocks.
    """
    num_blocks = (num_rows + MAX_TILE_ROWS - 1) // MAX_TILE_ROWS
    row = 0
    for block in range(num_blocks):
        end = num_rows * (block + 1) // num_blocks
        count = end - row
        xr, cr = x + row * x_row, c + row * c_row
        if count == 1:
            _rows_1(xr, x_row, w, w_panel, num_panels, bias, bias_panel, cr, c_row, num_groups)
        elif count == 2:
            _rows_2(xr, x_row, w, w_panel, num_panels, bias, bias_panel, cr, c_row, num_groups)
        elif count == 3:
            _rows_3(xr, x_row, w, w_panel, num_panels, bias, bias_panel, cr, c_row, num_groups)
        elif count == 4:
            _rows_4(xr, x_row, w, w_panel, num_panels, bias, bias_panel, cr, c_row, num_groups)
        elif count == 5:
            _rows_5(xr, x_row, w, w_panel, num_panels, bias, bias_panel, cr, c_row, num_groups)
        elif count == 6:
            _rows_6(xr, x_row, w, w_panel, num_panels, bias, bias_panel, cr, c_row, num_groups)
        elif count == 7:
            _rows_7(xr, x_row, w, w_panel, num_panels, bias, bias_panel, cr, c_row, num_groups)
        else:
            _rows_8(xr, x_row, w, w_panel, num_panels, bias, bias_panel, cr, c_row, num_groups)
        row = end
