"""Worker processes with the made-up model: up in a second or two, and what they answer is known beforehand."""

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.workers import WorkerProcess
from tests.faults.fleet import ROOT, SCRIPTED_WORKER


class ScriptedWorker(WorkerProcess):
    """Like WorkerProcess, but for its model. `step_ms` is how long a step takes."""

    def __init__(self, model: Path, url: str, queue: str, logs: Path, *, step_ms: int = 5, **settings: Any) -> None:
        defaults = {"num_kv_blocks": 128, "max_num_seqs": 16, "check_invariants": "step", "log_format": "json"}
        given = {"model": str(model), "redis_url": url, "queue": queue} | defaults | settings
        self.log_path = logs / f"{queue}-{uuid.uuid4().hex[:6]}.log"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PAGEMILL_STEP_MS": str(step_ms)}
        command = [sys.executable, "-P", str(SCRIPTED_WORKER), json.dumps(given)]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self._family: list[psutil.Process] = []
