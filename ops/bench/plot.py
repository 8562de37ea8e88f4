"""`pagemill bench plot`: pictures of results that were written before."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from ops.bench.errors import BenchError
from ops.bench.pictures import draw_report

# What a comparison's result has at least.
_PARTS: Final = {"workload": dict, "options": dict, "batches": list}


@click.command()
@click.argument("results", nargs=-1, required=True, type=click.Path(dir_okay=False))
@click.option("--svg", type=click.Path(file_okay=False), default=".", help="Folder for the pictures.")
@click.option("--prefix", default="", help="Begin the files' names with this.")
def command(results: tuple[str, ...], svg: str, prefix: str) -> None:
    """Draw RESULTS, JSON objects that `pagemill bench`, its `rates` or its `block-sizes` printed as their last line.

    A file may hold the whole output: its last line counts. Comparisons of one workload that were measured batch by
    batch are drawn together. Prints the name of each picture.
    """
    for report in merged([read_result(Path(result)) for result in results]):
        for path in draw_report(report, Path(svg), prefix):
            print(path)


def merged(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same, but that the batches of comparisons of one workload and one quantization are in one of them."""
    found: list[dict[str, Any]] = []
    by_kind: dict[tuple[str, str], dict[str, Any]] = {}
    for report in reports:
        if report.get("bench") != "pagemill":
            found.append(report)
            continue
        kind = (report["workload"]["name"], report["options"]["quantization"])
        if kind in by_kind:
            by_kind[kind]["batches"] += report["batches"]
        else:
            by_kind[kind] = report | {"batches": list(report["batches"])}
            found.append(by_kind[kind])
    return found


def read_result(path: Path) -> dict[str, Any]:
    """The JSON object in a file's last line. Raises BenchError."""
    try:
        lines = path.read_text().splitlines()
        found = json.loads(lines[-1])
    except OSError as error:
        raise BenchError(f"can't read {path}: {error.strerror}") from error
    except (IndexError, ValueError) as error:
        raise BenchError(f"{path} doesn't end with a JSON object: use what a bench printed") from error
    if not isinstance(found, dict):
        raise BenchError(f"{path} doesn't end with a JSON object: use what a bench printed")
    if found.get("bench") == "pagemill" and not all(isinstance(found.get(name), kind) for name, kind in _PARTS.items()):
        raise BenchError(f"{path} isn't what this version of the bench prints: measure again")
    return found
