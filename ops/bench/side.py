"""A side of the bench: a process of its own that is started once, runs when it is told to, and sleeps otherwise.

JSON lines over its stdin and stdout: `{"do": NAME, ...}` is answered by `{"reply": ...}` or `{"error": "one line"}`.
The end of stdin ends the process.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import IO, Any, Protocol, Self, cast

import psutil

from ops.bench.errors import BenchError
from worker.errors import PagemillError

# Seconds that a side gets to end by itself.
CLOSE_GRACE_S = 10.0

Handler = Callable[..., Any]


class Side(Protocol):
    """Whom the measurement tells to run, and watches while it should sleep."""

    def ask(self, do: str, **arguments: Any) -> Any:
        """The reply to one command, waited for as long as it takes. Raises BenchError."""
        ...

    def cpu_seconds(self) -> float:
        """Processor time that the side and its children have used."""
        ...


class SideProcess:
    """The bench's end: starts `python -m MODULE OPTIONS_JSON` and asks it."""

    def __init__(self, name: str, module: str, options: Mapping[str, Any]) -> None:
        self.name = name
        command = [sys.executable, "-P", "-m", module, json.dumps(options)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._commands = cast("IO[str]", self._process.stdin)
        self._replies = cast("IO[str]", self._process.stdout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, do: str, **arguments: Any) -> Any:
        """The reply to one command, waited for as long as it takes. Raises BenchError."""
        try:
            self._commands.write(json.dumps({"do": do, **arguments}) + "\n")
            self._commands.flush()
            line = self._replies.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise BenchError(f"{self.name} ended with exit code {self._process.wait()} when it was told to {do}")
        answer = json.loads(line)
        if "error" in answer:
            raise BenchError(f"{self.name}: {answer['error']}")
        return answer["reply"]

    def cpu_seconds(self) -> float:
        """Processor time that the side and its children have used."""
        total = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends right now; whoever asks it next is told
            process = psutil.Process(self._process.pid)
            for each in (process, *process.children(recursive=True)):
                times = each.cpu_times()
                total += times.user + times.system
        return total

    def close(self) -> None:
        """End the process: close its stdin, wait, then kill."""
        with contextlib.suppress(BrokenPipeError):
            self._commands.close()
        try:
            self._process.wait(CLOSE_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._replies.close()


def serve(handlers: Mapping[str, Handler]) -> None:
    """A side's end: answer commands until stdin ends. Whatever libraries print goes to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the bench ends its sides in order
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        message = json.loads(line)
        try:
            answer = {"reply": handlers[message.pop("do")](**message)}
        except PagemillError as error:
            answer = {"error": one_line(str(error))}
        except Exception as error:
            if os.environ.get("PAGEMILL_DEBUG", "") not in ("", "0"):
                raise
            answer = {"error": one_line(f"{type(error).__name__}: {error} (PAGEMILL_DEBUG=1 shows where)")}
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


def one_line(text: str) -> str:
    """The text without line ends and rows of blanks."""
    return " ".join(text.split())
