"""Worker processes of one queue, each behind a port of the proxy of its own; those that die are replaced."""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.workers import PAGEMILL, is_alive
from tests.faults.proxy import Proxy

ROOT = Path(__file__).parents[2]
SCRIPTED_WORKER = Path(__file__).with_name("scripted_worker.py")
LEASE_MS = 1500
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 8,
    # Fewer than eight long sequences need, so that some are preempted.
    "num_kv_blocks": 40,
    "lease_ms": LEASE_MS,
    "heartbeat_ms": 500,
    "watchdog_s": 2.5,
    "shutdown_grace_s": 0.5,
    # Longer than a run: what was said is read once more at its end.
    "result_ttl_ms": 3_600_000,
    "check_invariants": "step",
    "log_format": "json",
}
# Seconds until a dead worker's successor is started.
MAX_RESTART_S = 1.0
START_S, STOP_S = 300.0, 60.0


@dataclass(slots=True)
class Member:
    """One worker process. `is_doomed`: this run has ended it, or told it to end."""

    party: str
    process: subprocess.Popen[bytes]
    log_path: Path
    is_doomed: bool = False
    family: list[psutil.Process] = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        """Whether it takes jobs, or did."""
        return b'"worker_ready"' in self.log_path.read_bytes()

    def processes(self) -> list[psutil.Process]:
        """The service process and what it has started, those that are gone by now left out."""
        try:
            service = psutil.Process(self.process.pid)
            self.family = [service, *service.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        return [process for process in self.family if is_alive(process)]


@dataclass(frozen=True, slots=True)
class Crew:
    """What kind of workers serve a queue, and how many. `step_ms`: the made-up model's speed; None: the real model."""

    num_workers: int
    step_ms: tuple[int, ...] | None
    sabotages: Sequence[str] = ()


class Fleet:
    """Keeps the workers of `queue` running. `failures` are those that ended, or failed in part, by themselves."""

    def __init__(
        self, crew: Crew, queue: str, model: Path, url: str, proxy: Proxy, folder: Path, rng: random.Random
    ) -> None:
        """`url` names user and password; the port is replaced by each worker's own."""
        self._crew = crew
        self.queue = queue
        self._model = model
        self._url = url
        self._proxy = proxy
        self._folder = folder
        self._rng = rng
        self._num_started = 0
        self.members: list[Member] = []
        self.failures: list[str] = []
        self._is_stopping = False

    @property
    def is_scripted(self) -> bool:
        """Whether the model is the made-up one, whose workers start fast."""
        return self._crew.step_ms is not None

    async def start(self) -> None:
        """Start all workers and wait until one takes jobs. Raises TimeoutError."""
        for _ in range(self._crew.num_workers):
            await self._start_one()
        async with asyncio.timeout(START_S):
            while not any(member.is_ready for member in self.members):  # noqa: ASYNC110 - it is in their logs
                await asyncio.sleep(0.05)

    async def keep_up(self) -> None:
        """Start a successor for each worker that died, until cancelled."""
        while True:
            for member in list(self.members):
                if member.process.poll() is not None:
                    self._bury(member)
                    await asyncio.sleep(self._rng.uniform(0, MAX_RESTART_S))
                    await self._start_one()
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """SIGTERM for all; whoever doesn't end, or leaves a process behind, is a failure."""
        deadline = time.monotonic() + STOP_S
        families = [process for member in self.members for process in member.processes()]
        for member in self.members:
            member.is_doomed = True
            member.process.terminate()
        while any(is_alive(process) for process in families) and time.monotonic() < deadline:
            for member in self.members:
                member.process.poll()
            await asyncio.sleep(0.05)
        for process in families:
            if is_alive(process):
                self.failures.append(f"process {process.pid} did not end within {STOP_S:.0f} s of SIGTERM")
                process.kill()
        for member in list(self.members):
            member.process.wait()
            self._bury(member)

    async def _start_one(self) -> None:
        self._num_started += 1
        party = f"{self.queue}-{self._num_started}"
        port = await self._proxy.listen(party)
        url = self._url.replace("PORT", str(port))
        settings = SETTINGS | {"queue": self.queue, "model": str(self._model), "redis_url": url}
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        if self._crew.step_ms is not None:
            environment["PAGEMILL_STEP_MS"] = str(self._rng.choice(self._crew.step_ms))
            command = [sys.executable, "-P", str(SCRIPTED_WORKER), json.dumps(settings), *self._crew.sabotages]
        else:
            settings["num_threads"] = 1
            flags = [(f"--{name.replace('_', '-')}", str(value)) for name, value in settings.items()]
            command = [str(PAGEMILL), "serve", *(part for flag in flags for part in flag)]
        log_path = self._folder / f"{party}.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(  # noqa: ASYNC220 - takes a millisecond
                command, stdout=log, stderr=log, env=environment
            )
        self.members.append(Member(party, process, log_path))

    def _bury(self, member: Member) -> None:
        """Look at how a worker ended."""
        self.members.remove(member)
        self._proxy.hang_up(member.party)
        log = member.log_path.read_text()
        # One that the server's absence kept from starting says so and ends with 2: its successor tries again.
        has_not_stood = not member.is_ready and member.process.returncode == 2
        if not (member.is_doomed or has_not_stood):
            self.failures.append(f"{member.party} ended by itself with {member.process.returncode}: {member.log_path}")
        for word in ("worker_part_failed", "Traceback"):
            if word in log:
                self.failures.append(f"{member.party} says {word}: {member.log_path}")
