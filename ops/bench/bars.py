"""What the house wants, beside what was measured."""

from collections.abc import Sequence
from typing import Any, Final

from ops.bench.peers.catalog import BY_NAME

# Least ratios of our output tokens/s to a peer's, by quantization, peer and batch: two CPU cores, in one run.
RATIO_BARS: Final[dict[str, dict[str, dict[int, float]]]] = {
    "none": {"transformers": {1: 2.0, 8: 2.5, 32: 6.0}, "vllm": {1: 1.25, 8: 1.25, 32: 1.25}},
    "int8": {"vllm": {1: 2.0, 8: 2.0, 32: 2.0}, "llamacpp": {1: 0.85, 8: 2.0}},
    "int4": {},
}
KV_USE_BAR: Final = 0.94
HOST_SHARE_BAR: Final = 0.10
HOST_SHARE_BATCH: Final = 32
# Least shares of the machine's limits that single steps of float32 reach: the step's name in steps.py, the figure.
STEP_BARS: Final = (
    ("decode, 1 × 256", "weights_of_bandwidth", 0.50),
    ("prefill of 512", "products_of_arithmetic", 0.75),
    ("decode, 32 × 1000", "attention_of_bandwidth", 0.45),
)


def judge_bars(
    batches: Sequence[dict[str, Any]], quantization: str = "none", steps: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """One object a bar; only what was measured is judged."""
    bars = []
    for batch in batches:
        bars += _ratio_bars(batch, quantization)
        bars.append(_bar("KV use", batch["batch"], batch["ours"]["kv_use"]["median"], least=KV_USE_BAR))
        if batch["batch"] == HOST_SHARE_BATCH:
            bars.append(_bar("host work", batch["batch"], batch["ours"]["host_share"]["median"], most=HOST_SHARE_BAR))
    return bars + (_step_bars(steps) if steps is not None and quantization == "none" else [])


def _ratio_bars(batch: dict[str, Any], quantization: str) -> list[dict[str, Any]]:
    bars = []
    for name, least_by_batch in RATIO_BARS[quantization].items():
        kind, number = BY_NAME[name], batch["batch"]
        label = kind.alone if number == 1 else kind.label
        if number in least_by_batch and label in batch["peers"]:
            ratio = batch["peers"][label]["ratio"]["median"]
            bars.append(_bar(f"ratio to {label}", number, ratio, least=least_by_batch[number]))
    return bars


def _step_bars(steps: dict[str, Any]) -> list[dict[str, Any]]:
    found = {case["name"]: case for case in steps["cases"]}
    return [
        _bar(f"{name}: {figure.replace('_', ' ')}", found[name]["num_seqs"], found[name][figure], least=least)
        for name, figure, least in STEP_BARS
    ]


def _bar(name: str, batch: int, value: float, least: float = 0.0, most: float = float("inf")) -> dict[str, Any]:
    wanted = {"at_least": least} if most == float("inf") else {"at_most": most}
    return {"name": name, "batch": batch, "value": value, **wanted, "is_met": least <= value <= most}
