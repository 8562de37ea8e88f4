"""`pagemill bench tables`: results that were written before, as Markdown tables for a document."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from ops.bench.rates import COLUMNS as RATE_COLUMNS
from ops.bench.rates import rate_rows
from ops.bench.report import BAR_COLUMNS, THROUGHPUT_COLUMNS, bar_rows, throughput_rows
from ops.bench.result_files import read_results
from ops.bench.step_report import STEP_COLUMNS, share_rows, spent_table

Table = tuple[Sequence[str], Sequence[Sequence[object]]]
KINDS: Final = ("pagemill", "pagemill steps", "pagemill rates")


@click.command()
@click.argument("results", nargs=-1, required=True, type=click.Path(dir_okay=False))
def command(results: tuple[str, ...]) -> None:
    """Print RESULTS, files with a JSON result of `pagemill bench`, `bench steps` or `bench rates`, as Markdown tables.

    A file may hold the whole output: its last line counts. Comparisons of one workload that were measured batch by
    batch come in one table.
    """
    for tables in read_results([Path(result) for result in results], KINDS, tables_of, "tables"):
        for columns, rows in tables:
            print(markdown(columns, rows))


def tables_of(report: dict[str, Any]) -> list[Table]:
    """The tables of a result, of one of KINDS."""
    if report["bench"] == "pagemill steps":
        return [(STEP_COLUMNS, share_rows(report["steps"])), spent_table(report["steps"])]
    if report["bench"] == "pagemill rates":
        return [(RATE_COLUMNS, rate_rows(report))]
    ranked = sorted(report["batches"], key=lambda batch: int(batch["batch"]))
    tables: list[Table] = [(THROUGHPUT_COLUMNS, [row for batch in ranked for row in throughput_rows(batch)])]
    return tables + ([(BAR_COLUMNS, bar_rows(report["bars"]))] if report["bars"] else [])


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table, with an empty line after it."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)
