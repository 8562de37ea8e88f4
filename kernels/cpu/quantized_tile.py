"""The register tile of quantized products: C[m, 16] = bias + X[m, K] · W[K, 16], one panel of a weight.

    a panel of W, group after group of 32           a row of X
    ┌───────────┬───────────┬───────────────┐       ┌─────────────┬─────────────────┬─────────┐
    │ 16 scales │ 16 minima │ 8 × 16 × 4    │ ...   │ K / 4 quads │ sums of groups  │ scale   │
    │ (float16) │ (float16) │ bytes, quads  │       │ (dot.py)    │ (float32)       │(float32)│
    └───────────┴───────────┴───────────────┘       └─────────────┴─────────────────┴─────────┘

A weight is scale · byte + minimum with those of its group, x is scale · integer with that of its row. So

    Σ w x = scale_x Σ over groups (scale_w Σ byte · integer + minimum · sum of integers)

in which the products of integers and their sums are exact. The rest is fused multiply-adds in the order of the groups:
so a row's bits depend neither on how many rows come with it nor on the processor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from kernels.cpu.dot import NUM_SUMS, QUAD_BYTES, add_products, finished, load_quad, no_sums, prepare_weights
from kernels.cpu.half import load_halves
from kernels.cpu.helper import helper_for
from kernels.cpu.tile import HAS_WIDE_REGISTERS
from kernels.cpu.vector import (
    F32,
    I32,
    I64,
    INT_VECTOR,
    LANES,
    VECTOR,
    VECTOR_BYTES,
    constant,
    fma_value,
    load_value,
    pointer,
    prefetch_value,
    splat_value,
)

# Values along k that share a scale and a minimum. Sums of so many products fit int32.
GROUP: Final = 32
NUM_QUADS: Final = GROUP // 4
HALF_BYTES: Final = 2 * LANES
# Where a group's quads begin in a panel, after its scales and minima.
QUADS_AT: Final = 2 * HALF_BYTES
# Of a group of a row.
X_GROUP_BYTES: Final = NUM_QUADS * QUAD_BYTES
SUM_BYTES: Final = 4
# How many groups ahead of its use a weight is asked for. A tile of 8 rows computes on a group for about as long as it
# takes to read one: without this it does first one, then the other.
GROUPS_AHEAD: Final = 8
# Rows whose integers stay in the L2 cache while one panel after the other passes over them.
CHUNK_ROWS: Final = 64


@dataclass(frozen=True)
class Layout:
    """How weights of a kind lie in a panel.

    kind: its name. group_bytes: from group to group. load_quad(builder, address of the first quad, number of a quad)
    gives the quad's four unsigned bytes in each of 16 int32.
    """

    kind: str
    group_bytes: int
    load_quad: Callable[[ir.IRBuilder, ir.Value, int], ir.Value]


def load_words(builder: ir.IRBuilder, quads: ir.Value, number: int) -> ir.Value:
    """Vector `number` behind an address, as 16 int32."""
    return load_value(builder, builder.add(quads, ir.Constant(I64, number * VECTOR_BYTES)), INT_VECTOR)


BYTES: Final = Layout("int8", QUADS_AT + VECTOR_BYTES * NUM_QUADS, load_words)


def _emit_tile(builder: ir.IRBuilder, num_rows: int, layout: Layout, values: tuple[ir.Value, ...]) -> None:
    x, x_row, w, bias, c, c_row, num_groups = values
    rows = range(num_rows)

    def number(n: int) -> ir.Constant:
        return ir.Constant(I64, n)

    def at(base: ir.Value, stride: ir.Value, n: int, offset: int = 0) -> ir.Value:
        return builder.add(builder.add(base, builder.mul(stride, number(n))), number(offset))

    x_sums = builder.add(x, builder.mul(num_groups, number(X_GROUP_BYTES)))
    x_scales = builder.add(x_sums, builder.mul(num_groups, number(SUM_BYTES)))
    before = builder.block
    group, done = builder.append_basic_block("group"), builder.append_basic_block("done")
    builder.branch(group)

    builder.position_at_end(group)
    g = builder.phi(I64)
    results = [builder.phi(VECTOR) for _ in rows]
    g_sums = builder.add(x_sums, builder.mul(g, number(SUM_BYTES)))
    g_w = builder.add(w, builder.mul(g, number(layout.group_bytes)))
    g_x = builder.add(x, builder.mul(g, number(X_GROUP_BYTES)))
    g_ahead = builder.add(g_w, number(GROUPS_AHEAD * layout.group_bytes))
    prefetch_value(builder, g_ahead)
    sums = [no_sums() for _ in rows]
    for quad in range(NUM_QUADS):
        if (at_line := QUADS_AT + quad * VECTOR_BYTES) < layout.group_bytes:
            prefetch_value(builder, builder.add(g_ahead, number(at_line)))
        weights = prepare_weights(builder, layout.load_quad(builder, builder.add(g_w, number(QUADS_AT)), quad))
        for r in rows:
            factor = load_quad(builder, at(g_x, x_row, r, quad * QUAD_BYTES))
            sums[r] = add_products(builder, sums[r], weights, factor)
    scales = load_halves(builder, g_w)
    minima = load_halves(builder, builder.add(g_w, number(HALF_BYTES)))
    following = builder.add(g, number(1))
    last = []
    for r in rows:
        x_sum = load_value(builder, at(g_sums, x_row, r), F32)
        x_total, x_vector = builder.fptosi(x_sum, I32), splat_value(builder, x_sum)
        total = builder.sitofp(finished(builder, sums[r], x_total), VECTOR)
        last.append(fma_value(builder, minima, x_vector, fma_value(builder, total, scales, results[r])))
        results[r].add_incoming(constant(0.0), before)
        results[r].add_incoming(last[-1], group)
    g.add_incoming(number(0), before)
    g.add_incoming(following, group)
    builder.cbranch(builder.icmp_signed("<", following, num_groups), group, done)

    builder.position_at_end(done)
    biases = load_value(builder, bias)
    for r in rows:
        x_scale = splat_value(builder, load_value(builder, at(x_scales, x_row, r), F32))
        builder.store(fma_value(builder, last[r], x_scale, biases), pointer(builder, at(c, c_row, r), VECTOR), align=4)


def _tile(num_rows: int, layout: Layout) -> Callable[..., None]:
    """The intrinsic of a tile of num_rows × 16; its arguments are int64."""

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(typingctx: Any, x: Any, x_row: Any, w: Any, bias: Any, c: Any, c_row: Any, num_groups: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
            _emit_tile(builder, num_rows, layout, tuple(values))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return tile  # type: ignore[no-any-return]


# As many sums as the registers hold: of 32 wide ones 16, and the 8 results that they are added to; of others 8 vectors
# of half the width, with the results in memory meanwhile.
MAX_TILE_ROWS: Final = 8 if HAS_WIDE_REGISTERS else 4 // NUM_SUMS


def _panel_product_over(layout: Layout) -> Any:
    """The product with one panel."""
    # Where tiles are lower, those above are never called, and stand for the highest.
    rows_1, rows_2, rows_3, rows_4, rows_5, rows_6, rows_7, rows_8 = (
        [_tile(n, layout) for n in range(1, MAX_TILE_ROWS + 1)] + 6 * [_tile(MAX_TILE_ROWS, layout)]
    )[:8]

    @helper_for(layout.kind)
    def panel_product(
        x: int, x_row: int, num_rows: int, w: int, bias: int, c: int, c_row: int, num_groups: int
    ) -> None:
        """C[num_rows, 16] = bias + X · W of one panel, in equal blocks of rows."""
        num_blocks = (num_rows + MAX_TILE_ROWS - 1) // MAX_TILE_ROWS
        row = 0
        for block in range(num_blocks):
            end = num_rows * (block + 1) // num_blocks
            count = end - row
            xr, cr = x + row * x_row, c + row * c_row
            if count == 1:
                rows_1(xr, x_row, w, bias, cr, c_row, num_groups)
            elif count == 2:
                rows_2(xr, x_row, w, bias, cr, c_row, num_groups)
            elif count == 3:
                rows_3(xr, x_row, w, bias, cr, c_row, num_groups)
            elif count == 4:
                rows_4(xr, x_row, w, bias, cr, c_row, num_groups)
            elif count == 5:
                rows_5(xr, x_row, w, bias, cr, c_row, num_groups)
            elif count == 6:
                rows_6(xr, x_row, w, bias, cr, c_row, num_groups)
            elif count == 7:
                rows_7(xr, x_row, w, bias, cr, c_row, num_groups)
            else:
                rows_8(xr, x_row, w, bias, cr, c_row, num_groups)
            row = end

    return panel_product


def product_over(layout: Layout) -> Any:
    """The product over weights of a kind, for use inside bodies."""
    panel_product = _panel_product_over(layout)

    @helper_for(layout.kind)
    def quantized_product(
        x: int, x_row: int, num_rows: int, w: int, w_panel: int, num_panels: int, bias: int, bias_panel: int, c: int,
        c_row: int, num_groups: int,
    ) -> None:  # fmt: skip
        """C[num_rows, 16 * num_panels] = bias + X · W over quantized rows and panels; addresses and strides in bytes.

        bias: one vector a panel, `bias_panel` bytes apart (0 where all share one).
        """
        num_chunks = (num_rows + CHUNK_ROWS - 1) // CHUNK_ROWS
        row = 0
        for chunk in range(num_chunks):
            end = num_rows * (chunk + 1) // num_chunks
            for panel in range(num_panels):
                panel_product(
                    x + row * x_row, x_row, end - row, w + panel * w_panel, bias + panel * bias_panel,
                    c + row * c_row + panel * VECTOR_BYTES, c_row, num_groups,
                )  # fmt: skip
            row = end

    return quantized_product
