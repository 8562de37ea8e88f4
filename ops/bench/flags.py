"""The options that measurements share, as decorators: what each is called, what it takes, and what help says of it."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from ops.bench.errors import BenchError
from ops.bench.options import ITEMSIZES, LLAMACPP_WEIGHTS
from ops.bench.peers.catalog import ALL, BY_NAME, NONE, check_names
from ops.bench.peers.gguf_files import TYPES
from ops.bench.pictures import check_installed
from ops.bench.presets import PRESETS
from ops.params import ABOVE_0, COUNT, CommaList, number_up_to, read_count, read_name
from worker.engine_config import BLOCK_SIZES

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]

CACHE_VARIABLE: Final = "PAGEMILL_CACHE_DIR"
_MEAN: Final = click.FloatRange(min=1)
_SIGMA: Final = click.FloatRange(min=0, max=3)


NUMBERS: Final = CommaList("numbers", read_count, "use whole numbers from 1 with commas between them, like 1,8,32")
RATES: Final = CommaList("rates", number_up_to(math.inf), "use numbers above 0 with commas between them, like 0.5,1,2")


class PeerList(CommaList[str]):
    """Names of peers with commas between them, or ALL, or NONE."""

    def __init__(self) -> None:
        super().__init__("names", read_name, "use names with commas between them, like transformers,vllm")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """The names, in their order, each once."""
        names = super().convert(value, param, ctx)
        try:
            check_names(names)
        except BenchError as error:
            self.fail(str(error), param, ctx)
        return names


def _together(*options: Decorator) -> Decorator:
    """One decorator of several options, which help lists in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _in_a_folder(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """The file's name, if it can be written: better told before a measurement than after it."""
    if value is not None and not os.access(folder := Path(value).parent, os.W_OK):
        raise click.BadParameter(f"there is no folder {folder} that can be written to: make it first.", ctx, param)
    return value


def _drawable(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """The folder's name, if pictures can be drawn. Raises BenchError."""
    if value is not None:
        check_installed()
    return value


model_option = click.option(
    "--model", default="smollm2", help="Checkpoint folder, GGUF file, or `smollm2`, the demo model."
)
num_threads_option = click.option(
    "--num-threads",
    type=COUNT,
    help="CPU threads of the engine, and of each peer.  [default: one per core; a peer's own]",
)
cache_dir_option = click.option(
    "--cache-dir",
    envvar=CACHE_VARIABLE,
    show_envvar=True,
    help="Folder of the demo model, converted weights and compiled kernels.  [default: the user's cache folder]",
)
# What every measurement that starts an engine takes; parts.engine_config reads it.
engine_options = _together(
    model_option,
    click.option(
        "--load-format",
        type=click.Choice(["auto", "dummy"]),
        default="auto",
        help="`dummy` takes random weights in the shapes of a config.json, or of a preset such as Llama-3.1-8B.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["auto", *ITEMSIZES]),
        default="auto",
        help="Number format of weights and KV cache; `auto` is float32 on the CPU, the checkpoint's own on CUDA.",
    ),
    click.option(
        "--quantization",
        type=click.Choice(list(LLAMACPP_WEIGHTS)),
        default="none",
        help="How our engine's weights are kept; a peer's stay as they are, but for --llamacpp-weights.",
    ),
    click.option(
        "--device",
        type=click.Choice(["auto", "cpu", "cuda"]),
        default="auto",
        help="Where models run, a peer's too; `auto` takes CUDA where there is a device.",
    ),
    num_threads_option,
    cache_dir_option,
)
block_size_option = click.option(
    "--block-size", type=click.Choice(BLOCK_SIZES), default=16, help="Tokens in a block of the KV cache."
)
engine_mode_option = click.option(
    "--engine-mode",
    type=click.Choice(["process", "inprocess"]),
    default="process",
    help="Our engine in a process of its own, so that its pipe counts as host work, or called directly.",
)
alternations_option = click.option("--alternations", type=COUNT, default=3, help="Runs of each, by turns.")
seed_option = click.option("--seed", type=int, default=0, help="Decides lengths and ids of all requests.")
json_option = click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, writable=True),
    callback=_in_a_folder,
    help="Write the JSON result to this file, too.",
)
svg_option = click.option(
    "--svg",
    type=click.Path(file_okay=False),
    callback=_drawable,
    help="Draw the result as SVG pictures into this folder, too.",
)


def workload_options(default: str) -> Decorator:
    """Which requests are run: a workload, changes to its shape, a trace and the seed."""
    return _together(
        click.option("--workload", type=click.Choice(list(PRESETS)), default=default, help="Which requests."),
        click.option("--prompt-mean", type=_MEAN, help="Mean prompt length in tokens.  [default: the workload's]"),
        click.option(
            "--prompt-sigma",
            type=_SIGMA,
            help="Standard deviation of the logarithm of prompt lengths.  [default: the workload's]",
        ),
        click.option("--output-mean", type=_MEAN, help="Mean reply length in tokens.  [default: the workload's]"),
        click.option(
            "--output-sigma",
            type=_SIGMA,
            help="Standard deviation of the logarithm of reply lengths.  [default: the workload's]",
        ),
        click.option("--trace", type=click.Path(dir_okay=False), help="The recorded trace of --workload azure."),
        click.option("--scale-lengths", type=ABOVE_0, default=0.1, help="Multiply the trace's lengths by this."),
        seed_option,
    )


def peer_options(default: str) -> Decorator:
    """Whom to compare with, and how."""
    names = f"{', '.join(BY_NAME)}; {ALL} that are installed, or {NONE}"
    return _together(
        click.option(
            "--peers", type=PeerList(), default=default, help=f"Whom to compare with, commas between: {names}."
        ),
        click.option(
            "--peer-python",
            multiple=True,
            metavar="NAME=PATH",
            help="The Python in which a peer is installed, where it isn't this one; may be repeated.",
        ),
        click.option(
            "--llamacpp-weights",
            type=click.Choice(TYPES),
            help="Type of llama.cpp's weights, made of the model's.  [default: F32; beside int8 Q8_0, int4 Q4_1]",
        ),
    )
