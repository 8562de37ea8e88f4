"""Runs that no engine made."""

from typing import Any

from ops.bench.runs import OursRun


def ours_run(tokens_per_s: float = 10.0, **values: Any) -> OursRun:
    """A run of one second with these figures."""
    made: dict[str, Any] = {
        "wall_s": 1.0,
        "num_output_tokens": round(tokens_per_s),
        "num_steps": 4,
        "step_s": 0.97,
        "forward_s": 0.95,
        "kv_use": 0.95,
        "num_slots_read": 100,
        "num_prefix_hits": 0,
        "ttft_s": [0.2, 0.3],
        "gap_s": [0.1, 0.1, 0.2],
        "reply_s": [0.5, 0.9],
        "first_ids": [5, 6, 7],
    }
    return OursRun(**(made | values))
