"""When requests come, open loop: a pure function of pattern, rate and seed."""

import random
from collections.abc import Sequence
from typing import Final

POISSON: Final = "poisson"
BURST: Final = "burst"
TRACE: Final = "trace"
PATTERNS: Final = (POISSON, BURST, TRACE)


def arrivals_of(
    pattern: str, num_requests: int, rate: float, seed: int, *, burst_size: int = 1, recorded_s: Sequence[float] = ()
) -> list[float]:
    """Seconds of each request's arrival, rising, the first at 0; `rate` requests a second in the mean.

    poisson: independent of one another. burst: `burst_size` at once, bursts independent of one another. trace: the
    times of `recorded_s`, at least as many as requests, all stretched by one factor; requests that came all at once
    stay so.
    """
    if pattern == TRACE:
        return _stretched(recorded_s[:num_requests], rate)
    each = burst_size if pattern == BURST else 1
    generator = random.Random(f"arrivals {pattern} {seed}")
    now, times = 0.0, []
    for index in range(num_requests):
        if index and index % each == 0:
            now += generator.expovariate(rate / each)
        times.append(now)
    return times


def _stretched(recorded_s: Sequence[float], rate: float) -> list[float]:
    start, span = recorded_s[0], recorded_s[-1] - recorded_s[0]
    factor = (len(recorded_s) - 1) / rate / span if span else 0.0
    return [(each - start) * factor for each in recorded_s]
