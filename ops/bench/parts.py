"""What the measurements of the bench share: options, turns, and where the model is."""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from worker.openmp import limit_spinning

if TYPE_CHECKING:
    from worker.engine import Engine
    from worker.engine_config import EngineConfig, EngineInfo

T = TypeVar("T")

CACHE_VARIABLE: Final = "PAGEMILL_CACHE_DIR"
COUNT: Final = click.IntRange(min=1)


def _in_a_folder(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """The file's name, if it can be written: better told before a measurement than after it."""
    if value is not None and not os.access(folder := Path(value).parent, os.W_OK):
        raise click.BadParameter(f"there is no folder {folder} that can be written to: make it first.", ctx, param)
    return value


# Options, to be used as decorators.
json_option = click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, writable=True),
    callback=_in_a_folder,
    help="Write the JSON result to this file, too.",
)
model_option = click.option(
    "--model", default="smollm2", help="Checkpoint folder, GGUF file, or `smollm2`, the demo model."
)
load_format_option = click.option(
    "--load-format",
    type=click.Choice(["auto", "dummy"]),
    default="auto",
    help="`dummy` takes random weights in the shapes of a config.json, or of a preset such as Llama-3.1-8B.",
)
num_threads_option = click.option(
    "--num-threads", type=COUNT, help="CPU threads of the engine.  [default: one per core]"
)
cache_dir_option = click.option(
    "--cache-dir", envvar=CACHE_VARIABLE, help="Folder of the demo model and converted weights."
)
alternations_option = click.option("--alternations", type=COUNT, default=3, help="Runs of each, by turns.")
seed_option = click.option("--seed", type=int, default=0, help="Decides lengths and ids of all requests.")

engine_mode_option = click.option(
    "--engine-mode",
    type=click.Choice(["process", "inprocess"]),
    default="process",
    help="The engine in a process of its own, so that its pipe counts as host work, or called directly.",
)
svg_option = click.option(
    "--svg", type=click.Path(file_okay=False), help="Draw the result as SVG pictures into this folder, too."
)


class NameList(click.ParamType[tuple[str, ...]]):
    """Names with commas between them."""

    name = "names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """The names, in their order, each once."""
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in str(value).split(",")]
        if not all(words):
            self.fail("use names with commas between them, like transformers,vllm", param, ctx)
        return tuple(dict.fromkeys(words))


class NumberList(click.ParamType[tuple[int, ...]]):
    """Whole numbers from 1 with commas between them."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The numbers, in their order, each once."""
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in str(value).split(",")]
        if not all(word.isdecimal() and int(word) >= 1 for word in words):
            self.fail("use whole numbers from 1 with commas between them, like 1,8,32", param, ctx)
        return tuple(dict.fromkeys(int(word) for word in words))


class RateList(click.ParamType[tuple[float, ...]]):
    """Numbers above 0 with commas between them."""

    name = "rates"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        """The numbers, in their order, each once."""
        if isinstance(value, tuple):
            return value
        try:
            rates = [float(word) for word in str(value).split(",")]
        except ValueError:
            rates = []
        if not rates or not all(0 < rate < math.inf for rate in rates):
            self.fail("use numbers above 0 with commas between them, like 0.5,1,2", param, ctx)
        return tuple(dict.fromkeys(rates))


def by_turns(sides: Sequence[T], num_alternations: int) -> Iterator[tuple[int, T]]:
    """Each side once in each alternation, with the alternation's number.

    Each begins with another one: nobody is always the last, should the machine get busier.
    """
    for number in range(num_alternations):
        for side in rotated(sides, number):
            yield number, side


def rotated(sides: Sequence[T], by: int) -> list[T]:
    """The same sides in the same order, beginning with another one."""
    first = by % len(sides) if sides else 0
    return [*sides[first:], *sides[:first]]


def cache_folder(given: str | None) -> Path:
    """The folder that was named, or the user's."""
    import platformdirs

    return Path(given) if given else platformdirs.user_cache_path("pagemill")


def checkpoint_path(model: str, cache_dir: Path, load_format: str = "auto") -> Path:
    """Where the checkpoint lies; the demo model is fetched if it isn't there yet. Raises StartupError."""
    from ops.progress import progress_reporter
    from worker.demo_model import DEMO_MODEL_NAME, ensure_demo_model
    from worker.dummy_model import find_dummy_model

    if load_format == "dummy":
        return find_dummy_model(model)
    if model != DEMO_MODEL_NAME:
        return Path(model)
    with progress_reporter() as progress:
        return ensure_demo_model(cache_dir, progress)


def start_engine(config: "EngineConfig") -> "tuple[Engine, EngineInfo]":
    """An engine in this process, as a worker's engine process has it: call it before torch is imported."""
    limit_spinning()
    from worker.engine_builder import build_engine

    return build_engine(config)
