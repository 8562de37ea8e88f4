"""What the measurements of delivery work with: a client in raw commands, and workers without a model."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any, Final, Self, cast

import psutil

from ops.bench.errors import BenchError
from ops.bench.scripted_engine import SCHEDULED_VARIABLE, STEP_VARIABLE
from ops.resp import ErrorReply, RespConnection
from worker.streams.keys import LANES, QueueKeys

PATIENCE_S: Final = 120.0
STOP_S: Final = 20.0
BLOCK_MS: Final = 1000


class Client:
    """Sends jobs to one queue and reads their replies."""

    def __init__(self, url: str, queue: str) -> None:
        self.keys = QueueKeys(queue)
        self._redis = RespConnection(url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._redis.close()

    def call(self, *words: str | int) -> Any:
        """The answer to one command. Raises BenchError where it is an error."""
        answer = self._redis.call([str(word) for word in words])
        if isinstance(answer, ErrorReply):
            raise BenchError(f"the server answered {words[0]} with {answer.text}")
        return answer

    def send(self, job_id: str, *, max_tokens: int, tokens: Sequence[int] = (1, 2, 3), **fields: str | int) -> None:
        """A job of a few tokens that says as many as it may."""
        prompt = json.dumps(list(tokens))
        job: dict[str, str | int] = {"id": job_id, "tokens": prompt, "max_tokens": max_tokens, "ignore_eos": 1}
        job |= fields
        self.call("XADD", self.keys.jobs("normal"), "*", *(part for pair in job.items() for part in pair))

    def follow(self, job_ids: Iterable[str], on_event: Callable[[str, dict[str, str]], bool]) -> None:
        """Read the replies until `on_event`, called with a job's id and each of its events, has been true for all."""
        last = {self.keys.reply(job_id): ("0-0", job_id) for job_id in job_ids}
        deadline = time.monotonic() + PATIENCE_S
        while last:
            if time.monotonic() > deadline:
                raise BenchError(f"{len(last)} replies brought too little within {PATIENCE_S:.0f} s")
            ids = (last_id for last_id, _ in last.values())
            answer = self.call("XREAD", "COUNT", 512, "BLOCK", BLOCK_MS, "STREAMS", *last, *ids)
            for raw_key, entries in answer or ():
                key = raw_key.decode()
                job_id = last[key][1]
                for entry_id, flat in entries:
                    last[key] = (entry_id.decode(), job_id)
                    if on_event(job_id, _fields_of(flat)):
                        del last[key]
                        break

    def wait(self, *job_ids: str) -> None:
        """Read the replies to their ends. Raises BenchError for one that ends with an error."""
        self.follow(job_ids, _is_end)

    def num_queued(self) -> int:
        """Entries of all lanes, waiting or taken."""
        return sum(self.call("XLEN", self.keys.jobs(lane)) for lane in LANES)

    def info(self, section: str, name: str) -> int:
        """A number of INFO."""
        lines = self.call("INFO", section).decode().splitlines()
        return int(next(line.partition(":")[2] for line in lines if line.startswith(f"{name}:")))


def _fields_of(flat: Sequence[bytes]) -> dict[str, str]:
    texts = [part.decode("utf-8", "replace") for part in flat]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def _is_end(job_id: str, event: dict[str, str]) -> bool:
    if event["e"] == "error":
        raise BenchError(f"job {job_id} ended with {event['code']}: {event['message']}")
    return event["e"] == "end"


class ScriptedWorker:
    """A worker process, from when it takes jobs to the end of the block; without a model where `step_ms` is given."""

    def __init__(
        self, url: str, queue: str, model: Path, folder: Path, *, step_ms: float | None, **settings: Any
    ) -> None:
        """`settings` are more of the worker's. What it logs, and when it scheduled what, lies in `folder`."""
        self._log_path = folder / f"{queue}-{time.monotonic_ns()}.log"
        self._scheduled_path = self._log_path.with_suffix(".scheduled")
        given = {"model": str(model), "redis_url": url, "queue": queue, "log_level": "warning"} | settings
        environment = {SCHEDULED_VARIABLE: str(self._scheduled_path)}
        environment |= {} if step_ms is None else {STEP_VARIABLE: str(step_ms)}
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ops.bench.scripted_worker", json.dumps(given)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | environment,
            )
        with cast("IO[bytes]", self._process.stdout) as told:
            self.worker_id = told.readline().decode().strip()
        if not self.worker_id:
            self._process.wait()
            raise BenchError(f"the worker could not start: {self._log_path.read_text().strip()[-500:]}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """SIGKILL for the service; its engine ends with it."""
        self._process.kill()
        self._process.wait()

    def service_cpu_s(self) -> float:
        """Processor time that the service process has used, its engine's not counted."""
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def scheduled_ns(self) -> dict[str, int]:
        """When the engine first scheduled each job, by the monotonic clock."""
        lines = self._scheduled_path.read_text().splitlines()
        # The engine's name for a job is `QUEUE/ID:ATTEMPT`.
        return {line.partition("/")[2].partition(":")[0]: int(line.rpartition(" ")[2]) for line in lines}
