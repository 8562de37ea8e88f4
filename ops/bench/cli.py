"""`pagemill bench`: the engine and its peers on one seeded workload, in one run, alternating."""

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import click

from model.config import ModelConfig
from ops.bench.errors import BenchError
from ops.bench.machine import machine_facts, warnings_of
from ops.bench.measure import Measurement, num_blocks_for, say
from ops.bench.parts import (
    COUNT,
    NumberList,
    cache_dir_option,
    cache_folder,
    checkpoint_path,
    load_format_option,
    model_option,
    seed_option,
)
from ops.bench.report import check_lines, facts_lines, judge_bars, print_report, summarize
from ops.bench.side import SideProcess
from ops.bench.workload import Lengths, WorkloadShape, draw_lengths
from ops.lazy_group import LazyGroup

ITEMSIZES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
# Measurements with options of their own; each is a module ops.bench.NAME.
PARTS: Final = {
    "scheduler": "What deciding a step costs, without a model.",
    "modes": "Preemption modes on a trace, with a KV cache that is too small.",
    "block-sizes": "The workload with blocks of 8, 16, 32 and 64 tokens.",
    "delivery": "The queue and the wire without a model: pick-up, events, leases, a worker that is killed.",
}


@dataclass(frozen=True, slots=True)
class Preset:
    """Sizes of a run. num_requests of a batch: `rounds` times the batch, but no fewer than `min_requests`."""

    shape: WorkloadShape
    rounds: int
    min_requests: int
    alternations: int


