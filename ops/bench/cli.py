"""`pagemill bench`: the engine and its peers on one seeded workload, in one run, alternating."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from ops.bench.compare import run_bench
from ops.bench.options import ITEMSIZES, LLAMACPP_WEIGHTS, options_from
from ops.bench.parts import (
    COUNT,
    NameList,
    NumberList,
    cache_dir_option,
    engine_mode_option,
    json_option,
    load_format_option,
    model_option,
    seed_option,
    svg_option,
)
from ops.bench.peers.catalog import ALL, BY_NAME, NONE
from ops.bench.peers.gguf_files import TYPES
from ops.bench.pictures import check_installed, draw_report
from ops.bench.presets import DEFAULT, PRESETS
from ops.bench.report import print_report
from ops.lazy_group import LazyGroup

# Measurements with options of their own; each is a module ops.bench.NAME.
PARTS: Final = {
    "rates": "Latencies by the rate at which requests come, open loop: ours and the peers that take arrivals.",
    "steps": "Single steps by the machine's limits: decode, prefill, attention, and where a step's time goes.",
    "scheduler": "What deciding a step costs, without a model.",
    "modes": "Preemption modes on a trace, with a KV cache that is too small.",
    "quality": "What quantized weights change in the predictions of a fixed text.",
    "block-sizes": "The workload with blocks of 8, 16, 32 and 64 tokens.",
    "delivery": "The queue and the wire without a model: pick-up, events, leases, a worker that is killed.",
    "tables": "Print the JSON results of measurements as Markdown tables.",
    "plot": "Draw the JSON results of measurements as SVG pictures.",
}

_MEAN = click.FloatRange(min=1)
_SIGMA = click.FloatRange(min=0, max=3)


@click.group(
    cls=LazyGroup,
    package="ops.bench",
    summaries=PARTS,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True},
)
@model_option
@load_format_option
@click.option("--quick", is_flag=True, help="A small run, to see that everything works: its figures mean little.")
@click.option("--workload", type=click.Choice(list(PRESETS)), default=DEFAULT, help="Which requests; see below.")
@click.option("--batches", type=NumberList(), help="Sequences in flight at once, one run each.  [default: 1,8,32]")
@click.option("--alternations", type=COUNT, help="Runs of each side at each batch.  [default: 3, quick: 1]")
@seed_option
@click.option("--num-requests", type=COUNT, help="Requests at every batch.  [default: twice the batch, at least 8]")
@click.option("--prompt-mean", type=_MEAN, help="Mean prompt length in tokens.  [default: the workload's]")
@click.option("--prompt-sigma", type=_SIGMA, help="Deviation of its logarithm.  [default: the workload's]")
@click.option("--output-mean", type=_MEAN, help="Mean reply length in tokens.  [default: the workload's]")
@click.option("--output-sigma", type=_SIGMA, help="Deviation of its logarithm.  [default: the workload's]")
@click.option("--trace", type=click.Path(dir_okay=False), help="The recorded trace of --workload azure.")
@click.option(
    "--scale-lengths", type=click.FloatRange(min=0, min_open=True), default=0.1, help="Its lengths, times this."
)
@click.option(
    "--peers",
    type=NameList(),
    default="transformers",
    help=f"Whom to compare with, commas between: {', '.join(BY_NAME)}; {ALL} that are installed, or {NONE}.",
)
@click.option(
    "--peer-python",
    multiple=True,
    metavar="NAME=PATH",
    help="The Python in which a peer is installed, where it isn't this one; may be repeated.",
)
@click.option(
    "--llamacpp-weights",
    type=click.Choice(TYPES),
    help="Type of llama.cpp's weights, made of the model's.  [default: F32, beside int8: Q8_0]",
)
@click.option("--dtype", type=click.Choice(["auto", *ITEMSIZES]), default="auto", help="Of weights and KV cache.")
@click.option(
    "--quantization", type=click.Choice(list(LLAMACPP_WEIGHTS)), default="none", help="Of our engine's weights alone."
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where all sides run.")
@click.option("--block-size", type=click.Choice([8, 16, 32, 64]), default=16, help="Tokens in a block of the KV cache.")
@click.option("--num-threads", type=COUNT, help="CPU threads of each side.  [default: as each side chooses]")
@engine_mode_option
@click.option("--steps/--no-steps", default=True, help="Measure single steps as well: see `pagemill bench steps`.")
@cache_dir_option
@json_option
@svg_option
@click.pass_context
def command(ctx: click.Context, /, json_file: str | None, svg: str | None, **values: Any) -> int:
    """Measure the engine and its peers on this machine, on one seeded workload.

    Replies are greedy and have exactly the wanted length. Our engine and the peers run the requests by turns, each in a
    process that sleeps while another runs. Tables go to stdout, and as its last line one JSON object with everything.
    Exit code 1: the first request's tokens are not those of `transformers`.

    Workloads: mixed, short lognormal replies; chat, lognormal, prompts of 100 tokens and replies of 55 in the median;
    article, 50 tokens for a whole batch at a time; azure, lengths of a recorded trace; shared-prompt, one system prompt
    for all; long-context, prompts of 1,500 tokens. Bursts and rates: `pagemill bench rates`.

    `pagemill bench COMMAND --help` explains a measurement with options of its own.
    """
    if ctx.invoked_subcommand is not None:
        return 0
    if svg is not None:
        check_installed()
    report = run_bench(options_from(values))
    print_report(report)
    line = json.dumps(report)
    if json_file is not None:
        Path(json_file).write_text(line + "\n")
    if svg is not None:
        draw_report(report, Path(svg))
    print(line)
    return 0 if report["is_token_check_passed"] else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run with these words (the process's own where left out); answers the exit code. Raises PagemillError."""
    words = sys.argv[1:] if argv is None else list(argv)
    code: int | None = command.main(args=words, prog_name="pagemill bench", standalone_mode=False)
    return code or 0


if __name__ == "__main__":
    raise SystemExit(main())
