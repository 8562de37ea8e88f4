"""`pagemill bench`: the engine and its peers on one seeded workload, in one run, alternating."""

import sys
from collections.abc import Sequence
from typing import Any, Final

import click
from click.core import ParameterSource

from ops.bench.compare import run_bench
from ops.bench.flags import (
    NUMBERS,
    block_size_option,
    engine_mode_option,
    engine_options,
    json_option,
    peer_options,
    svg_option,
    workload_options,
)
from ops.bench.options import options_from
from ops.bench.presets import DEFAULT
from ops.bench.report import print_report
from ops.bench.result import publish
from ops.lazy_group import LazyGroup
from ops.params import COUNT

# Measurements with options of their own; each is a module ops.bench.NAME.
PARTS: Final = {
    "rates": "Latencies by the rate at which requests come, in bursts too, ours and the peers'.",
    "steps": "Single steps of the engine: how near to the machine's limits, and where their time goes.",
    "scheduler": "What the scheduler's decisions cost, without a model.",
    "modes": "Preemption modes on a trace, with a KV cache that is too small.",
    "quality": "What quantized weights, or a KV cache in 8 bits, change in predictions of a fixed text.",
    "block-sizes": "The workload with blocks of 8, 16, 32 and 64 tokens.",
    "delivery": "The queue and the wire without a model: pick-up, events, leases, a worker that is killed.",
    "tables": "Print the JSON results of measurements as Markdown tables.",
    "plot": "Draw the JSON results of measurements as SVG pictures.",
}


@click.group(
    cls=LazyGroup,
    package="ops.bench",
    summaries=PARTS,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True},
)
@click.option("--quick", is_flag=True, help="A small run, to see that everything works: its figures mean little.")
@click.option("--batches", type=NUMBERS, help="Sequences in flight at once, one run each.  [default: 1,8,32]")
@click.option("--alternations", type=COUNT, help="Runs of each side at each batch.  [default: 3, quick: 1]")
@click.option("--num-requests", type=COUNT, help="Requests at every batch.  [default: twice the batch, at least 8]")
@workload_options(DEFAULT)
@peer_options("transformers")
@engine_options
@block_size_option
@engine_mode_option
@click.option("--steps/--no-steps", default=True, help="Measure single steps as well: see `pagemill bench steps`.")
@json_option
@svg_option
@click.pass_context
def command(ctx: click.Context, /, json_file: str | None, svg: str | None, **values: Any) -> int:
    """Measure the engine and its peers on this machine, on one seeded workload.

    Replies are greedy and have exactly the wanted length. Our engine and the peers run the requests by turns, each in a
    process that sleeps while another runs. Tables go to stdout, and as its last line one JSON object with everything.
    Exit code 1: the first request's tokens are not those of `transformers`.

    --workload names the requests: mixed, short lognormal replies; chat, lognormal, prompts of 100 tokens and replies of
    55 in the median; article, 50 tokens for a whole batch at a time; azure, lengths of a recorded trace; shared-prompt,
    one system prompt for all; long-context, prompts of 1,500 tokens. For bursts and rates see `pagemill bench rates`.

    `pagemill bench COMMAND --help` explains a measurement with options of its own.
    """
    if ctx.invoked_subcommand is not None:
        _refuse_options_before(ctx, ctx.invoked_subcommand)
        return 0
    report = run_bench(options_from(values))
    print_report(report)
    publish(report, json_file, svg)
    return 0 if report["is_token_check_passed"] else 1


def _refuse_options_before(ctx: click.Context, name: str) -> None:
    """Raises UsageError: options of the comparison would change nothing of the measurement that is called `name`."""
    given = [
        param.opts[0]
        for param in ctx.command.params
        if param.name is not None and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(
            f"{', '.join(given)} would be ignored: options of `{name}` stand behind it, as in `pagemill bench {name} "
            f"{given[0]} ...`."
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run with these words (the process's own where left out); answers the exit code. Raises PagemillError."""
    words = sys.argv[1:] if argv is None else list(argv)
    code: int | None = command.main(args=words, prog_name="pagemill bench", standalone_mode=False)
    return code or 0


if __name__ == "__main__":
    raise SystemExit(main())
