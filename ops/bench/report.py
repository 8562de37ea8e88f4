"""What was measured, as tables for people and as one JSON object for machines."""

from collections.abc import Sequence
from typing import Any, Final

from ops.bench.presets import PRESETS
from ops.bench.step_report import print_steps
from ops.tables import print_table

OURS: Final = "pagemill"

THROUGHPUT_COLUMNS: Final = (
    *("batch", "engine", "requests", "tokens/s", "pagemill ÷ it"),
    *("reply p50 s", "reply p95 s", "TTFT p50 ms", "token p50 ms"),
)
BAR_COLUMNS: Final = ("what", "batch", "measured", "wanted", "met")
DETAIL_COLUMNS: Final = (
    *("batch", "TTFT p50 ms", "TTFT p95 ms", "token p50 ms", "token p95 ms"),
    *("KV use", "prefix hits", "host work", "of read bandwidth", "of arithmetic"),
)


def print_report(report: dict[str, Any]) -> None:
    """All tables, to stdout."""
    batches = report["batches"]
    print_table(
        "Output tokens a second", THROUGHPUT_COLUMNS, [row for batch in batches for row in throughput_rows(batch)]
    )
    print_table("pagemill in detail", DETAIL_COLUMNS, [_detail_row(batch) for batch in batches])
    if report["steps"] is not None:
        print_steps(report["steps"])
    if report["bars"]:
        print_table("What the house wants", BAR_COLUMNS, bar_rows(report["bars"]))


def bar_rows(bars: Sequence[dict[str, Any]]) -> list[tuple[object, ...]]:
    """A row for each bar."""
    return [
        (bar["name"], bar["batch"], f"{bar['value']:.3g}", _wanted(bar), "yes" if bar["is_met"] else "NO")
        for bar in bars
    ]


def throughput_rows(batch: dict[str, Any]) -> list[tuple[object, ...]]:
    """Ours and each peer at one batch, under THROUGHPUT_COLUMNS."""
    ours = batch["ours"]
    rows: list[tuple[object, ...]] = [
        (batch["batch"], OURS, batch["requests"], f"{ours['tokens_per_s']['median']:.1f}", "", *_times(ours))
    ]
    for name, peer in batch["peers"].items():
        ratio = peer["ratio"]
        shown = f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
        rate = f"{peer['tokens_per_s']['median']:.1f}"
        rows.append((batch["batch"], name, peer["requests"], rate, shown, *_times(peer)))
    return rows


def _detail_row(batch: dict[str, Any]) -> tuple[object, ...]:
    ours = batch["ours"]
    times = [_milliseconds(ours[name][each]) for name in ("ttft_s", "token_gap_s") for each in ("p50", "p95")]
    names = ("kv_use", "prefix_hit_share", "host_share", "bandwidth_share", "arithmetic_share")
    return (batch["batch"], *times, *(f"{100 * ours[name]['median']:.1f} %" for name in names))


def _times(summary: dict[str, Any]) -> tuple[str, ...]:
    """Whoever takes a static batch tells no single tokens: two empty cells."""
    reply, first, gap = summary["reply_s"], summary["ttft_s"], summary["token_gap_s"]
    return f"{reply['p50']:.2f}", f"{reply['p95']:.2f}", _milliseconds(first["p50"]), _milliseconds(gap["p50"])


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
        workload_line(workload),
    ]


def workload_line(workload: dict[str, Any]) -> str:
    """What was run, for people."""
    begin = f"workload {workload['name']}, seed {workload['seed']}: "
    preset = PRESETS[workload["name"]]
    if preset.needs_trace:
        return begin + preset.about
    return (
        f"{begin}{preset.about}; prompts of {workload['prompt_mean']:.4g} tokens (sigma {workload['prompt_sigma']:g}) "
        f"and replies of {workload['output_mean']:.4g} (sigma {workload['output_sigma']:g}) in the mean"
    )
