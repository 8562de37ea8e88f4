"""What came of a simulation, as tables for people. The same as JSON is for the caller to print."""

from collections.abc import Sequence
from typing import Any, Final

from ops.simulate.metrics import PERCENTS
from ops.simulate.prefix_only import PrefixRun
from ops.tables import print_table

LATENCY_COLUMNS: Final = ("latency ms", *(f"p{percent}" for percent in PERCENTS))
TOTAL_COLUMNS: Final = ("what", "value")
TIME_COLUMNS: Final = ("from s", "KV owned", "running", "waiting", "preemptions")
MODE_COLUMNS: Final = (
    *("mode", "swapped", "recomputed", "recompute tax", "GB swapped", "KV owned", "output tokens/s"),
    *("mean reply s", "first token p50 s", "p99 s", "between tokens p50 ms", "p99 ms"),
)
RATIO_COLUMNS: Final = ("auto by the better of the other two", "ratio")
PREFIX_COLUMNS: Final = ("room for", "blocks", "prompt blocks hit", "plain LRU")

_LATENCIES: Final = {
    "ttft": "first token",
    "inter_token": "between tokens",
    "inter_token_beside_copies": "others' tokens, beside copies",
    "inter_token_without_copies": "others' tokens, without copies",
    "end_to_end": "whole reply",
    "queue": "before its first step",
}
_MEASURES: Final = {
    "output_tokens_per_s": "output tokens/s",
    "mean_end_to_end_s": "mean time of a reply, inverted",
}


def print_summary(summary: dict[str, Any]) -> None:
    """Tables to stdout: latency, totals, the KV cache over time, and what became of a burst if there was one."""
    rows = [(_LATENCIES[name], *map(_ms, found.values())) for name, found in summary["latency_s"].items()]
    print_table("Latency", LATENCY_COLUMNS, rows)
    print_table("Totals", TOTAL_COLUMNS, _total_rows(summary))
    print_table("Over time", TIME_COLUMNS, [_time_row(each) for each in summary["over_time"]])
    if "burst" in summary:
        print_table("Burst", TOTAL_COLUMNS, _burst_rows(summary["burst"]))


def print_comparison(found: dict[str, Any]) -> None:
    """Two tables to stdout: a row a mode, and how well auto does."""
    print_table("Preemption modes", MODE_COLUMNS, [_mode_row(mode, each) for mode, each in found["modes"].items()])
    rows = [(_MEASURES[name], f"{ratio:.3f}") for name, ratio in found["auto_by_best"].items()]
    print_table("Auto's choice", RATIO_COLUMNS, rows)


def _mode_row(mode: str, summary: dict[str, Any]) -> tuple[str, ...]:
    first, between = summary["latency_s"]["ttft"], summary["latency_s"]["inter_token"]
    return (
        mode,
        *(f"{summary['preemptions'][how]:,}" for how in ("swap", "recompute")),
        _percent(summary["recompute_tax"], 2),
        f"{sum(summary['swapped_bytes'].values()) / 1e9:,.2f}",
        _percent(summary["kv"]["mean_owned_share"]),
        f"{summary['output_tokens_per_s']:,.1f}",
        f"{summary['mean_end_to_end_s']:.2f}",
        *(f"{first[name]:.2f}" for name in ("p50", "p99")),
        *(_ms(between[name]) for name in ("p50", "p99")),
    )


def _total_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    kv, bounds, swapped = summary["kv"], summary["steps_bound_by"], summary["swapped_bytes"]
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
        (
            "blocks found missing, tier was full",
            f"{summary['missing_blocks']:,}, {summary['full_tier_recomputes']:,} times",
        ),
        ("MB swapped", ", ".join(f"{way.replace('_', ' ')} {count / 1e6:,.1f}" for way, count in swapped.items())),
        ("recompute tax: of all computed tokens", _percent(summary["recompute_tax"], 2)),
        ("prompt blocks hit in the prefix cache", _percent(summary["prefix_hit_share"])),
        ("KV blocks, peak owned", f"{kv['num_blocks']:,}, {kv['peak_blocks']:,}"),
        ("KV blocks owned, mean", _percent(kv["mean_owned_share"])),
        ("slots filled, of allocated", _percent(kv["filled_share"])),
    ]


def _burst_rows(burst: dict[str, Any]) -> list[tuple[str, str]]:
    back, later = burst["steps_until_back"], burst["after_200_steps_tokens_per_s"]
    return [
        ("output tokens/s in 200 steps before", f"{burst['before_tokens_per_s']:,.1f}"),
        ("steps until 95 % of that are back", "never" if back is None else f"{back:,}"),
        ("output tokens/s from 200 steps after", "" if later is None else f"{later:,.1f}"),
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
