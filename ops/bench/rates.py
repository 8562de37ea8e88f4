"""`pagemill bench rates`: latencies by the rate at which requests come, whatever the engine has to do already."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import click

from ops.bench.arrivals import BURST, PATTERNS, POISSON, TRACE, arrivals_of
from ops.bench.compare import check_fit, read_config
from ops.bench.errors import BenchError
from ops.bench.flags import (
    RATES,
    block_size_option,
    engine_mode_option,
    engine_options,
    json_option,
    peer_options,
    svg_option,
    workload_options,
)
from ops.bench.machine import Disturbance, DisturbanceMeter, machine_facts, warnings_of
from ops.bench.measure import num_blocks_for, say
from ops.bench.options import BenchOptions, options_from
from ops.bench.parts import checkpoint_path, rotated
from ops.bench.peers.catalog import FoundPeer
from ops.bench.result import publish
from ops.bench.runs import OursRun, PeerRun
from ops.bench.side import Side
from ops.bench.standing import find_wanted_peers, start_ours, start_peer
from ops.bench.summary import percentiles
from ops.bench.workload import BenchRequest, Lengths, make_requests, warm_up_lengths
from ops.params import COUNT
from ops.tables import print_table

OURS: Final = "pagemill"
COLUMNS: Final = (
    *("requests/s", "engine", "tokens/s", "TTFT p50 ms", "p95", "p99", "token p50 ms", "p95", "p99"),
    *("reply p50 s", "p95", "p99"),
)


@dataclass(frozen=True, slots=True)
class Engine:
    """A side that takes arrivals, and what tables call it."""

    name: str
    side: Side


@click.command()
@click.option("--rates", type=RATES, default="0.5,1,2,4", help="Requests offered a second, one run each.")
@click.option("--arrivals", type=click.Choice(PATTERNS), default=POISSON, help="How they come; trace: as recorded.")
@click.option("--burst-size", type=COUNT, default=8, help="Requests at once of --arrivals burst.")
@click.option("--num-requests", type=COUNT, default=32, help="Requests of a run.")
@click.option("--max-num-seqs", type=COUNT, default=32, help="Sequences in flight at once, at most.")
@workload_options("chat")
@peer_options("none")
@engine_options
@block_size_option
@engine_mode_option
@json_option
@svg_option
def command(json_file: str | None, svg: str | None, **values: Any) -> None:
    """Offer requests at several rates, and measure how long they wait.

    Open loop: a request comes when its time has come, whether the ones before it are done or not; beyond the rate that
    an engine can serve, waiting grows with the length of the run. Times count from a request's arrival: to its first
    token, from token to token, and to its last. Each engine gets the same requests at the same times, by turns.
    """
    report = measure_rates(**values)
    _print(report)
    publish(report, json_file, svg)


def measure_rates(
    *, rates: tuple[float, ...], arrivals: str, burst_size: int, max_num_seqs: int, **values: Any
) -> dict[str, Any]:
    """The report. Progress goes to stderr. Raises PagemillError with one line."""
    started = time.monotonic()
    options = _options(values)
    if arrivals == TRACE and options.trace is None:
        raise BenchError("--arrivals trace needs --workload azure and --trace FILE: the times are the trace's")
    lengths = options.lengths_of(1)
    found, missing = find_wanted_peers(options)
    path = checkpoint_path(options.model, Path(options.cache_dir), options.load_format)
    check_fit({1: lengths}, read_config(path, options.load_format).max_position_embeddings)
    machine = machine_facts()
    recorded = options.trace.arrivals(len(lengths), options.seed) if arrivals == TRACE and options.trace else []
    measured: list[dict[str, Any]] = []
    disturbances: list[Disturbance] = []
    with contextlib.ExitStack() as stack:
        engines, vocab_size = _stand(stack, options, found, path, lengths, max_num_seqs)
        for number, rate in enumerate(rates):
            requests = make_requests(
                lengths,
                vocab_size=vocab_size,
                seed=options.seed,
                salt=f"rate {number}",
                num_shared=options.num_shared,
            )
            times = arrivals_of(arrivals, len(requests), rate, options.seed, burst_size=burst_size, recorded_s=recorded)
            runs = {}
            for engine in rotated(engines, number):
                with DisturbanceMeter(engine.side, [each.side for each in engines]) as meter:
                    runs[engine.name] = _run(engine, requests, times)
                disturbances.append(meter.result())
                say(f"{rate:g} requests/s: {engine.name} {runs[engine.name].tokens_per_s:.1f} tokens/s")
            summary = {engine.name: summary_of(runs[engine.name]) for engine in engines}
            measured.append({"requests_per_s": rate, "engines": summary})
    return {
        "bench": "pagemill rates",
        "machine": machine,
        "options": asdict(options)
        | {"arrivals": arrivals, "burst_size": burst_size, "max_num_seqs": max_num_seqs, "rates": rates},
        "missing_peers": missing,
        "rates": measured,
        "warnings": warnings_of(machine, disturbances),
        "took_s": time.monotonic() - started,
    }


def summary_of(run: OursRun | PeerRun) -> dict[str, Any]:
    """Percentiles of what requests waited for, in seconds, and what was served."""
    return {
        "tokens_per_s": run.tokens_per_s,
        "wall_s": run.wall_s,
        "ttft_s": percentiles(run.ttft_s),
        "token_gap_s": percentiles(run.gap_s),
        "reply_s": percentiles(run.reply_s),
    }


def _options(values: dict[str, Any]) -> BenchOptions:
    """What is asked for, as the options of a comparison whose other values are their defaults."""
    return options_from(values | {"batches": (1,), "alternations": 1, "quick": False, "steps": False})


def _stand(
    stack: contextlib.ExitStack,
    options: BenchOptions,
    found: Sequence[FoundPeer],
    path: Path,
    lengths: list[Lengths],
    max_num_seqs: int,
) -> tuple[list[Engine], int]:
    """All engines, warmed up, and the size of the vocabulary."""
    ours = start_ours(stack, options, path)
    num_kv_blocks = num_blocks_for(lengths, max_num_seqs, options.block_size)
    info = ours.ask("prepare", batch=max_num_seqs, num_kv_blocks=num_kv_blocks)
    engines = [Engine(OURS, ours)]
    common = {"dtype": info["dtype"], "device": info["device"], "num_threads": options.num_threads}
    most = max(each.num_prompt + each.num_output for each in lengths)
    for each in found:
        if each.kind.is_static:
            say(f"{each.kind.name} takes no arrivals: it is left out")
            continue
        peer = start_peer(stack, each, options, path, common, max_num_seqs)
        peer.side.ask("prepare", batch=max_num_seqs, num_kv_tokens=most)
        engines.append(Engine(each.kind.label, peer.side))
    warm_up = make_requests(
        warm_up_lengths(lengths), vocab_size=info["vocab_size"], seed=options.seed, salt="rates warm-up"
    )
    for engine in engines:
        _run(engine, warm_up, [0.0] * len(warm_up))
    return engines, info["vocab_size"]


def _run(engine: Engine, requests: list[BenchRequest], arrivals_s: list[float]) -> OursRun | PeerRun:
    plain = [(request.prompt_ids, request.num_output) for request in requests]
    answer = engine.side.ask("run_arrivals", requests=plain, arrivals_s=arrivals_s)
    return OursRun(**answer) if engine.name == OURS else PeerRun(**answer)


def _print(report: dict[str, Any]) -> None:
    options = report["options"]
    how = f"{options['arrivals']} of {options['burst_size']}" if options["arrivals"] == BURST else options["arrivals"]
    print_table(f"Latencies by rate, {options['workload']} lengths, arrivals {how}", COLUMNS, rate_rows(report))
    for line in report["warnings"]:
        say(f"warning: {line}")


def rate_rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row for each rate and engine, under COLUMNS."""
    return [
        _row(rate["requests_per_s"], name, found) for rate in report["rates"] for name, found in rate["engines"].items()
    ]


def _row(rate: float, name: str, found: dict[str, Any]) -> tuple[str, ...]:
    cells = [f"{rate:g}", name, f"{found['tokens_per_s']:.1f}"]
    for figure, scale, digits in (("ttft_s", 1000, 0), ("token_gap_s", 1000, 0), ("reply_s", 1, 2)):
        cells += [
            "" if (value := found[figure][each]) is None else f"{scale * value:.{digits}f}"
            for each in ("p50", "p95", "p99")
        ]
    return tuple(cells)
