"""The sample clients as programs, and replies that are written by hand for them."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.e2e.workers import Queue, eventually
from worker.streams.keys import TERMINAL_SEQ

TIMEOUT_S = 60


@dataclass
class Running:
    """A sample that reads a reply; what it prints goes to files."""

    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def text(self) -> str:
        """What it has printed."""
        return (self.folder / "out").read_text()

    @property
    def seen(self) -> list[tuple[str, str]]:
        """Kind and id of each event that it has told of; other lines are what it complains of."""
        lines = (self.folder / "err").read_text().splitlines()
        pairs = [tuple(line.split(" ")) for line in lines if line.count(" ") == 1 and line[-1:].isdigit()]
        return [(kind, event_id) for kind, event_id in pairs]

    @property
    def kinds(self) -> list[str]:
        """Kinds of the events."""
        return [kind for kind, _ in self.seen]

    @property
    def complaint(self) -> str:
        """What it says at the end on stderr, where that is no event."""
        lines = (self.folder / "err").read_text().splitlines()
        return lines[-1] if lines else ""

    def wait_for(self, event_id: str) -> None:
        """Until it has told of this event."""
        eventually(lambda: event_id in [seen for _, seen in self.seen], f"{event_id} to be read", TIMEOUT_S)

    def end(self) -> int:
        """Its exit code."""
        return self.process.wait(TIMEOUT_S)


@dataclass
class Sample:
    """One of the samples as a command line."""

    command: list[str]
    url: str
    queue: str
    variables: Mapping[str, str]
    _running: list[Running] = field(default_factory=list)
    _folders: list["TemporaryDirectory[str]"] = field(default_factory=list)

    def call(self, command: str, *words: str, **variables: str) -> str:
        """What a command that succeeds prints."""
        ran = subprocess.run(
            [*self.command, command, self.queue, *words],
            env=self._environment(variables),
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.decode().rstrip("\n")

    def read(self, *words: str, **variables: str) -> Running:
        """Begin to read a reply."""
        return self.begin("stream", *words, **variables)

    def begin(self, command: str, *words: str, **variables: str) -> Running:
        """Begin with a command."""
        folder = TemporaryDirectory()
        self._folders.append(folder)
        place = Path(folder.name)
        with (place / "out").open("wb") as out, (place / "err").open("wb") as err:
            process = subprocess.Popen(
                [*self.command, command, self.queue, *words], env=self._environment(variables), stdout=out, stderr=err
            )
        self._running.append(Running(process, place))
        return self._running[-1]

    def close(self) -> None:
        """End what still runs."""
        for running in self._running:
            if running.process.poll() is None:
                running.process.kill()
                running.process.wait()
        for folder in self._folders:
            folder.cleanup()

    def _environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        return {**os.environ, "REDIS_URL": self.url, **self.variables, **variables}


Event = tuple[str, dict[str, Any]]


def opened(attempt: int, covered: int = 0) -> Event:
    return f"{attempt}-0", {"e": "open", "worker": "w", "from": covered}


def token(event_id: str, text: str, ids: Sequence[int], n: int, **fields: Any) -> Event:
    return event_id, {"e": "token", "text": text, "ids": json.dumps(ids), "n": n, **fields}


def end(attempt: int, text: str = "", **fields: Any) -> Event:
    return f"{attempt}-{TERMINAL_SEQ}", {"e": "end", "finish": "stop", "text": text, **fields}


def write(queue: Queue, *events: Event, job_id: str = "job") -> None:
    """Append events to a reply, as a worker would."""
    for event_id, fields in events:
        flat = [part for pair in fields.items() for part in pair]
        queue.redis.call("XADD", queue.keys.reply(job_id), event_id, *flat)
