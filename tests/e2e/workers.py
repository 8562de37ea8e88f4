"""Real worker processes under test, and a client that is nothing but raw commands."""

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, Self

import psutil

from tests.wire.resp import Part, RespClient, pairs
from worker.streams.keys import LANES, QueueKeys

PAGEMILL = Path(sys.executable).with_name("pagemill")
TERMINAL = ("end", "error")
# Of a test that waits for something: a start takes seconds, and many times as long where the machine is busy.
PATIENCE_S = 120.0


def eventually(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """Polls until `condition` answers something true, and returns that; fails with `what` after the time."""
    deadline = time.monotonic() + timeout_s
    while True:
        if answer := condition():
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(0.01)


class WorkerProcess:
    """`pagemill serve` as a user starts it. Leaving the block stops it, and checks that nothing is left running.

    A setting that is None is left out, so that Pagemill's own default holds.
    """

    # What the engine's command line has.
    engine_word = "worker.engine_process"
    _ready: dict[str, Any] | None = None

    def __init__(self, model: Path, url: str, queue: str, logs: Path, **settings: Any) -> None:
        defaults = {"num_kv_blocks": 128, "max_num_seqs": 16, "num_threads": 1, "check_invariants": "step"}
        self.log_path = logs / f"{queue}-{uuid.uuid4().hex[:6]}.log"
        flags = {"model": model, "redis_url": url, "queue": queue, "log_format": "json"} | defaults | settings
        given = {name: str(value) for name, value in flags.items() if value is not None}
        with self.log_path.open("wb") as log:
            self.process = self.start(given, log)
        self._family: list[psutil.Process] = []

    def start(self, settings: dict[str, str], log: IO[bytes]) -> "subprocess.Popen[bytes]":
        """The process, whose output goes to `log`."""
        names = {name: name.replace("_", "-") for name in settings}
        # A switch takes no value.
        flags = [
            (f"--{names[name] if value == 'True' else f'no-{names[name]}'}",)
            if value in ("True", "False")
            else (f"--{names[name]}", value)
            for name, value in settings.items()
        ]
        return subprocess.Popen([PAGEMILL, "serve", *chain.from_iterable(flags)], stdout=log, stderr=log)

    def wait_until_ready(self) -> dict[str, Any]:
        """The event that says that jobs are being taken. It is looked for once."""
        if self._ready is not None:
            return self._ready

        def ready() -> dict[str, Any] | None:
            if self.process.poll() is not None:
                raise AssertionError(f"the worker ended with {self.process.returncode}: {self.log_path.read_text()}")
            return next(iter(self.named("worker_ready")), None)

        event: dict[str, Any] = eventually(ready, "the worker to be ready")
        self._ready = event
        self._family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        return event

    def events(self) -> list[dict[str, Any]]:
        """The log so far; lines that are no JSON (yet) are left out."""
        lines = self.log_path.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def named(self, event: str) -> list[dict[str, Any]]:
        """All events of that name in the log."""
        return [entry for entry in self.events() if entry.get("event") == event]

    def signal(self, number: int) -> None:
        """Send a signal to the service process alone."""
        self.process.send_signal(number)

    def engine(self) -> psutil.Process:
        """The engine process that is alive now; fails between two."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in children if any(self.engine_word in word for word in child.cmdline()))

    def wait(self) -> int:
        """The exit code."""
        return self.process.wait(PATIENCE_S)

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of an HTTP GET at the metrics port."""
        url = self.wait_until_ready()["metrics_url"]
        try:
            with urllib.request.urlopen(f"{url}{path}", timeout=10) as answer:  # noqa: S310 - our own worker, by http
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def gauge(self, name: str) -> float:
        """The sum of a metric's series."""
        text = self.get("/metrics")[1]
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))

    def wait_until_idle(self) -> None:
        """Nothing is held, and all blocks are free or cached."""
        eventually(lambda: self.gauge("pagemill_jobs_held") == 0, "no job to be held")
        eventually(lambda: self.gauge("pagemill_sequences_running") == 0, "no sequence to run")

    def assert_gone(self) -> None:
        """No process of this worker's family is left."""
        assert_gone(self._family)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.assert_gone()


