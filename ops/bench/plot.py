"""`pagemill bench plot`: pictures of results that were written before."""

from collections import Counter
from pathlib import Path

import click

from ops.bench.errors import BenchError
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
    drawn = read_results([Path(result) for result in results], MAKERS, pictures_of, "pictures")
    pictures = [picture for of_result in drawn for picture in of_result]
    name, count = Counter(picture.name for picture in pictures).most_common(1)[0]
    if count > 1:
        raise BenchError(f"{count} of these results make a picture {name}.svg: draw them one by one, with --prefix")
    for path in draw(pictures, Path(svg), prefix):
        print(path)
