"""The register tile that every product here is made of: C[m, 16 n] = init + X[m, K] · W[K, 16 n].

        W (k)  ──►  n vectors of columns, `w_step` bytes from one k to the next, `w_panel` bytes from vector to vector
    X   ┌───────────────┐
    (m) │ m × n vectors │   each a chain of fused multiply-adds over k = 0, 1, ... 255, the next over k = 256, ...
        └───────────────┘

Each output element is init plus its chains in that order, whatever m and n are: so a row's bits depend neither on how
many rows come with it nor on where a block of rows begins. (Chains of 256 instead of one keep the error of long sums
at that of torch's own products.)
"""

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba.core import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from kernels.cpu.helper import helper
from kernels.cpu.vector import F32, I64, VECTOR, VECTOR_BYTES, constant, fma_value, load_value, pointer, splat_value

_, _CPU_NAME, _CPU_FEATURES = cpu_target.target_context.codegen().magic_tuple()
# 32 registers of 16 floats hold 24 sums and their operands; 16 registers of 8 hold 12 sums of half a vector each.
HAS_WIDE_REGISTERS: Final = "+avx512f" in _CPU_FEATURES
CHAIN: Final = 256
MAX_TILE_ROWS: Final = 8 if HAS_WIDE_REGISTERS else 6


def _emit_tile(builder: ir.IRBuilder, num_rows: int, num_vectors: int, values: tuple[ir.Value, ...]) -> None:
    x, x_row, w, w_step, w_panel, init, init_row, c, c_row, k = values
    rows, columns = range(num_rows), range(num_vectors)

    def at(base: ir.Value, stride: ir.Value, n: int) -> ir.Value:
        return builder.add(base, builder.mul(stride, ir.Constant(I64, n)))

    vector_bytes = ir.Constant(I64, VECTOR_BYTES)
    x_rows = [at(x, x_row, r) for r in rows]
    panels = [at(w, w_panel, n) for n in columns]

    zero = ir.Constant(I64, 0)
    before = builder.block
    chain, loop, add_up, done = (builder.append_basic_block(name) for name in ("chain", "k_loop", "add_up", "done"))
    builder.branch(chain)

    # One chain after the other; the first adds to init, the others to what the one before has left in c.
    builder.position_at_end(chain)
    chain_start, base, base_row = builder.phi(I64), builder.phi(I64), builder.phi(I64)
    next_start = builder.add(chain_start, ir.Constant(I64, CHAIN))
    chain_end = builder.select(builder.icmp_signed("<", next_start, k), next_start, k)
    builder.branch(loop)

    builder.position_at_end(loop)
    step = builder.phi(I64)
    sums = [[builder.phi(VECTOR) for _ in columns] for _ in rows]
    x_offset, w_offset = builder.shl(step, ir.Constant(I64, 2)), builder.mul(step, w_step)
    weights = [load_value(builder, builder.add(panel, w_offset)) for panel in panels]
    factors = [splat_value(builder, load_value(builder, builder.add(x_rows[r], x_offset), F32)) for r in rows]
    results = [[fma_value(builder, factors[r], weights[n], sums[r][n]) for n in columns] for r in rows]
    following = builder.add(step, ir.Constant(I64, 1))
    step.add_incoming(chain_start, chain)
    step.add_incoming(following, loop)
    for r in rows:
        for n in columns:
            sums[r][n].add_incoming(constant(0.0), chain)
            sums[r][n].add_incoming(results[r][n], loop)
    builder.cbranch(builder.icmp_signed("<", following, chain_end), loop, add_up)

    builder.position_at_end(add_up)
    for r in rows:
        for n in columns:
            value = load_value(builder, at(at(base, base_row, r), vector_bytes, n))
            address = pointer(builder, at(at(c, c_row, r), vector_bytes, n), VECTOR)
            builder.store(builder.fadd(value, results[r][n]), address, align=4)
    for phi, initial, later in ((chain_start, zero, chain_end), (base, init, c), (base_row, init_row, c_row)):
        phi.add_incoming(initial, before)
        phi.add_incoming(later, add_up)
    builder.cbranch(builder.icmp_signed("<", chain_end, k), chain, done)
    builder.position_at_end(done)


def _tile(num_rows: int, num_vectors: int) -> Callable[..., None]:
    """The intrinsic of a tile of num_rows × (16 * num_vectors); its arguments are int64, those of `product`."""

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(
        typingctx: Any, x: Any, x_row: Any, w: Any, w_step: Any, w_panel: Any, init: Any, init_row: Any, c: Any,
        c_row: Any, k: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
            _emit_tile(builder, num_rows, num_vectors, tuple(values))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), codegen

    return tile  # type: ignore[no-any-return]