def assert_gone(processes: list[psutil.Process]) -> None:
    """Waits until none of these runs any more."""
    eventually(lambda: not any(is_alive(process) for process in processes), f"{[p.pid for p in processes]} to be gone")


def is_alive(process: psutil.Process) -> bool:
    """Whether it still runs. A zombie is dead, and waits for its parent."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True, slots=True)
class Reply:
    """All events of a reply, up to now."""

    events: list[tuple[str, dict[str, str]]]

    @property
    def terminal(self) -> dict[str, str]:
        """The one terminal event; fails if there is none, another one, or anything after it."""
        ends = [i for i, (_, fields) in enumerate(self.events) if fields["e"] in TERMINAL]
        assert ends == [len(self.events) - 1], f"terminal events at {ends} of {len(self.events)}: {self.events}"
        return self.events[-1][1]

    @property
    def text(self) -> str:
        """What a client shows: all deltas in order."""
        return "".join(fields.get("text", "") for _, fields in self.events)

    @property
    def ids(self) -> list[int]:
        """Generated token ids, checked against each event's count."""
        ids: list[int] = []
        for _, fields in self.events:
            if fields["e"] == "token":
                ids += json.loads(fields["ids"])
                assert int(fields["n"]) == len(ids), f"n is {fields['n']} after {len(ids)} ids"
        return ids

    def field(self, name: str) -> Any:
        """A JSON field of the terminal event."""
        return json.loads(self.terminal[name])


def fresh_keys() -> QueueKeys:
    """Key names of a queue that no other test uses."""
    return QueueKeys(f"q{uuid.uuid4().hex[:12]}")


class Queue:
    """A client of one queue, in raw commands."""

    def __init__(self, url: str, keys: QueueKeys) -> None:
        self.keys = keys
        self.redis = RespClient(url)

    def enqueue(self, lane: str = "normal", **fields: Any) -> str:
        """XADD a job with these flat fields; answers its id (`id`, or the one that follows from its entry)."""
        return self.enqueue_fields([part for pair in fields.items() for part in pair], lane, str(fields.get("id", "")))

    def enqueue_fields(self, flat: list[Part], lane: str = "normal", job_id: str = "") -> str:
        """XADD whatever it is."""
        entry_id = self.redis.call("XADD", self.keys.jobs(lane), "*", *flat).decode()
        return job_id or f"{lane}-{entry_id}"

    def reply(self, job_id: str) -> Reply:
        """The reply as it is now."""
        return Reply(self.redis.events(self.keys.reply(job_id)))

    def wait(self, job_id: str, timeout_s: float = PATIENCE_S) -> Reply:
        """The reply once it has ended, read by XREAD as a client reads it."""
        deadline, last, events = time.monotonic() + timeout_s, "0-0", []
        while time.monotonic() < deadline:
            answer = self.redis.call("XREAD", "BLOCK", 1000, "COUNT", 256, "STREAMS", self.keys.reply(job_id), last)
            for entry_id, flat in answer[0][1] if answer else []:
                last = entry_id.decode()
                events.append((last, pairs(flat)))
            if events and events[-1][1]["e"] in TERMINAL:
                return Reply(events)
        raise AssertionError(f"{job_id} did not end within {timeout_s} s: {events}")

    def run(self, **fields: Any) -> Reply:
        """Enqueue a job and wait for its end."""
        return self.wait(self.enqueue(**fields))

    def cancel(self, job_id: str, reason: str = "user left") -> None:
        """Call a job off, as a client does: the durable mark, then the hint."""
        self.redis.call("SET", self.keys.cancel(job_id), reason, "EX", 86400)
        self.redis.call("XADD", self.keys.control, "MAXLEN", "~", 1000, "*", "op", "cancel", "id", job_id)

    def assert_settled(self) -> None:
        """Nothing is left in any lane, and nothing is pending."""
        eventually(lambda: not self.num_queued(), "all lanes to be empty")
        assert [self.redis.pending(self.keys.jobs(lane)) for lane in LANES] == [{}, {}, {}]

    def num_queued(self) -> int:
        """Entries in all lanes: waiting, and taken but not settled."""
        return sum(self.redis.call("XLEN", self.keys.jobs(lane)) for lane in LANES)

    def close(self) -> None:
        """Close the connection."""
        self.redis.close()


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(psutil.Process(pid).memory_info().rss)
