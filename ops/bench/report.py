"""What was measured, as tables for people and as one JSON object for machines."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from model.config import ModelConfig
from ops.bench.measure import BatchResult
from ops.bench.runs import OursRun, PeerRun, percentile, ratios, spread
from ops.bench.work import num_operations, slot_bytes, step_weight_bytes
from ops.tables import print_table

STATIC: Final = "transformers, static batch"
ONE_BY_ONE: Final = "transformers, one by one"
OURS: Final = "pagemill"

# What the house wants, on two CPU cores in float32: least ratio to the peer by batch, KV use, and most host work.
RATIO_BARS: Final = {1: 1.5, 8: 2.5, 32: 4.0}
KV_USE_BAR: Final = 0.94
HOST_SHARE_BAR: Final = 0.10
HOST_SHARE_BATCH: Final = 32

THROUGHPUT_COLUMNS: Final = ("batch", "engine", "requests", "tokens/s", "pagemill ÷ it", "reply p50 s", "reply p95 s")
DETAIL_COLUMNS: Final = (
    *("batch", "TTFT p50 ms", "TTFT p95 ms", "token p50 ms", "token p95 ms"),
    *("KV use", "host work", "of read bandwidth", "of arithmetic"),
)


def summarize(results: Sequence[BatchResult], config: ModelConfig, itemsize: int, limits: dict[str, Any]) -> list[Any]:
    """One JSON-able object a batch, in the order of `results`."""
    alone = next((result.peer for result in results if result.batch == 1), [])
    return [_batch_summary(result, alone, config, itemsize, limits) for result in results]


def _batch_summary(
    result: BatchResult, alone: list[PeerRun], config: ModelConfig, itemsize: int, limits: dict[str, Any]
) -> dict[str, Any]:
    peers = {}
    if result.batch > 1 and result.peer:
        peers[STATIC] = _peer_summary(result.ours, result.peer)
    if alone:
        peers[ONE_BY_ONE] = _peer_summary(result.ours, alone)
    return {
        "batch": result.batch,
        "requests": len(result.lengths),
        "prompt_tokens": sum(each.num_prompt for each in result.lengths),
        "output_tokens": sum(each.num_output for each in result.lengths),
        "ours": _ours_summary(result, config, itemsize, limits),
        "peers": peers,
        "token_check": None if result.check is None else asdict(result.check),
        "disturbances": [asdict(each) for each in result.disturbances],
    }


def _ours_summary(result: BatchResult, config: ModelConfig, itemsize: int, limits: dict[str, Any]) -> dict[str, Any]:
    runs = result.ours
    operations = num_operations(config, result.lengths)
    return {
        "tokens_per_s": _measured([run.tokens_per_s for run in runs]),
        "ttft_s": _percentiles([value for run in runs for value in run.ttft_s]),
        "token_gap_s": _percentiles([value for run in runs for value in run.gap_s]),
        "reply_s": _percentiles([value for run in runs for value in run.reply_s]),
        "kv_use": _measured([run.kv_use for run in runs]),
        "host_share": _measured([run.host_share for run in runs]),
        "engine_host_share": _measured([1 - run.forward_s / run.step_s for run in runs]),
        "steps": [run.num_steps for run in runs],
        "wall_s": [run.wall_s for run in runs],
        "bandwidth_share": _measured(
            [_bytes_read(run, config, itemsize) / run.wall_s / limits["read_bytes_per_s"] for run in runs]
        ),
        "arithmetic_share": _measured([operations / run.wall_s / limits["operations_per_s"] for run in runs]),
    }


def _peer_summary(ours: list[OursRun], peer: list[PeerRun]) -> dict[str, Any]:
    return {
        "requests": len(peer[0].reply_s),
        "tokens_per_s": _measured([run.tokens_per_s for run in peer]),
        "ratio": _measured(ratios(ours, peer)),
        "reply_s": _percentiles([value for run in peer for value in run.reply_s]),
        "steps": [run.num_steps for run in peer],
        "wall_s": [run.wall_s for run in peer],
    }


def _bytes_read(run: OursRun, config: ModelConfig, itemsize: int) -> int:
    """Weights once a step, and the keys and values that were there."""
    return run.num_steps * step_weight_bytes(config, itemsize) + run.num_slots_read * slot_bytes(config, itemsize)


def _measured(values: Sequence[float]) -> dict[str, Any]:
    return asdict(spread(values)) | {"values": list(values)}


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """None where there are no values: one-token replies have no gaps."""
    return {name: percentile(values, percent) if values else None for name, percent in (("p50", 50), ("p95", 95))}


def judge_bars(batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the house wants beside what was measured; only what was measured is judged."""
    bars = []
    for batch in batches:
        name = ONE_BY_ONE if batch["batch"] == 1 else STATIC
        if batch["batch"] in RATIO_BARS and name in batch["peers"]:
            least = RATIO_BARS[batch["batch"]]
            bars.append(_bar(f"ratio to {name}", batch, batch["peers"][name]["ratio"]["median"], least=least))
        bars.append(_bar("KV use", batch, batch["ours"]["kv_use"]["median"], least=KV_USE_BAR))
        if batch["batch"] == HOST_SHARE_BATCH:
            bars.append(_bar("host work", batch, batch["ours"]["host_share"]["median"], most=HOST_SHARE_BAR))
    return bars


