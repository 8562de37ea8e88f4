"""Records what came when and how long it was, for `pagemill simulate`: lengths and times, no text.

One JSON line a settled job, in the order in which they end:

    {"arrival_ms": 1700000000000, "prompt_tokens": 374, "output_tokens": 44, "end_ms": 1630, …}

arrival_ms      when the job was enqueued, by the server's clock
end_ms          from then to its end, to compare a simulation with
first_token_ms  from then to the first token; missing where another worker began the job
tenant          a name that stands for the job's tenant, where it has one. It is made with a key that only this process
                knows, so that it says who is the same, and not who it is
priority        where it is not 0
"""

import json
import secrets
from hashlib import blake2b
from pathlib import Path
from typing import Any

import structlog

from worker.errors import StartupError
from worker.job import Job

log = structlog.get_logger(__name__)


class TraceRecorder:
    """Appends to a file, which is opened for each line: it may be moved away at any time.

    Jobs without a generated token are left out: most of them never reached the engine. A file that can't be written
    any more is a warning in the log, never a job's or the worker's end.

    Raises StartupError where the file can't be written at the start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._key = secrets.token_bytes(16)
        self._is_failing = False
        try:
            with path.open("a", encoding="utf-8"):
                pass
        except OSError as error:
            raise StartupError(f"can't write the trace {path}: {error.strerror}: set record_trace to a file") from None

    def record(self, job: Job, finished_ms: int) -> None:
        """Write the line of a job that has ended."""
        line = trace_line(job, finished_ms, self._key)
        if line is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            if not self._is_failing:
                log.warning("trace_unwritten", path=str(self._path), error=error.strerror)
            self._is_failing = True
        else:
            self._is_failing = False


def trace_line(job: Job, finished_ms: int, key: bytes) -> dict[str, Any] | None:
    """What is recorded of a job; None where it has generated nothing."""
    times, request, choices = job.times, job.request, job.choices
    if request is None or choices is None or choices.num_tokens == 0:
        return None
    line: dict[str, Any] = {
        "arrival_ms": times.enqueued_ms,
        "prompt_tokens": len(job.prompt_ids),
        "output_tokens": choices.num_tokens,
        "end_ms": max(0, finished_ms - times.enqueued_ms),
    }
    if times.first_token_ms is not None and job.num_replayed == 0:
        line["first_token_ms"] = max(0, times.first_token_ms - times.enqueued_ms)
    if request.tenant:
        line["tenant"] = blake2b(request.tenant.encode(), key=key, digest_size=6).hexdigest()
    if request.priority:
        line["priority"] = request.priority
    return line