# Vectors per tile by number of rows: as many sums as the registers hold.
_VECTORS: Final = (4, 4, 4, 4, 4, 4, 3, 3) if HAS_WIDE_REGISTERS else (4, 3, 2, 1, 1, 1, 1, 1)


def _row_block(num_rows: int) -> Any:
    """A function that covers `num_panels` vectors of columns for a block of exactly num_rows rows."""
    num_vectors = _VECTORS[num_rows - 1]
    wide, narrow = _tile(num_rows, num_vectors), _tile(num_rows, 1)

    @helper
    def row_block(
        x: int, x_row: int, w: int, w_step: int, w_panel: int, num_panels: int, init: int, init_row: int,
        init_panel: int, c: int, c_row: int, k: int,
    ) -> None:  # fmt: skip
        panel = 0
        while panel + num_vectors <= num_panels:
            wide(
                x, x_row, w + panel * w_panel, w_step, w_panel, init + panel * init_panel, init_row,
                c + panel * VECTOR_BYTES, c_row, k,
            )  # fmt: skip
            panel += num_vectors
        while panel < num_panels:
            narrow(
                x, x_row, w + panel * w_panel, w_step, w_panel, init + panel * init_panel, init_row,
                c + panel * VECTOR_BYTES, c_row, k,
            )  # fmt: skip
            panel += 1

    return row_block


_rows_1, _rows_2, _rows_3, _rows_4, _rows_5, _rows_6, _rows_7, _rows_8 = (_row_block(n) for n in range(1, 9))


def product(
    x: int, x_row: int, num_rows: int, w: int, w_step: int, w_panel: int, num_panels: int, init: int, init_row: int,
    init_panel: int, c: int, c_row: int, k: int,
) -> None:  # fmt: skip
    """C[num_rows, 16 * num_panels] = init + X[num_rows, k] · W[k, 16 * num_panels], all of float32; k >= 1.

    Addresses and strides in bytes: x with row stride x_row; w with `w_step` between values of k and `w_panel` between
    panels of 16 columns; init with row stride init_row and panel stride init_panel (0 where all share them: a bias, or
    256 bytes of zeros); c with row stride c_row. c may be init. Rows are cut into equal blocks.
    """
    num_blocks = (num_rows + MAX_TILE_ROWS - 1) // MAX_TILE_ROWS
    row = 0
    for block in range(num_blocks):
        end = num_rows * (block + 1) // num_blocks
        count = end - row
        xr, ir_, cr = x + row * x_row, init + row * init_row, c + row * c_row
        if count == 1:
            _rows_1(xr, x_row, w, w_step, w_panel, num_panels, ir_, init_row, init_panel, cr, c_row, k)
        elif count == 2:
            _rows_2(xr, x_row, w, w_step, w_panel, num_panels, ir_, init_row, init_panel, cr, c_row, k)
        elif count == 3:
            _rows_3(xr, x_row, w, w_step, w_panel, num_panels, ir_, init_row, init_panel, cr, c_row, k)
        elif count == 4:
            _rows_4(xr, x_row, w, w_step, w_panel, num_panels, ir_, init_row, init_panel, cr, c_row, k)
        elif count == 5:
            _rows_5(xr, x_row, w, w_step, w_panel, num_panels, ir_, init_row, init_panel, cr, c_row, k)
        elif count == 6:
            _rows_6(xr, x_row, w, w_step, w_panel, num_panels, ir_, init_row, init_panel, cr, c_row, k)
        elif count == 7:
            _rows_7(xr, x_row, w, w_step, w_panel, num_panels, ir_, init_row, init_panel, cr, c_row, k)
        else:
            _rows_8(xr, x_row, w, w_step, w_panel, num_panels, ir_, init_row, init_panel, cr, c_row, k)
        row = end


@intrinsic  # type: ignore[untyped-decorator]
def call_product(
    typingctx: Any, function: Any, x: Any, x_row: Any, num_rows: Any, w: Any, w_step: Any, w_panel: Any,
    num_panels: Any, init: Any, init_row: Any, init_panel: Any, c: Any, c_row: Any, k: Any,
) -> Any:  # fmt: skip
    """`product` at the address `function`: compiled once, and called from the other bodies through this pointer."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        address, *arguments = values
        kind = ir.FunctionType(ir.VoidType(), [I64] * len(arguments))
        builder.call(builder.inttoptr(address, kind.as_pointer()), arguments)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 14), codegen
