"""Worker processes with the made-up model: up in a second or two, and what they answer is known beforehand."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from tests.e2e.workers import WorkerProcess
from tests.faults.fleet import ROOT, SCRIPTED_WORKER

# What runs a worker whose own clock is wrong by so many seconds.
WRONG_CLOCK = (
    "import runpy, sys, time; real, ahead = time.time, float(sys.argv[1]); time.time = lambda: real() + ahead; "
    "del sys.argv[:2]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


class ScriptedWorker(WorkerProcess):
    """Like WorkerProcess, but for its model.

    `step_ms` is how long a step takes, `start_ms` how long an engine says nothing before it stands. `clock_s`: so many
    seconds the machine's clock is ahead.
    """

    engine_word = "scripted_engine"

    def __init__(
        self,
        model: Path,
        url: str,
        queue: str,
        logs: Path,
        *,
        step_ms: float = 5,
        start_ms: int = 0,
        clock_s: float | None = None,
        **settings: Any,
    ) -> None:
        self._pace = {"PAGEMILL_STEP_MS": str(step_ms), "PAGEMILL_START_MS": str(start_ms)}
        self._clock_s = clock_s
        super().__init__(model, url, queue, logs, **{"num_threads": None} | settings)

    def start(self, settings: dict[str, str], log: IO[bytes]) -> "subprocess.Popen[bytes]":
        """The process, whose output goes to `log`."""
        wrong = [] if self._clock_s is None else ["-c", WRONG_CLOCK, str(self._clock_s)]
        command = [sys.executable, "-P", *wrong, str(SCRIPTED_WORKER), json.dumps(settings)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | self._pace
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)
