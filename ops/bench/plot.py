"""`pagemill bench plot`: pictures of results that were written before."""

from pathlib import Path

import click

from ops.bench.pictures import MAKERS, draw, pictures_of
from ops.bench.result_files import read_results


@click.command()
@click.argument("results", nargs=-1, required=True, type=click.Path(dir_okay=False))
@click.option("--svg", type=click.Path(file_okay=False), default=".", help="Folder for the pictures.")
@click.option("--prefix", default="", help="Begin the files' names with this.")
def command(results: tuple[str, ...], svg: str, prefix: str) -> None:
    """Draw RESULTS, files with a JSON result of `pagemill bench`, `bench rates` or `bench block-sizes`.

    A file may hold the whole output: its last line counts. Comparisons of one workload that were measured batch by
    batch are drawn together. Prints the name of each picture.
    """
    for pictures in read_results([Path(result) for result in results], MAKERS, pictures_of, "pictures"):
        for path in draw(pictures, Path(svg), prefix):
            print(path)
