"""Tables for people: aligned on a terminal, tab-separated where the output goes into a pipe."""

import sys
from collections.abc import Sequence


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table to stdout. In a pipe: no title, a header line, tabs between the cells."""
    cells = [[_clean(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        for row in ([*columns], *cells):
            print("\t".join(row))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column)
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def print_queues_table(
    what: str, queues: Sequence[str], columns: Sequence[str], rows: Sequence[Sequence[object]]
) -> None:
    """Print a table of `queues`, whose rows begin with the name of theirs. A single queue stands in the title only."""
    title = f"{what} of {', '.join(queues)}"
    if len(queues) == 1:
        print_table(title, columns, [row[1:] for row in rows])
    else:
        print_table(title, ("queue", *columns), rows)


def age(milliseconds: float) -> str:
    """A span of time in the largest unit that suits: `850 ms`, `12 s`, `3 min`, `5 h`, `2 d`."""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if milliseconds >= 2 * size:
            return f"{milliseconds / size:.0f} {unit}"
    return f"{max(0.0, milliseconds):.0f} ms"


def _clean(cell: object) -> str:
    """A cell on one line: what clients wrote may hold tabs, line ends and terminal codes."""
    text = cell.decode("utf-8", "replace") if isinstance(cell, bytes) else str(cell)
    return "".join(char if char.isprintable() else " " for char in text)
