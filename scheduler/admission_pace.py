"""Spreads a burst of admissions over a few steps where many run."""

# Fewer that run leave a step time for any number of newcomers.
MANY_RUNNING = 128
# So many are let in beside them at once.
FEWEST = 3


class AdmissionPace:
    """How many may be admitted in a step. An admission takes the scheduler as long as fifty decodes.

        room for 3 or fewer: all at once      for 12: 3, 4, 5        a steady 25 a step: 3, 4, 6, 9, 13, 19, 28, 42 …

    Where there was room for more, the next step may admit half as many again, and where there was not, half as many:
    so a burst waits for a few steps, and a steady flow of short replies is let in as fast as they end.
    """

    def __init__(self) -> None:
        self._most = FEWEST

    def most(self, num_running: int) -> int | None:
        """How many the next step may admit beside so many that run; None: any number."""
        return self._most if num_running >= MANY_RUNNING else None

    def observe(self, num_admitted: int) -> None:
        """A step has admitted so many."""
        self._most = self._most * 3 // 2 if num_admitted >= self._most else max(FEWEST, self._most // 2)
