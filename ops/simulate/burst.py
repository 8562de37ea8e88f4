"""How soon a burst of arrivals is forgotten."""

from typing import Any, Final

import numpy as np

from ops.simulate.metrics import Metrics

# Output tokens a second are taken over so many steps.
WINDOW_STEPS: Final = 200
# Throughput is back when it is this share of what it was.
BACK_SHARE: Final = 0.95


def recovery(metrics: Metrics, burst_s: float) -> dict[str, Any]:
    """Output tokens a second before a burst at `burst_s`, and the steps after it until they are back; None: never.

    Before: over the last WINDOW_STEPS steps that ended by then. Back: from the first step on after which WINDOW_STEPS
    steps bring BACK_SHARE of that.
    """
    starts, ends, tokens = (np.array(each) for each in metrics.steps)
    first = int(np.searchsorted(ends, burst_s, side="right"))
    before = _rate(starts, ends, tokens, max(0, first - WINDOW_STEPS), first)
    rates = [
        _rate(starts, ends, tokens, begin, begin + WINDOW_STEPS) for begin in range(first, len(ends) - WINDOW_STEPS + 1)
    ]
    back = next((number for number, rate in enumerate(rates) if before and rate >= BACK_SHARE * before), None)
    return {
        "burst_s": burst_s,
        "before_tokens_per_s": before,
        "steps_until_back": back,
        "after_200_steps_tokens_per_s": rates[WINDOW_STEPS] if len(rates) > WINDOW_STEPS else None,
    }


def _rate(starts: Any, ends: Any, tokens: Any, begin: int, end: int) -> float:
    """Tokens a second of the steps [begin, end), pauses included; 0 where there is none."""
    return float(tokens[begin:end].sum() / (ends[end - 1] - starts[begin])) if end > begin else 0.0
