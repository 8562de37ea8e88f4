"""Workers with the made-up model that tell of what goes on inside, on machines whose clock may be wrong."""

import re
import sys
from pathlib import Path
from typing import Any

from tests.e2e.workers import eventually
from tests.faults.scripted import ScriptedWorker

# What runs a worker whose own clock is wrong by so many seconds.
WRONG_CLOCK = (
    "import runpy, sys, time; real, ahead = time.time, float(sys.argv[1]); time.time = lambda: real() + ahead; "
    "del sys.argv[:2]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


class ScriptedWorkerProcess(ScriptedWorker):
    """Like its base, with four places. `clock_s`: so many seconds its machine's clock is ahead."""

    def __init__(
        self,
        model: Path,
        url: str,
        queue: str,
        logs: Path,
        *,
        step_ms: float = 2,
        clock_s: float | None = None,
        **settings: Any,
    ) -> None:
        self._clock_s = clock_s
        given = {"max_num_seqs": 4, "heartbeat_ms": 100, "metrics_port": 0} | settings
        super().__init__(model, url, queue, logs, step_ms=step_ms, **given)

    def command(self, settings: dict[str, str]) -> list[str]:
        """What starts the process."""
        _, option, *words = super().command(settings)
        wrong = [] if self._clock_s is None else ["-c", WRONG_CLOCK, str(self._clock_s)]
        return [sys.executable, option, *wrong, *words]

    def gauge(self, name: str) -> float:
        """The sum of a metric's series."""
        text = self.get("/metrics")[1]
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))

    def wait_until_idle(self) -> None:
        """Nothing is held, and all blocks are free or cached."""
        eventually(lambda: self.gauge("pagemill_jobs_held") == 0, "no job to be held")
        eventually(lambda: self.gauge("pagemill_sequences_running") == 0, "no sequence to run")
