"""`pagemill simulate`: the real scheduler on recorded traffic, with a cost model in the model's place."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TextIO

import click

from ops.params import ABOVE_0, COUNT, CommaList, number_up_to
from ops.progress import progress_reporter
from ops.simulate.adapt import scaled, window, with_burst
from ops.simulate.burst import recovery
from ops.simulate.compare import compare_modes
from ops.simulate.cost import CostModel
from ops.simulate.engine_flags import engine_flags, engine_sizes
from ops.simulate.errors import SimulateError
from ops.simulate.prefix_only import check_has_hashes, run_cache, run_plain_lru
from ops.simulate.presets import FIGURES, PRESETS, cost_model, figures_of
from ops.simulate.report import prefix_summary, print_comparison, print_prefix, print_summary
from ops.simulate.runs import EngineSizes, Progress, needed_blocks, share_of_need, simulate, trace_facts
from ops.simulate.traces import HASH_BLOCK_TOKENS, Trace, read_trace

PERCENTS: Final = CommaList(
    "numbers", number_up_to(1000), "use numbers above 0 and up to 1000 with commas between them, like 5,10,25"
)


@click.command(context_settings={"show_default": True})
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--preset", type=click.Choice(list(PRESETS)), default="8b-h100", help="Model and machine to simulate.")
@click.option("--requests", "num_requests", type=COUNT, help="So many requests in a row.  [default: all]")
@click.option("--seed", type=int, help="Draws where --requests begin.  [default: at the trace's begin]")
@click.option("--speed-up", type=ABOVE_0, default=1.0, help="Requests arrive so many times as fast.")
@click.option("--scale-lengths", type=ABOVE_0, default=1.0, help="Prompts and replies are so many times as long.")
@click.option("--scale-replies", type=ABOVE_0, default=1.0, help="Replies alone are so many times as long as that.")
@click.option("--burst", type=COUNT, help="So many requests, from the middle on, arrive at once.")
@engine_flags
@click.option("--params-b", type=ABOVE_0, help="Weights that a token is multiplied with, in billions.")
@click.option("--weights-gb", type=ABOVE_0, help="Gigabytes of weights that a step reads.")
@click.option("--kv-kib", type=ABOVE_0, help="KiB of keys and values of a token.")
@click.option("--attention-mflop", type=ABOVE_0, help="MFLOP of a token's attention to one other.")
@click.option("--bandwidth-gb-s", type=ABOVE_0, help="GB/s read from the device's memory.")
@click.option("--compute-tflops", type=ABOVE_0, help="TFLOP/s achieved.")
@click.option("--link-gb-s", type=ABOVE_0, help="GB/s each way between the KV tiers.")
@click.option("--overhead-ms", type=click.FloatRange(min=0), help="Milliseconds added to each step.")
@click.option("--compare-modes", is_flag=True, help="Run swap, recompute and auto, and say how well auto chooses.")
@click.option("--chrome-trace", type=click.Path(dir_okay=False, path_type=Path), help="Write steps and requests here.")
@click.option("--prefix-only", is_flag=True, help="Only the prefix cache, without time, beside a plain LRU.")
@click.option(
    "--sizes", type=PERCENTS, default="5,10,25,50,100", help="Sizes of --prefix-only, in % of distinct blocks."
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the JSON object here, too."
)
def command(trace: Path, prefix_only: bool, sizes: tuple[float, ...], json_file: Path | None, **values: Any) -> None:
    """Run recorded traffic through the real scheduler, with a cost model instead of a model.

    TRACE is a CSV of Azure's (TIMESTAMP, ContextTokens, GeneratedTokens), a JSONL of Mooncake's (timestamp,
    input_length, output_length, hash_ids), or one that a worker recorded with --record-trace. Flags from --params-b
    to --overhead-ms replace the preset's figures.

    Tables go to stdout, and as its last line one JSON object with everything. With --compare-modes the same trace runs
    in each preemption mode, and what auto makes of it is divided by what the better of the others does.
    """
    started = time.monotonic()
    if values["num_blocks"] is not None and values["pool_share"] is not None:
        raise click.UsageError("--num-blocks and --pool-share exclude each other: leave one of them out.")
    if values["compare_modes"] and (values["chrome_trace"] or values["burst"]):
        raise click.UsageError("--compare-modes makes three runs: leave --chrome-trace and --burst out.")
    chosen = scaled(
        window(read_trace(trace), values["num_requests"], values["seed"]),
        speed_up=values["speed_up"],
        lengths=values["scale_lengths"],
        replies=values["scale_replies"],
    )
    report: dict[str, Any] = {"simulate": "pagemill", "trace": {"file": trace.name, **trace_facts(chosen)}}
    if prefix_only:
        block_size = values["block_size"] or HASH_BLOCK_TOKENS
        report |= {"block_size": block_size, "sizes": _run_prefix_only(chosen, sizes, block_size)}
        print_prefix(report["sizes"])
    else:
        report |= _run(chosen, **values)
        if values["compare_modes"]:
            print_comparison(report["result"])
        else:
            print_summary(report["result"])
    line = json.dumps(report | {"took_s": time.monotonic() - started})
    if json_file is not None:
        with _opened(json_file) as file:
            print(line, file=file)
    print(line)


def _run_prefix_only(trace: Trace, percents: tuple[float, ...], block_size: int) -> list[dict[str, Any]]:
    check_has_hashes(trace)
    num_distinct = trace.num_distinct_hashes
    found = []
    with progress_reporter() as progress:
        for index, percent in enumerate(percents):
            progress("replaying", index, len(percents))
            num_hashes = max(1, round(num_distinct * percent / 100))
            num_blocks = max(1, num_hashes * trace.tokens_per_hash // block_size)
            ours = run_cache(trace, num_blocks, block_size)
            found.append(prefix_summary(percent, ours, run_plain_lru(trace, num_hashes)))
        progress("replaying", len(percents), len(percents))
    return found


def _run(trace: Trace, *, preset: str, pool_share: float | None, **values: Any) -> dict[str, Any]:
    figures = figures_of(preset, {name: values[name] for name in FIGURES})
    model = cost_model(figures)
    sizes = engine_sizes(preset, figures, values | {"pool_share": pool_share})
    need = None
    with progress_reporter() as progress:
        if pool_share is not None:
            need = needed_blocks(trace, sizes, model, lambda done, total: progress("finding the need", done, total))
            sizes = replace(sizes, num_blocks=share_of_need(trace, sizes, need, pool_share))
        is_tier_wanted = values["compare_modes"] or values["preemption_mode"] == "swap"
        if values["num_swap_blocks"] is None and is_tier_wanted:
            sizes = replace(sizes, num_swap_blocks=need or sizes.num_blocks)
        if values["compare_modes"]:
            result = compare_modes(trace, sizes, model, lambda stage: partial(progress, stage))
        else:
            result = _run_once(trace, sizes, model, values, partial(progress, "simulating"))
    options = {name: values[name] for name in ("seed", "speed_up", "scale_lengths", "scale_replies", "burst")}
    return {
        "options": {"preset": preset, "pool_share": pool_share, **options},
        "costs": figures,
        "sizes": asdict(sizes) | {"needed_blocks": need},
        "result": result,
    }


def _run_once(
    trace: Trace, sizes: EngineSizes, model: CostModel, values: dict[str, Any], progress: Progress
) -> dict[str, Any]:
    burst_s = None
    if values["burst"] is not None:
        trace, burst_s = with_burst(trace, values["burst"])
    with _opened(values["chrome_trace"]) as chrome_file:
        metrics, refused = simulate(trace, sizes, model, chrome_file=chrome_file, progress=progress)
    result = metrics.summary() | {"refused_requests": len(refused)}
    return result if burst_s is None else result | {"burst": recovery(metrics, burst_s)}


@contextmanager
def _opened(path: Path | None) -> Iterator[TextIO | None]:
    """The file to write to, or None where none was asked for. Raises SimulateError where it can't be written."""
    if path is None:
        yield None
        return
    try:
        with path.open("w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise SimulateError(f"can't write {path}: {error.strerror}") from None
