"""What came of a simulation, as tables for people. The same as JSON is for the caller to print."""

from collections.abc import Sequence
from typing import Any, Final

from ops.simulate.metrics import PERCENTS
from ops.simulate.prefix_only import PrefixRun
from ops.tables import print_table

LATENCY_COLUMNS: Final = ("latency ms", *(f"p{percent}" for percent in PERCENTS))
TOTAL_COLUMNS: Final = ("what", "value")
TIME_COLUMNS: Final = ("from s", "KV owned", "running", "waiting", "preemptions")
PREFIX_COLUMNS: Final = ("room for", "blocks", "prompt blocks hit", "plain LRU")

_LATENCIES: Final = {
    "ttft": "first token",
    "inter_token": "between tokens",
    "end_to_end": "whole reply",
    "queue": "before its first step",
}


def print_summary(summary: dict[str, Any]) -> None:
    """Three tables to stdout: latency, totals, and the KV cache over time."""
    rows = [(_LATENCIES[name], *map(_ms, found.values())) for name, found in summary["latency_s"].items()]
    print_table("Latency", LATENCY_COLUMNS, rows)
    print_table("Totals", TOTAL_COLUMNS, _total_rows(summary))
    print_table("Over time", TIME_COLUMNS, [_time_row(each) for each in summary["over_time"]])


def _total_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    kv, bounds = summary["kv"], summary["steps_bound_by"]
    return [
        ("requests done", f"{summary['requests']:,}"),
        ("requests refused: they can't fit", f"{summary['refused_requests']:,}"),
        ("simulated time, share of it busy", f"{summary['simulated_s']:,.1f} s, {_percent(summary['busy_share'])}"),
        ("requests/s", f"{summary['requests_per_s']:.2f}"),
        ("output tokens/s", f"{summary['output_tokens_per_s']:,.1f}"),
        ("steps", f"{summary['steps']:,}"),
        ("steps bound by", ", ".join(f"{name} {_percent(bounds[name] / summary['steps'])}" for name in bounds)),
        ("preemptions", ", ".join(f"{mode} {count:,}" for mode, count in summary["preemptions"].items())),
        ("requests preempted, worst", f"{summary['preempted_requests']:,}, {summary['worst_preempted']} times"),
        ("blocks swapped", ", ".join(f"{way} {count:,}" for way, count in summary["swapped_blocks"].items())),
        ("recompute tax: of all computed tokens", _percent(summary["recompute_tax"], 2)),
        ("prompt blocks hit in the prefix cache", _percent(summary["prefix_hit_share"])),
        ("KV blocks, peak owned", f"{kv['num_blocks']:,}, {kv['peak_blocks']:,}"),
        ("KV blocks owned, mean", _percent(kv["mean_owned_share"])),
        ("slots filled, of allocated", _percent(kv["filled_share"])),
    ]


def _time_row(each: dict[str, Any]) -> tuple[str, ...]:
    means = ("" if each[name] is None else f"{each[name]:.1f}" for name in ("running", "waiting"))
    return (f"{each['from_s']:.1f}", _percent(each["kv_owned_share"]), *means, str(each["preemptions"]))


def prefix_summary(percent: float, ours: PrefixRun, plain: PrefixRun) -> dict[str, Any]:
    """One size of a prefix-only run, JSON-able."""
    return {
        "percent_of_distinct": percent,
        "num_blocks": ours.num_blocks,
        "prompt_blocks": ours.num_prompt_blocks,
        "hit_share": ours.hit_share,
        "plain_lru_hit_share": plain.hit_share,
    }


def print_prefix(sizes: Sequence[dict[str, Any]]) -> None:
    """One table to stdout, a row a size."""
    rows = [
        (
            f"{each['percent_of_distinct']:g} %",
            f"{each['num_blocks']:,}",
            _percent(each["hit_share"], 2),
            _percent(each["plain_lru_hit_share"], 2),
        )
        for each in sizes
    ]
    print_table("The prefix cache alone", PREFIX_COLUMNS, rows)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:,.1f}"


def _percent(share: float | None, digits: int = 1) -> str:
    return "" if share is None else f"{100 * share:.{digits}f} %"
