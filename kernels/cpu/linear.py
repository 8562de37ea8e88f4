"""y = x Wᵀ + b over a weight in panels: [ceil(out / 16), in, 16], one contiguous stream per 16 outputs."""

from kernels.cpu.parallel import ARGUMENTS
from kernels.cpu.tile import call_product
from kernels.cpu.vector import LANES, VECTOR_BYTES, fetch_add, load_f32, load_i64, store_f32


def linear(task: int) -> None:
    """Work item: `panels_per_item` panels for all rows. Words: see `launch` in kernels/linear.py."""
    x = load_i64(task + ARGUMENTS)
    x_row = load_i64(task + ARGUMENTS + 8)
    num_rows = load_i64(task + ARGUMENTS + 16)
    w = load_i64(task + ARGUMENTS + 24)
    num_panels = load_i64(task + ARGUMENTS + 32)
    panels_per_item = load_i64(task + ARGUMENTS + 40)
    bias = load_i64(task + ARGUMENTS + 48)
    bias_panel = load_i64(task + ARGUMENTS + 56)
    c = load_i64(task + ARGUMENTS + 64)
    c_row = load_i64(task + ARGUMENTS + 72)
    k = load_i64(task + ARGUMENTS + 80)
    product = load_i64(task + ARGUMENTS + 88)
    w_panel = k * VECTOR_BYTES
    while True:
        panel = fetch_add(task, 1) * panels_per_item
        if panel >= num_panels:
            break
        count = min(panels_per_item, num_panels - panel)
        call_product(
            product, x, x_row, num_rows, w + panel * w_panel, VECTOR_BYTES, w_panel, count,
            bias + panel * bias_panel, 0, bias_panel, c + panel * VECTOR_BYTES, c_row, k,
        )  # fmt: skip


def gather_rows(task: int) -> None:
    """Work item: one row of the weight out of its panel. Words: as `rows` of kernels/linear.py gives them."""
    w, k = load_i64(task + ARGUMENTS), load_i64(task + ARGUMENTS + 8)
    ids, num_ids = load_i64(task + ARGUMENTS + 16), load_i64(task + ARGUMENTS + 24)
    out = load_i64(task + ARGUMENTS + 32)
    while True:
        item = fetch_add(task, 1)
        if item >= num_ids:
            break
        row = load_i64(ids + item * 8)
        source = w + row // LANES * k * VECTOR_BYTES + row % LANES * 4
        for element in range(k):
            store_f32(out + (item * k + element) * 4, load_f32(source + element * VECTOR_BYTES))
