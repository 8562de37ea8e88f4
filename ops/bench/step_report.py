"""Single steps, as tables for people."""

from collections.abc import Sequence
from typing import Any, Final

from ops.tables import print_table

STEP_COLUMNS: Final = (
    *("step", "least ms", "median ms", "weights: of read bandwidth", "products: of arithmetic"),
    *("attention: of read bandwidth", "attention: of the step"),
)


def print_steps(steps: dict[str, Any]) -> None:
    """What steps reach of the limits, and what they were spent on, to stdout."""
    limits = steps["limits"]
    title = (
        f"Single steps; limits: {limits['read_bytes_per_s'] / 1e9:.1f} GB/s read, "
        f"{limits['operations_per_s'] / 1e9:.0f} GFLOP/s"
    )
    print_table(title, STEP_COLUMNS, share_rows(steps))
    print_table("What the quickest step was spent on, in ms", *spent_table(steps))


def spent_table(steps: dict[str, Any]) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
    """Columns and rows: of each case's quickest step the milliseconds by what they were spent on."""
    parts = list(dict.fromkeys(name for case in steps["cases"] for name in case["spent_s"]))
    rows = [
        (case["name"], *(f"{1000 * case['spent_s'].get(name, 0.0):.1f}" for name in parts)) for case in steps["cases"]
    ]
    return ("step", *parts), rows


def share_rows(steps: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row for each case, under STEP_COLUMNS."""
    return [_share_row(case) for case in steps["cases"]]


def _share_row(case: dict[str, Any]) -> tuple[str, ...]:
    names = ("weights_of_bandwidth", "products_of_arithmetic", "attention_of_bandwidth", "attention_of_step")
    times = (f"{1000 * case[name]:.1f}" for name in ("least_s", "median_s"))
    return (case["name"], *times, *(f"{100 * case[name]:.0f} %" for name in names))
