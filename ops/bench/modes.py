"""`pagemill bench modes TRACE`: preemption modes by turns on the real engine, with a pool that is too small."""

import gc
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import click

from ops.bench.errors import BenchError
from ops.bench.flags import alternations_option, block_size_option, engine_options, json_option
from ops.bench.machine import machine_facts
from ops.bench.measure import num_blocks_for, say
from ops.bench.parts import by_turns, engine_config, start_engine
from ops.bench.result import publish
from ops.bench.runs import spread
from ops.bench.trace_run import TraceRun, TraceRunner
from ops.bench.workload import Lengths, make_requests
from ops.params import ABOVE_0, COUNT
from ops.simulate.adapt import scaled, window
from ops.simulate.traces import Trace, read_trace
from ops.tables import print_table

MODES: Final = ("swap", "recompute", "auto")
COLUMNS: Final = (
    *("mode", "swapped", "recomputed", "tokens again", "MB copied", "tokens/s", "tokens/processor s"),
    *("mean reply s", "between tokens p99 ms"),
)
RATIO_COLUMNS: Final = ("auto by the better of the other two", "median", "range")


@dataclass(frozen=True, slots=True)
class ModeRuns:
    """The runs of one mode, an alternation each."""

    mode: str
    runs: list[TraceRun]

    def median(self, name: str) -> float:
        """Of a field or property of TraceRun over the alternations."""
        return statistics.median([float(getattr(run, name)) for run in self.runs])


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--requests", "num_requests", type=COUNT, default=24, help="The trace's first so many requests.")
@click.option("--speed-up", type=ABOVE_0, default=20.0, help="Requests arrive so many times as fast.")
@click.option("--scale-lengths", type=ABOVE_0, default=0.01, help="Prompts and replies are so many times as long.")
@click.option("--scale-replies", type=ABOVE_0, default=60.0, help="Replies alone are so many times as long as that.")
@click.option("--max-num-seqs", type=COUNT, default=16, help="Most sequences that run at a time.")
@click.option(
    "--pool-share",
    type=ABOVE_0,
    default=0.35,
    help="Size of the KV cache, as a share of what so many of the largest need at once.",
)
@alternations_option
@engine_options
@block_size_option
@json_option
def command(trace: Path, json_file: str | None, **values: Any) -> None:
    """Serve a scaled trace in the modes swap, recompute and auto by turns, and say how well auto chooses.

    Requests arrive at the trace's times, with random ids and replies of exactly the scaled length. Auto is compared
    with the better of the other two, above 1 is better: by processor time within each alternation, and by the fastest
    run of each, since what else runs only makes one slower. Tables go to stdout, one JSON object as its last line.
    """
    started = time.monotonic()
    chosen = scaled(
        window(read_trace(trace), values["num_requests"], None),
        speed_up=values["speed_up"],
        lengths=values["scale_lengths"],
        replies=values["scale_replies"],
    )
    lengths = [Lengths(each.num_prompt_tokens, each.num_output_tokens) for each in chosen.requests]
    need = num_blocks_for(lengths, values["max_num_seqs"], values["block_size"])
    num_blocks = max(round(need * values["pool_share"]), num_blocks_for(lengths, 1, values["block_size"]))
    machine = machine_facts()
    found, engine = _measure(chosen, lengths, num_blocks, need, values)
    by_cpu, by_fastest = spread(cpu_ratios(found)), fastest_ratio(found)
    print_table("Preemption modes", COLUMNS, [_row(each) for each in found])
    rows = [
        ("tokens/processor s", f"{by_cpu.median:.3f}", f"{by_cpu.low:.3f} to {by_cpu.high:.3f}"),
        ("tokens/s of the fastest run", f"{by_fastest:.3f}", ""),
    ]
    print_table("Auto's choice", RATIO_COLUMNS, rows)
    report = {
        "bench": "pagemill modes",
        "machine": machine,
        "trace": trace.name,
        "options": {name: value for name, value in values.items() if name != "cache_dir"},
        "need_blocks": need,
        "engine": engine,
        "modes": {each.mode: [asdict(run) for run in each.runs] for each in found},
        "auto_by_best": {"tokens_per_cpu_s": asdict(by_cpu), "fastest_tokens_per_s": by_fastest},
        "took_s": time.monotonic() - started,
    }
    publish(report, json_file)


def _measure(
    trace: Trace, lengths: list[Lengths], num_blocks: int, need: int, values: dict[str, Any]
) -> tuple[list[ModeRuns], dict[str, Any]]:
    """An engine for each mode, built alike, and their runs by turns; what auto's engine found out about itself."""
    common = engine_config(values, num_kv_blocks=num_blocks, num_swap_blocks=need, max_num_seqs=values["max_num_seqs"])
    runners, facts = {}, {}
    for mode in MODES:
        say(f"starting the engine of {mode}")
        engine, info = start_engine(replace(common, preemption_mode=mode))
        if max(each.num_slots for each in lengths) >= info.max_model_len:
            raise BenchError(f"a request is longer than the context of {info.max_model_len} tokens: scale lengths down")
        runners[mode] = TraceRunner(engine)
        facts = asdict(info)
    found = {mode: ModeRuns(mode, []) for mode in MODES}
    for number, mode in by_turns(MODES, values["alternations"]):
        requests = make_requests(lengths, vocab_size=facts["vocab_size"], seed=0, salt=f"{number} {mode}")
        gc.collect()
        run = runners[mode].run(trace, requests)
        found[mode].runs.append(run)
        say(f"{mode}: {run.wall_s:.1f} s, {run.num_swaps} swapped, {run.num_recomputes} recomputed")
    return list(found.values()), facts


def cpu_ratios(found: list[ModeRuns]) -> list[float]:
    """Of each alternation: auto's output tokens per second of processor time by those of the better fixed mode."""
    swap, recompute, auto = ([run.tokens_per_cpu_s for run in each.runs] for each in found)
    return [mine / max(fixed) for mine, *fixed in zip(auto, swap, recompute, strict=True)]


def fastest_ratio(found: list[ModeRuns]) -> float:
    """Auto's output tokens a second in its fastest run by the better fixed mode's in its own."""
    swap, recompute, auto = (max(run.tokens_per_s for run in each.runs) for each in found)
    return auto / max(swap, recompute)


def _row(found: ModeRuns) -> tuple[str, ...]:
    return (
        found.mode,
        *(f"{found.median(name):g}" for name in ("num_swaps", "num_recomputes", "num_recomputed_tokens")),
        f"{found.median('swapped_bytes') / 1e6:,.0f}",
        f"{found.median('tokens_per_s'):.1f}",
        f"{found.median('tokens_per_cpu_s'):.1f}",
        f"{found.median('reply_s'):.2f}",
        f"{1000 * found.median('gap_p99_s'):.0f}",
    )
