"""Pictures of results, as SVG files, drawn by matplotlib (the extra `bench`) from the JSON that measurements print."""

import importlib.util
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ops.bench.errors import BenchError
from ops.bench.peers.catalog import KINDS

INSTALL: Final = "matplotlib isn't installed, which draws the pictures: pip install 'pagemill[bench]'"
# Labels of runs one by one that other batches are compared with, too.
ALONE: Final = {kind.alone for kind in KINDS if kind.alone != kind.label}
# Inches.
SIZE: Final = (6.4, 3.6)
# How far an axis from zero goes above the largest value.
HEADROOM: Final = 1.05
# Without them the same result would give another file each time; and a name with a dollar is no formula.
STYLE: Final = {
    "svg.hashsalt": "pagemill",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "text.parse_math": False,
}
METADATA: Final = {"Date": None, "Creator": None}
# What a workload may be called: it is part of a file's name.
NAME: Final = re.compile(r"[\w.-]+")


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a picture: y over x, and a name for the legend."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture. `name` is its file's; log_x: x is spaced by factors of two."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False


def check_installed() -> None:
    """Raises BenchError where the library that draws is missing: better before a measurement than after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError(INSTALL)


def pictures_of(report: dict[str, Any]) -> list[Picture]:
    """What a result, of one of MAKERS, has to show. Raises BenchError where that is nothing."""
    pictures = [each for each in MAKERS[report["bench"]](report) if any(series.x for series in each.series)]
    if not pictures:
        raise BenchError("there is nothing to draw: no figures")
    return pictures


def draw_report(report: dict[str, Any], folder: Path, prefix: str = "") -> list[Path]:
    """Write a result's pictures into `folder`, made if need be. Returns their files."""
    return draw(pictures_of(report), folder, prefix)


def draw(pictures: Sequence[Picture], folder: Path, prefix: str = "") -> list[Path]:
    """Write these pictures into `folder`, made if need be. Returns their files."""
    check_installed()
    folder.mkdir(parents=True, exist_ok=True)
    return [_draw(picture, folder / f"{prefix}{picture.name}.svg") for picture in pictures]


def _draw(picture: Picture, path: Path) -> Path:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        for series in picture.series:
            axes.plot(series.x, series.y, marker="o", label=series.name)
        if picture.log_x:
            axes.set_xscale("log", base=2)
            ticks = sorted({value for series in picture.series for value in series.x})
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        if picture.log_y:
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, HEADROOM * max(value for series in picture.series for value in series.y))
        axes.set(title=picture.title, xlabel=picture.x_label, ylabel=picture.y_label)
        axes.grid(visible=True, alpha=0.3)
        if len(picture.series) > 1:
            axes.legend()
        figure.savefig(path, format="svg", metadata=METADATA)
    return path


def _comparison(report: dict[str, Any]) -> list[Picture]:
    """Throughput and time between tokens by batch, ours and every peer's."""
    batches, name = report["batches"], report["workload"]["name"]
    if report["options"]["quantization"] != "none":
        name = f"{name}-{report['options']['quantization']}"
    if not NAME.fullmatch(name):
        raise BenchError(f"{name!r} is no workload's name")
    rates = _by_batch(batches, lambda each: each["tokens_per_s"]["median"])
    gaps = _by_batch(batches, lambda each: each.get("token_gap_s", {}).get("p50"), scale=1000)
    return [
        Picture(
            f"{name}-throughput", f"Output tokens a second ({name})", "sequences in flight", "tokens/s", rates, True
        ),
        Picture(f"{name}-token-time", f"Time between tokens, p50 ({name})", "sequences in flight", "ms", gaps, True),
    ]


def _by_batch(
    batches: Sequence[dict[str, Any]], figure: Callable[[dict[str, Any]], float | None], scale: float = 1.0
) -> list[Series]:
    """A series for each engine that has the figure at any batch."""
    points: dict[str, list[tuple[float, float]]] = {}
    for batch in batches:
        for name, found in {"pagemill": batch["ours"], **batch["peers"]}.items():
            value = figure(found)
            is_alone_at_many = name in ALONE and batch["batch"] > 1  # another batch's runs, told for their ratio
            if value is not None and not is_alone_at_many:
                points.setdefault(name, []).append((batch["batch"], scale * value))
    return _all_series(points)


def _block_sizes(report: dict[str, Any]) -> list[Picture]:
    """KV use and request rate by block size."""
    sizes = report["sizes"]
    use = _all_series({"KV use": [(each["block_size"], 100 * each["kv_use"]) for each in sizes]})
    rate = _all_series({"requests/s": [(each["block_size"], each["requests_per_s"]) for each in sizes]})
    return [
        Picture("block-size-kv-use", "KV use by block size", "tokens in a block", "% of allocated slots", use, True),
        Picture("block-size-rate", "Requests a second by block size", "tokens in a block", "requests/s", rate, True),
    ]


def _rates(report: dict[str, Any]) -> list[Picture]:
    """Latencies by the rate of arrivals, median and 95th percentile, ours and the peers'."""
    shown = (("ttft_s", "ttft", "Time to the first token"), ("token_gap_s", "token-time", "Time between tokens"))
    pictures = []
    for figure, name, title in (*shown, ("reply_s", "reply", "Time of a whole reply")):
        points: dict[str, list[tuple[float, float]]] = {}
        for rate in report["rates"]:
            for engine, found in rate["engines"].items():
                for percent in ("p50", "p95"):
                    value = found[figure][percent]
                    if value is not None:
                        points.setdefault(f"{engine}, {percent}", []).append((rate["requests_per_s"], 1000 * value))
        series = _all_series(points)
        words = f"{title} ({report['options']['arrivals']})"
        pictures.append(Picture(f"rates-{name}", words, "requests offered a second", "ms", series, log_y=True))
    return pictures


def _all_series(points: Mapping[str, Sequence[tuple[float, float]]]) -> list[Series]:
    """A line through the points of each name, by rising x. Raises BenchError for what isn't a number."""
    for name, found in points.items():
        if not all(math.isfinite(value) for point in found for value in point):
            raise BenchError(f"a figure of {name} isn't a number")
    ranked = {name: sorted(found) for name, found in points.items()}
    return [Series(name, [x for x, _ in found], [y for _, y in found]) for name, found in ranked.items()]


MAKERS: Final[dict[str, Callable[[dict[str, Any]], list[Picture]]]] = {
    "pagemill": _comparison,
    "pagemill block-sizes": _block_sizes,
    "pagemill rates": _rates,
}
