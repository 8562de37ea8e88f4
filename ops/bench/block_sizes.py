"""`pagemill bench block-sizes`: the same requests with blocks of 8, 16, 32 and 64 tokens."""

import statistics
import time
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import click

from ops.bench.flags import (
    alternations_option,
    engine_options,
    json_option,
    seed_option,
    svg_option,
)
from ops.bench.machine import machine_facts
from ops.bench.measure import num_blocks_for, say
from ops.bench.ours import Ours
from ops.bench.parts import by_turns, engine_config
from ops.bench.presets import FULL
from ops.bench.result import publish
from ops.bench.runs import OursRun, percentile, spread
from ops.bench.workload import BenchRequest, draw_lengths, make_requests, warm_up_lengths
from ops.params import COUNT, CommaList, read_count
from ops.tables import print_table
from worker.engine_config import BLOCK_SIZES

COLUMNS: Final = (
    *("block", "KV use", "requests/s", "by that of 16: fastest runs", "by processor time: median", "range"),
    *("token p50 ms", "token p99 ms"),
)
REFERENCE: Final = 16


def _read_size(word: str) -> int:
    if (size := read_count(word)) not in BLOCK_SIZES:
        raise ValueError(f"there are no blocks of {size}")
    return size


SIZES: Final = CommaList(
    "sizes", _read_size, f"use some of {', '.join(map(str, BLOCK_SIZES))} with commas between them, like 8,16"
)


@dataclass(frozen=True, slots=True)
class SizeRun:
    """A run, and the processor time of this process in it."""

    run: OursRun
    cpu_s: float


@click.command()
@click.option(
    "--sizes",
    type=SIZES,
    default="8,16,32,64",
    help="Tokens in a block, one engine each; ratios are to that of 16.",
)
@click.option("--batch", type=COUNT, default=8, help="Sequences in flight at once.")
@click.option("--num-requests", type=COUNT, default=16, help="Requests of a run.")
@alternations_option
@seed_option
@engine_options
@json_option
@svg_option
def command(sizes: tuple[int, ...], batch: int, json_file: str | None, svg: str | None, **values: Any) -> None:
    """Measure KV use and request rate at several block sizes, by turns, on the bench's workload.

    All have room for all sequences in flight, so that nobody is preempted. The request rate is divided by that with
    blocks of 16: in the fastest run of each, since what else runs only makes one slower, and a second of processor time
    in each alternation. A table goes to stdout, and one JSON object as its last line.
    """
    started = time.monotonic()
    lengths = draw_lengths(FULL.shape, values["num_requests"], values["seed"])
    machine = machine_facts()
    sides = _sides(sizes, values)
    vocab_size = 0
    for size, side in sides.items():
        say(f"starting the engine with blocks of {size}")
        info = side.prepare(batch=batch, num_kv_blocks=num_blocks_for(lengths, batch, size))
        vocab_size = info["vocab_size"]
        side.run(_plain(make_requests(warm_up_lengths(lengths), vocab_size=vocab_size, seed=0, salt=f"warm {size}")))
    runs: dict[int, list[SizeRun]] = {size: [] for size in sizes}
    for number, size in by_turns(sizes, values["alternations"]):
        requests = make_requests(lengths, vocab_size=vocab_size, seed=values["seed"], salt=f"{number} {size}")
        before_s = time.process_time()
        run = OursRun(**sides[size].run(_plain(requests)))
        runs[size].append(SizeRun(run, time.process_time() - before_s))
        say(f"blocks of {size}: {run.wall_s:.1f} s, KV use {run.kv_use:.1%}")
    for side in sides.values():
        side.close()
    found = [summary_of(size, runs, len(lengths)) for size in sizes]
    print_table("Block sizes", COLUMNS, [_row(each) for each in found])
    report = {
        "bench": "pagemill block-sizes",
        "machine": machine,
        "options": {"batch": batch} | {name: value for name, value in values.items() if name != "cache_dir"},
        "workload": asdict(FULL.shape),
        "sizes": found,
        "took_s": time.monotonic() - started,
    }
    publish(report, json_file, svg)


def _sides(sizes: tuple[int, ...], values: dict[str, Any]) -> dict[int, Ours]:
    common = engine_config(values)
    return {size: Ours(replace(common, block_size=size), "inprocess") for size in sizes}


def summary_of(size: int, runs: dict[int, list[SizeRun]], num_requests: int) -> dict[str, Any]:
    """One row: medians over the alternations; ratios to the reference's request rate, above 1 being faster."""
    mine = runs[size]
    reference = runs.get(REFERENCE, mine)
    gap_s = [gap for each in mine for gap in each.run.gap_s]
    return {
        "block_size": size,
        "kv_use": statistics.median(each.run.kv_use for each in mine),
        "requests_per_s": statistics.median(num_requests / each.run.wall_s for each in mine),
        "fastest_by_reference": _least_wall_s(reference) / _least_wall_s(mine),
        "cpu_by_reference": asdict(
            spread([other.cpu_s / each.cpu_s for each, other in zip(mine, reference, strict=True)])
        ),
        "gap_p50_s": percentile(gap_s, 50),
        "gap_p99_s": percentile(gap_s, 99),
    }


def _least_wall_s(runs: list[SizeRun]) -> float:
    return min(each.run.wall_s for each in runs)


def _row(found: dict[str, Any]) -> tuple[str, ...]:
    by_cpu = found["cpu_by_reference"]
    return (
        str(found["block_size"]),
        f"{found['kv_use']:.1%}",
        f"{found['requests_per_s']:.3f}",
        f"{found['fastest_by_reference']:.3f}",
        f"{by_cpu['median']:.3f}",
        f"{by_cpu['low']:.3f} to {by_cpu['high']:.3f}",
        f"{1000 * found['gap_p50_s']:.0f}",
        f"{1000 * found['gap_p99_s']:.0f}",
    )


def _plain(requests: list[BenchRequest]) -> list[tuple[list[int], int]]:
    return [(list(request.prompt_ids), request.num_output) for request in requests]