# Sized for two cores: all batches and alternations in about ten minutes, most of which the peer takes.
FULL: Final = Preset(WorkloadShape(120, 0.4, 32, 0.8), rounds=2, min_requests=8, alternations=3)
# To see that everything works; its figures are too few to mean anything.
QUICK: Final = Preset(WorkloadShape(24, 0.4, 8, 0.5), rounds=1, min_requests=2, alternations=1)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What is measured, defaults filled in."""

    model: str
    load_format: str
    batches: tuple[int, ...]
    alternations: int
    seed: int
    shape: WorkloadShape
    rounds: int
    min_requests: int
    num_requests: int | None
    peers: str
    dtype: str
    device: str
    block_size: int
    num_threads: int | None
    engine_mode: str
    cache_dir: str
    is_quick: bool

    def num_requests_of(self, batch: int) -> int:
        """How many requests of the list are run at this batch."""
        return self.num_requests or max(self.min_requests, self.rounds * batch)


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
@click.option("--batches", type=NumberList(), default="1,8,32", help="Sequences in flight at once, one run each.")
@click.option("--alternations", type=COUNT, help="Runs of each side at each batch.  [default: 3, quick: 1]")
@seed_option
@click.option("--num-requests", type=COUNT, help="Requests at every batch.  [default: twice the batch, at least 8]")
@click.option("--prompt-mean", type=_MEAN, help="Mean prompt length in tokens.  [default: 120, quick: 24]")
@click.option("--prompt-sigma", type=_SIGMA, help="Deviation of its logarithm.  [default: 0.4]")
@click.option("--output-mean", type=_MEAN, help="Mean reply length in tokens.  [default: 32, quick: 8]")
@click.option("--output-sigma", type=_SIGMA, help="Deviation of its logarithm.  [default: 0.8, quick: 0.5]")
@click.option(
    "--peers", type=click.Choice(["transformers", "none"]), default="transformers", help="Whom to compare with."
)
@click.option("--dtype", type=click.Choice(["auto", *ITEMSIZES]), default="auto", help="Of weights and KV cache.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where both sides run.")
@click.option("--block-size", type=click.Choice([8, 16, 32, 64]), default=16, help="Tokens in a block of the KV cache.")
@click.option("--num-threads", type=COUNT, help="CPU threads of each side.  [default: as each side chooses]")
@click.option(
    "--engine-mode",
    type=click.Choice(["process", "inprocess"]),
    default="process",
    help="The engine in a process of its own, so that its pipe counts as host work, or called directly.",
)
@cache_dir_option
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False), help="Write the JSON result to this file as well."
)
@click.pass_context
def command(ctx: click.Context, /, quick: bool, json_file: str | None, **values: Any) -> int:
    """Measure the engine and its peers on this machine, on one seeded workload.

    Requests have lognormal lengths and greedy replies of exactly the wanted length. Our engine and `transformers` run
    them by turns, each in a process that sleeps while the other runs. Tables go to stdout, and as its last line one
    JSON object with everything. Exit code 1: the first request's tokens are not the peer's.

    `pagemill bench COMMAND --help` explains a measurement with options of its own.
    """
    if ctx.invoked_subcommand is not None:
        return 0
    report = run_bench(_options(QUICK if quick else FULL, is_quick=quick, **values))
    print_report(report)
    line = json.dumps(report)
    if json_file is not None:
        Path(json_file).write_text(line + "\n")
    print(line)
    return 0 if report["is_token_check_passed"] else 1


def _options(preset: Preset, **values: Any) -> BenchOptions:
    shape = asdict(preset.shape)
    chosen = {name: shape[name] if values[name] is None else values.pop(name) for name in shape}
    return BenchOptions(
        shape=WorkloadShape(**chosen),
        rounds=preset.rounds,
        min_requests=preset.min_requests,
        alternations=values.pop("alternations") or preset.alternations,
        cache_dir=str(cache_folder(values.pop("cache_dir"))),
        **{name: value for name, value in values.items() if name not in shape},
    )


def run_bench(options: BenchOptions) -> dict[str, Any]:
    """Everything, measured: the report. Progress goes to stderr. Raises PagemillError with one line."""
    started = time.monotonic()
    path = checkpoint_path(options.model, Path(options.cache_dir), options.load_format)
    config = _config(path, options.load_format)
    machine = machine_facts()
    for line in warnings_of(machine, []):
        say(f"warning: {line}")
    lengths = {
        batch: draw_lengths(options.shape, options.num_requests_of(batch), options.seed) for batch in options.batches
    }
    _check_fit(lengths, config.max_position_embeddings)
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(SideProcess("pagemill's side", "ops.bench.ours", _ours_options(options, path)))
        say("starting the engine")
        first = options.batches[0]
        num_kv_blocks = num_blocks_for(lengths[first], first, options.block_size)
        engine = ours.ask("prepare", batch=first, num_kv_blocks=num_kv_blocks)
        common = {"dtype": engine["dtype"], "device": engine["device"], "num_threads": options.num_threads}
        limits = _measure_limits(common)
        peer, peer_facts = None, None
        if options.peers == "transformers":
            peer_options = common | {
                "model_path": str(path),
                "cache_dir": options.cache_dir,
                "load_format": options.load_format,
            }
            peer = stack.enter_context(SideProcess("transformers' side", "ops.bench.peers", peer_options))
            say("starting transformers")
            peer_facts = peer.ask("prepare")
        measurement = Measurement(
            ours,
            peer,
            vocab_size=engine["vocab_size"],
            block_size=options.block_size,
            dtype=engine["dtype"],
            seed=options.seed,
            num_alternations=options.alternations,
            say=say,
        )
        results = [measurement.run_batch(batch, lengths[batch]) for batch in options.batches]
    batches = summarize(results, config, ITEMSIZES[engine["dtype"]], limits)
    report = {
        "bench": "pagemill",
        "machine": machine,
        "options": asdict(options),
        "workload": asdict(options.shape) | {"seed": options.seed},
        "engine": {name: engine[name] for name in ("dtype", "device", "block_size", "fingerprint")},
        "peer": peer_facts,
        "limits": limits,
        "batches": batches,
        "bars": [] if options.is_quick else judge_bars(batches),
        "is_token_check_passed": all(not each.check or each.check.verdict != "different" for each in results),
        "warnings": warnings_of(machine, [each for result in results for each in result.disturbances]),
        "took_s": time.monotonic() - started,
    }
    _tell_the_rest(report)
    return report


def _tell_the_rest(report: dict[str, Any]) -> None:
    for line in (*facts_lines(report), *check_lines(report["batches"])):
        say(line)
    for line in report["warnings"]:
        say(f"warning: {line}")
    say(f"took {report['took_s']:.0f} s")


def _config(path: Path, load_format: str) -> ModelConfig:
    from model.errors import ModelError
    from model.loader import load_config

    try:
        return load_config(path, load_format)
    except ModelError as error:
        raise BenchError(str(error)) from error


def _ours_options(options: BenchOptions, path: Path) -> dict[str, Any]:
    config = {
        "model_path": str(path),
        "cache_dir": options.cache_dir,
        "load_format": options.load_format,
        "device": options.device,
        "dtype": options.dtype,
        "block_size": options.block_size,
        "num_threads": options.num_threads,
    }
    return {"config": config, "mode": options.engine_mode}


def _measure_limits(common: dict[str, Any]) -> dict[str, Any]:
    """In a process that ends before anything is measured against it."""
    say("measuring the machine's limits")
    with SideProcess("the measurement of limits", "ops.bench.limits", common) as side:
        limits: dict[str, Any] = side.ask("measure")
    return limits


def _check_fit(lengths: dict[int, list[Lengths]], max_tokens: int) -> None:
    longest = max(each.num_prompt + each.num_output for batch in lengths.values() for each in batch)
    if longest > max_tokens:
        raise BenchError(
            f"the longest request has {longest} tokens, but the model's context is {max_tokens}: "
            "lower --prompt-mean, --output-mean or their sigmas"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run with these words (the process's own where left out); answers the exit code. Raises PagemillError."""
    words = sys.argv[1:] if argv is None else list(argv)
    code: int | None = command.main(args=words, prog_name="pagemill bench", standalone_mode=False)
    return code or 0


if __name__ == "__main__":
    raise SystemExit(main())
