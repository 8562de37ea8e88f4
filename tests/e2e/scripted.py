"""Worker processes with a made-up model: they start within a second, and a step takes as long as a test likes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from tests.e2e.workers import WorkerProcess, eventually

ROOT = Path(__file__).parents[2]
SCRIPTED_WORKER = ROOT / "tests" / "faults" / "scripted_worker.py"
# What runs a worker whose own clock is wrong by so many seconds.
WRONG_CLOCK = (
    "import runpy, sys, time; real, ahead = time.time, float(sys.argv[1]); time.time = lambda: real() + ahead; "
    "del sys.argv[:2]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


class ScriptedWorkerProcess(WorkerProcess):
    """Like its base, but for the model. `clock_s`: so many seconds its machine's clock is ahead."""

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
        self._step_ms = step_ms
        self._clock_s = clock_s
        defaults = {"max_num_seqs": 4, "heartbeat_ms": 100, "metrics_port": 0}
        super().__init__(model, url, queue, logs, **(defaults | settings))

    def start(self, settings: dict[str, str], log: IO[bytes]) -> "subprocess.Popen[bytes]":
        """The process, whose output goes to `log`."""
        words = [str(SCRIPTED_WORKER), json.dumps(settings)]
        if self._clock_s is not None:
            words = ["-c", WRONG_CLOCK, str(self._clock_s), *words]
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PAGEMILL_STEP_MS": str(self._step_ms)}
        return subprocess.Popen([sys.executable, "-P", *words], stdout=log, stderr=log, env=os.environ | own)

    def gauge(self, name: str) -> float:
        """The sum of a metric's series."""
        text = self.get("/metrics")[1]
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))

    def wait_until_idle(self) -> None:
        """Nothing is held, and all blocks are free or cached."""
        eventually(lambda: self.gauge("pagemill_jobs_held") == 0, "no job to be held")
        eventually(lambda: self.gauge("pagemill_sequences_running") == 0, "no sequence to run")
