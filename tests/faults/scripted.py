"""Worker processes with the made-up model: up in a second or two, and what they answer is known beforehand."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from tests.e2e.workers import WorkerProcess
from tests.faults.fleet import ROOT, SCRIPTED_WORKER


class ScriptedWorker(WorkerProcess):
    """Like WorkerProcess, but for its model. `step_ms` is how long a step takes."""

    def __init__(self, model: Path, url: str, queue: str, logs: Path, *, step_ms: float = 5, **settings: Any) -> None:
        self._step_ms = step_ms
        super().__init__(model, url, queue, logs, **{"num_threads": None} | settings)

    def start(self, settings: dict[str, str], log: IO[bytes]) -> "subprocess.Popen[bytes]":
        """The process, whose output goes to `log`."""
        step_ms = {"PAGEMILL_STEP_MS": str(self._step_ms)}
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | step_ms
        return subprocess.Popen(self.command(settings), stdout=log, stderr=log, env=environment)

    def command(self, settings: dict[str, str]) -> list[str]:
        """What starts the process."""
        return [sys.executable, "-P", str(SCRIPTED_WORKER), json.dumps(settings)]
