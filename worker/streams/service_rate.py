"""How fast jobs are served, as measured, for telling a client when to come back."""

import time
from collections import deque

# Jobs that ended within this time are counted.
WINDOW_S = 60.0
MAX_COUNTED = 10_000
# Bounds of what a client is told: less would be asking again at once, more would be guessing.
MIN_MS, MAX_MS = 1_000, 600_000
# Where nothing has ended yet, so that nothing is known.
UNKNOWN_MS = 30_000


class ServiceRate:
    """Jobs per second over the last minute. Those that ended without running don't count.

    `num_workers`: how many serve the queue; they are taken to be as fast as this one.
    """

    def __init__(self) -> None:
        self._ended_at: deque[float] = deque(maxlen=MAX_COUNTED)
        self._since = time.monotonic()
        self.num_workers = 1

    def count(self) -> None:
        """A job that ran has ended."""
        self._ended_at.append(time.monotonic())

    @property
    def per_s(self) -> float:
        """Of this worker alone; 0 where nothing has ended lately."""
        now = time.monotonic()
        while self._ended_at and self._ended_at[0] < now - WINDOW_S:
            self._ended_at.popleft()
        if not self._ended_at:
            return 0.0
        is_full = len(self._ended_at) == self._ended_at.maxlen
        since = self._ended_at[0] if is_full else max(self._since, now - WINDOW_S)
        return len(self._ended_at) / max(now - since, 0.001)

    def ms_to_serve(self, num_jobs: int) -> int:
        """Milliseconds in which all workers together serve so many jobs, within bounds."""
        per_s = self.per_s * max(1, self.num_workers)
        if per_s == 0:
            return UNKNOWN_MS
        return round(min(MAX_MS, max(MIN_MS, 1000 * num_jobs / per_s)))
