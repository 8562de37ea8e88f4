"""`pagemill simulate`: the real scheduler on recorded traffic, with a cost model in the model's place."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

import click

from ops.progress import progress_reporter
from ops.simulate.adapt import scaled, window
from ops.simulate.errors import SimulateError
from ops.simulate.prefix_only import check_has_hashes, run_cache, run_plain_lru
from ops.simulate.presets import FIGURES, PRESETS, cost_model, figures_of, num_blocks_of
from ops.simulate.report import prefix_summary, print_prefix, print_summary
from ops.simulate.runs import EngineSizes, needed_blocks, share_of_need, simulate, trace_facts
from ops.simulate.traces import HASH_BLOCK_TOKENS, Trace, read_trace

DEFAULT_BLOCK_SIZE = 16

_COUNT = click.IntRange(min=1)
_ABOVE_0 = click.FloatRange(min=0, min_open=True)


class Percents(click.ParamType[tuple[float, ...]]):
    """Numbers above 0 with commas between them."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        """The numbers, in their order, each once."""
        if isinstance(value, tuple):
            return value
        try:
            percents = tuple(dict.fromkeys(float(word) for word in str(value).split(",")))
        except ValueError:
            percents = ()
        if not percents or not all(0 < percent <= 1000 for percent in percents):
            self.fail("use numbers above 0 and up to 1000 with commas between them, like 5,10,25", param, ctx)
        return percents


@click.command(context_settings={"show_default": True})
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--preset", type=click.Choice(list(PRESETS)), default="8b-h100", help="Model and machine to simulate.")
@click.option("--requests", "num_requests", type=_COUNT, help="So many requests in a row.  [default: all]")
@click.option("--seed", type=int, help="Draws where --requests begin.  [default: at the trace's begin]")
@click.option("--speed-up", type=_ABOVE_0, default=1.0, help="Requests arrive so many times as fast.")
@click.option("--scale-lengths", type=_ABOVE_0, default=1.0, help="Prompts and replies are so many times as long.")
@click.option("--num-blocks", type=_COUNT, help="KV pool in blocks.  [default: what the preset's memory holds]")
@click.option("--pool-share", type=_ABOVE_0, help="KV pool as a share of what the trace needs, found by a run before.")
@click.option("--block-size", type=_COUNT, help="Tokens in a block.  [default: 16; 512 with --prefix-only]")
@click.option("--max-num-seqs", type=_COUNT, default=128, help="Most sequences that run at a time.")
@click.option("--max-num-batched-tokens", type=_COUNT, help="Token budget of a step.  [default: 6144, cpu: 512]")
@click.option("--max-model-len", type=_COUNT, help="Most tokens of a request.  [default: those of the longest]")
@click.option("--prefix-caching/--no-prefix-caching", default=True, help="Reuse blocks of equal prompt beginnings.")
@click.option("--params-b", type=_ABOVE_0, help="Weights that a token is multiplied with, in billions.")
@click.option("--weights-gb", type=_ABOVE_0, help="Gigabytes of weights that a step reads.")
@click.option("--kv-kib", type=_ABOVE_0, help="KiB of keys and values of a token.")
@click.option("--attention-mflop", type=_ABOVE_0, help="MFLOP of a token's attention to one other.")
@click.option("--bandwidth-gb-s", type=_ABOVE_0, help="GB/s read from the device's memory.")
@click.option("--compute-tflops", type=_ABOVE_0, help="TFLOP/s achieved.")
@click.option("--link-gb-s", type=_ABOVE_0, help="GB/s each way between the KV tiers.")
@click.option("--overhead-ms", type=click.FloatRange(min=0), help="Milliseconds added to each step.")
@click.option("--chrome-trace", type=click.Path(dir_okay=False, path_type=Path), help="Write steps and requests here.")
@click.option("--prefix-only", is_flag=True, help="Only the prefix cache, without time, beside a plain LRU.")
@click.option(
    "--sizes", type=Percents(), default="5,10,25,50,100", help="Sizes of --prefix-only, in % of distinct blocks."
)
def command(trace: Path, prefix_only: bool, sizes: tuple[float, ...], **values: Any) -> None:
    """Run recorded traffic through the real scheduler, with a cost model instead of a model.

    TRACE is a CSV of Azure's (TIMESTAMP, ContextTokens, GeneratedTokens), a JSONL of Mooncake's (timestamp,
    input_length, output_length, hash_ids), or one that a worker recorded with --record-trace. Flags from --params-b
    to --overhead-ms replace the preset's figures.

    Tables go to stdout, and as its last line one JSON object with everything.
    """
    started = time.monotonic()
    if values["num_blocks"] is not None and values["pool_share"] is not None:
        raise click.UsageError("--num-blocks and --pool-share exclude each other: leave one of them out.")
    chosen = scaled(
        window(read_trace(trace), values["num_requests"], values["seed"]),
        speed_up=values["speed_up"],
        lengths=values["scale_lengths"],
    )
    report: dict[str, Any] = {"simulate": "pagemill", "trace": {"file": trace.name, **trace_facts(chosen)}}
    if prefix_only:
        block_size = values["block_size"] or HASH_BLOCK_TOKENS
        report |= {"block_size": block_size, "sizes": _run_prefix_only(chosen, sizes, block_size)}
        print_prefix(report["sizes"])
    else:
        report |= _run(chosen, **values)
        print_summary(report["result"])
    print(json.dumps(report | {"took_s": time.monotonic() - started}))


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
    block_size = values["block_size"] or DEFAULT_BLOCK_SIZE
    num_blocks = values["num_blocks"]
    if num_blocks is None:
        num_blocks = 1 if pool_share is not None else num_blocks_of(preset, figures, block_size)
    sizes = EngineSizes(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=values["max_num_seqs"],
        max_num_batched_tokens=values["max_num_batched_tokens"] or PRESETS[preset].max_num_batched_tokens,
        enable_prefix_caching=values["prefix_caching"],
        max_model_len=values["max_model_len"],
    )
    need = None
    with progress_reporter() as progress, _opened(values["chrome_trace"]) as chrome_file:
        if pool_share is not None:
            need = needed_blocks(trace, sizes, model, lambda done, total: progress("finding the need", done, total))
            sizes = replace(sizes, num_blocks=share_of_need(trace, sizes, need, pool_share))
        metrics, refused = simulate(
            trace,
            sizes,
            model,
            chrome_file=chrome_file,
            progress=lambda done, total: progress("simulating", done, total),
        )
    options = {name: values[name] for name in ("seed", "speed_up", "scale_lengths")}
    return {
        "options": {"preset": preset, "pool_share": pool_share, **options},
        "costs": figures,
        "sizes": asdict(sizes) | {"needed_blocks": need},
        "result": metrics.summary() | {"refused_requests": len(refused)},
    }


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
