"""Whether a worker gets on: its loop turns, and its engine, where it has work, finishes steps."""

import asyncio
import time
from collections.abc import Callable

# Who watches looks so many times within the watchdog's patience, and at least once a second.
LOOKS_PER_PATIENCE = 10
MAX_LOOK_S = 1.0


def look_every_s(watchdog_s: float) -> float:
    """How often to look whether something has stood still for longer than `watchdog_s`."""
    return min(MAX_LOOK_S, watchdog_s / LOOKS_PER_PATIENCE)


class Liveness:
    """Looks at the engine from the service's loop; any thread may ask.

    A look that doesn't come says as much as an engine that stands still: whoever renews leases from a thread of its own
    would otherwise keep a hung service's jobs for ever.
    """

    def __init__(
        self,
        watchdog_s: float,
        *,
        seconds_since_step: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`watchdog_s`: how long neither may move. `seconds_since_step`: 0 where the engine has no work."""
        self._watchdog_s = watchdog_s
        self._seconds_since_step = seconds_since_step
        self._clock = clock
        self._looked_s: float | None = None
        self._moved_s = 0.0

    async def run(self) -> None:
        """Look again and again, until cancelled. Outside of it nothing counts as stuck."""
        try:
            while True:
                self.look()
                await asyncio.sleep(look_every_s(self._watchdog_s))
        finally:
            self._looked_s = None

    def look(self) -> None:
        """Note that the loop turns, and how far the engine is."""
        now = self._clock()
        # An engine that was idle begins to be late when it gets work, not after its last step.
        self._moved_s = max(self._moved_s, now - self._seconds_since_step())
        self._looked_s = now

    def why_stuck(self) -> str | None:
        """What has not moved for longer than the watchdog allows; None where all is well."""
        looked_s = self._looked_s
        if looked_s is None:
            return None
        now = self._clock()
        if now - looked_s > self._watchdog_s:
            return f"the service has been held up for {now - looked_s:.0f} s"
        if now - self._moved_s > self._watchdog_s:
            return f"no step for {now - self._moved_s:.0f} s while jobs run"
        return None

    def is_well(self) -> bool:
        """Whether nothing is stuck."""
        return self.why_stuck() is None