def _bar(
    name: str, batch: dict[str, Any], value: float, least: float = 0.0, most: float = float("inf")
) -> dict[str, Any]:
    wanted = {"at_least": least} if most == float("inf") else {"at_most": most}
    return {"name": name, "batch": batch["batch"], "value": value, **wanted, "is_met": least <= value <= most}


def print_report(report: dict[str, Any]) -> None:
    """All tables, to stdout."""
    batches = report["batches"]
    print_table(
        "Output tokens a second", THROUGHPUT_COLUMNS, [row for batch in batches for row in _throughput_rows(batch)]
    )
    print_table("pagemill in detail", DETAIL_COLUMNS, [_detail_row(batch) for batch in batches])
    if not report["bars"]:
        return
    rows = [
        (bar["name"], bar["batch"], f"{bar['value']:.3g}", _wanted(bar), "yes" if bar["is_met"] else "NO")
        for bar in report["bars"]
    ]
    print_table("What the house wants", ("what", "batch", "measured", "wanted", "met"), rows)


def _throughput_rows(batch: dict[str, Any]) -> list[tuple[object, ...]]:
    ours = batch["ours"]
    rows: list[tuple[object, ...]] = [
        (batch["batch"], OURS, batch["requests"], f"{ours['tokens_per_s']['median']:.1f}", "", *_seconds(ours))
    ]
    for name, peer in batch["peers"].items():
        ratio = peer["ratio"]
        shown = f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
        rate = f"{peer['tokens_per_s']['median']:.1f}"
        rows.append((batch["batch"], name, peer["requests"], rate, shown, *_seconds(peer)))
    return rows


def _detail_row(batch: dict[str, Any]) -> tuple[object, ...]:
    ours = batch["ours"]
    times = [_milliseconds(ours[name][each]) for name in ("ttft_s", "token_gap_s") for each in ("p50", "p95")]
    names = ("kv_use", "host_share", "bandwidth_share", "arithmetic_share")
    return (batch["batch"], *times, *(f"{100 * ours[name]['median']:.1f} %" for name in names))


def _seconds(summary: dict[str, Any]) -> tuple[str, str]:
    return f"{summary['reply_s']['p50']:.2f}", f"{summary['reply_s']['p95']:.2f}"


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.0f}"


def _wanted(bar: dict[str, Any]) -> str:
    return f"≥ {bar['at_least']:g}" if "at_least" in bar else f"≤ {bar['at_most']:g}"


def check_lines(batches: Sequence[dict[str, Any]]) -> list[str]:
    """One line a batch: whether the first request got the peer's tokens."""
    lines = []
    for batch in batches:
        check = batch["token_check"]
        if check is None:
            continue
        line = f"batch {batch['batch']}: the first request's {check['num_tokens']} greedy tokens "
        if check["verdict"] == "equal":
            line += "equal the peer's"
        elif check["verdict"] == "tie":
            line += (
                f"part from the peer's at token {check['position']}, at a tie (its logits differ by {check['gap']:.1e})"
            )
        else:
            line += (
                f"DIFFER from the peer's from token {check['position']} on (its logits differ by {check['gap']:.1e})"
            )
        lines.append(line)
    return lines


def facts_lines(report: dict[str, Any]) -> list[str]:
    """The machine, its limits and the workload, for people."""
    machine, limits, workload = report["machine"], report["limits"], report["workload"]
    versions = ", ".join(f"{name} {found}" for name, found in machine["versions"].items())
    return [
        f"{machine['cpu']}, {machine['physical_cores']} cores ({machine['usable_cpus']} CPUs to use), "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB; {' '.join(machine['cpu_flags'])}",
        f"{machine['system']}, Python {machine['python']}, {versions}",
        f"load average {' '.join(f'{load:.2f}' for load in machine['load_average'])}, "
        f"{machine['busy_share']:.0%} busy at the start",
        f"limits, measured on {limits['device']} with {limits['threads']} threads in {report['engine']['dtype']}: "
        f"{limits['read_bytes_per_s'] / 1e9:.1f} GB/s read, {limits['operations_per_s'] / 1e9:.0f} GFLOP/s",
        f"workload, seed {workload['seed']}: lognormal lengths, prompts of {workload['prompt_mean']:g} tokens "
        f"(sigma {workload['prompt_sigma']:g}) and replies of {workload['output_mean']:g} "
        f"(sigma {workload['output_sigma']:g}) in the mean",
    ]
