"""Worker processes with a made-up model: they start within a second, and a step takes as long as a test likes."""

import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import psutil

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
        self.log_path = logs / f"{queue}-{uuid.uuid4().hex[:6]}.log"
        given = {"model": str(model), "redis_url": url, "queue": queue, "log_format": "json", "max_num_seqs": 4}
        given |= {"heartbeat_ms": 100, "check_invariants": "step", "metrics_port": 0} | settings
        words = [str(SCRIPTED_WORKER), json.dumps(given)]
        if clock_s is not None:
            words = ["-c", WRONG_CLOCK, str(clock_s), *words]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PAGEMILL_STEP_MS": str(step_ms)}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen([sys.executable, "-P", *words], stdout=log, stderr=log, env=environment)
        self._family: list[psutil.Process] = []

    def gauge(self, name: str) -> float:
        """The sum of a metric's series."""
        text = self.get("/metrics")[1]
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))

    def wait_until_idle(self) -> None:
        """Nothing is held, and all blocks are free or cached."""
        eventually(lambda: self.gauge("pagemill_jobs_held") == 0, "no job to be held")
        eventually(lambda: self.gauge("pagemill_sequences_running") == 0, "no sequence to run")
