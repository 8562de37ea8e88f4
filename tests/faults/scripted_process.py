"""A worker of the made-up model as a process of its own, for a single test: it starts in a second."""

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

DEFAULTS: dict[str, Any] = {
    "num_kv_blocks": 256,
    "max_num_seqs": 16,
    "lease_ms": 1000,
    "heartbeat_ms": 500,
    "check_invariants": "step",
    "log_format": "json",
}


class ScriptedProcess(WorkerProcess):
    """Like its base, but for the model. `step_ms` is how long a step takes, `start_ms` how long a start at least."""

    def __init__(
        self,
        model: Path,
        url: str,
        queue: str,
        logs: Path,
        *,
        step_ms: int = 5,
        start_ms: int = 0,
        **settings: Any,
    ) -> None:
        self.log_path = logs / f"{queue}-{uuid.uuid4().hex[:6]}.log"
        given = DEFAULTS | {"model": str(model), "redis_url": url, "queue": queue} | settings
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        environment |= {"PAGEMILL_STEP_MS": str(step_ms), "PAGEMILL_START_MS": str(start_ms)}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(SCRIPTED_WORKER), json.dumps(given)], stdout=log, stderr=log, env=environment
            )
        self._family: list[psutil.Process] = []

    def engine(self) -> psutil.Process:
        """The engine process that is alive now; fails between two."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in children if any("scripted_engine" in word for word in child.cmdline()))

    def named(self, event: str) -> list[dict[str, Any]]:
        """All events of that name in its log."""
        return [entry for entry in self.events() if entry.get("event") == event]
