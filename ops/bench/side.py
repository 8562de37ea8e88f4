"""A side of the bench: a process of its own that is started once, runs when it is told to, and sleeps otherwise.

JSON lines over its stdin and stdout, as serving.py says, which is the side's own end. It may run in another Python
than this one, say in a virtual environment that holds what can't be installed beside our own packages.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final, Protocol, Self, cast

import psutil

from ops.bench.errors import BenchError

# Seconds that a side gets to end by itself.
CLOSE_GRACE_S = 10.0
# What another Python gets to see of ours. A folder that holds them may be this Python's site-packages, whose other
# contents would stand in the way of its own.
PACKAGES: Final = ("ops", "worker", "scheduler", "kernels", "model")


class Side(Protocol):
    """Whom the measurement tells to run, and watches while it should sleep."""

    def ask(self, do: str, **arguments: Any) -> Any:
        """The reply to one command, waited for as long as it takes. Raises BenchError."""
        ...

    def cpu_seconds(self) -> float:
        """Processor time that the side and its children have used."""
        ...


class SideProcess:
    """The bench's end: starts `python -m MODULE OPTIONS_JSON` and asks it.

    python: another interpreter than this one; it finds our packages and nothing else of this one's.
    """

    def __init__(self, name: str, module: str, options: Mapping[str, Any], *, python: str | None = None) -> None:
        self.name = name
        self._stack = contextlib.ExitStack()
        environment = None
        if python is not None:
            links = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="pagemill-bench-"))
            environment = os.environ | {"PYTHONPATH": str(link_packages(Path(links)))}
        command = [python or sys.executable, "-P", "-m", module, json.dumps(options)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
        except OSError as error:
            self._stack.close()
            raise BenchError(f"can't start {name} with {command[0]}: {error.strerror}") from error
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
        self._stack.close()


def link_packages(folder: Path) -> Path:
    """The same folder, once it has links to our packages."""
    root = Path(__file__).resolve().parents[2]
    for name in PACKAGES:
        (folder / name).symlink_to(root / name, target_is_directory=True)
    return folder
