"""One run of the bench: our engine against the peers, by turns, and what of it is to be told."""

import contextlib
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from model.config import ModelConfig
from ops.bench.bars import judge_bars
from ops.bench.errors import BenchError
from ops.bench.machine import machine_facts, warnings_of
from ops.bench.measure import Measurement, num_blocks_for, say
from ops.bench.options import BenchOptions, itemsizes_of
from ops.bench.parts import checkpoint_path
from ops.bench.report import check_lines, facts_lines
from ops.bench.standing import find_wanted_peers, measure_limits, measure_steps, start_ours, start_peer
from ops.bench.summary import Costs, summarize
from ops.bench.workload import Lengths


def run_bench(options: BenchOptions) -> dict[str, Any]:
    """Everything, measured: the report. Progress goes to stderr. Raises PagemillError with one line."""
    started = time.monotonic()
    found, missing = find_wanted_peers(options)
    path = checkpoint_path(options.model, Path(options.cache_dir), options.load_format)
    config = read_config(path, options.load_format)
    machine = machine_facts()
    for line in warnings_of(machine, []):
        say(f"warning: {line}")
    lengths = {batch: options.lengths_of(batch) for batch in options.batches}
    check_fit(lengths, config.max_position_embeddings)
    with contextlib.ExitStack() as stack:
        ours = start_ours(stack, options, path)
        first = options.batches[0]
        num_kv_blocks = num_blocks_for(lengths[first], first, options.block_size)
        engine = ours.ask("prepare", batch=first, num_kv_blocks=num_kv_blocks)
        common = {"dtype": engine["dtype"], "device": engine["device"], "num_threads": options.num_threads}
        limits = measure_limits(common)
        steps = measure_steps(options, path) if options.measures_steps else None
        measurement = Measurement(
            ours,
            [start_peer(stack, each, options, path, common, max(options.batches)) for each in found],
            vocab_size=engine["vocab_size"],
            block_size=options.block_size,
            dtype=engine["dtype"],
            seed=options.seed,
            num_alternations=options.alternations,
            say=say,
            num_shared=options.num_shared,
            checks_tokens=options.quantization == "none",
        )
        results = [measurement.run_batch(batch, lengths[batch]) for batch in options.batches]
    costs = Costs(config, itemsizes_of(options.quantization, engine["dtype"]), engine["dtype"], limits)
    batches = summarize(results, costs)
    report = {
        "bench": "pagemill",
        "machine": machine,
        "options": asdict(options),
        "workload": asdict(options.shape) | {"seed": options.seed, "name": options.workload},
        "engine": {name: engine[name] for name in ("dtype", "device", "block_size", "fingerprint")},
        "peers": measurement.facts,
        "missing_peers": missing,
        "limits": limits,
        "steps": steps,
        "batches": batches,
        "bars": [] if options.is_quick else judge_bars(batches, options.quantization, steps),
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


def read_config(path: Path, load_format: str = "auto") -> ModelConfig:
    """The checkpoint's configuration. Raises BenchError."""
    from model.errors import ModelError
    from model.loader import load_config

    try:
        return load_config(path, load_format)
    except ModelError as error:
        raise BenchError(str(error)) from error


def check_fit(lengths: dict[int, list[Lengths]], max_tokens: int) -> None:
    """Raises BenchError where a request is longer than the model's context."""
    longest = max(each.num_prompt + each.num_output for batch in lengths.values() for each in batch)
    if longest > max_tokens:
        raise BenchError(
            f"the longest request has {longest} tokens, but the model's context is {max_tokens}: "
            "lower --prompt-mean, --output-mean or their sigmas, or --scale-lengths"
        )
