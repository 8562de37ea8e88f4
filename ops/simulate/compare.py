"""The same trace under each way to preempt: does `auto` choose well?"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from ops.simulate.cost import CostModel
from ops.simulate.runs import EngineSizes, Progress, simulate
from ops.simulate.traces import Trace
from scheduler import PreemptionMode

FIXED_MODES: Final = (PreemptionMode.SWAP, PreemptionMode.RECOMPUTE)
# What is compared, and whether more of it is better.
MEASURES: Final = {"output_tokens_per_s": True, "mean_end_to_end_s": False}


def compare_modes(
    trace: Trace, sizes: EngineSizes, model: CostModel, progress: Callable[[str], Progress]
) -> dict[str, Any]:
    """A summary of each mode, and `auto` by the better of the fixed ones; `progress` is asked for one for each mode."""
    modes = {}
    for mode in (*FIXED_MODES, PreemptionMode.AUTO):
        metrics, refused = simulate(
            trace, replace(sizes, preemption_mode=mode), model, progress=progress(f"simulating {mode}")
        )
        modes[str(mode)] = metrics.summary() | {"refused_requests": len(refused)}
    return {"modes": modes, "auto_by_best": ratios(modes)}


def ratios(modes: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Of each measure: what `auto` makes of it, by the better of the fixed modes. Above 1: auto is better."""
    found = {}
    for name, is_more_better in MEASURES.items():
        fixed = [modes[mode][name] for mode in FIXED_MODES]
        auto = modes[PreemptionMode.AUTO][name]
        found[name] = auto / max(fixed) if is_more_better else min(fixed) / auto
    return found
