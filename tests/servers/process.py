"""One server process of a group: any command, any configuration, any mode, with one password for all."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.wire.resp import Part, RespClient, RespError
from worker.watched_process import end_watched, start_watched

PASSWORD = "a/b@c"
QUOTED = "a%2Fb%40c"
START_S = 30.0
# Loopback ports that a group of servers gets: below those that the system hands out for outgoing connections.
_FIRST_PORT, _LAST_PORT = 15000, 32000


class ServerProcess:
    """A server on loopback, without a file of its own unless `lines` of configuration say so. `stop` it at the end."""

    def __init__(
        self, command: Sequence[str], folder: Path, lines: Sequence[str] = (), *, mode: str = "", login: bool = True
    ) -> None:
        """`mode` is an option of the command: `--sentinel`. Without `login` the lines say who may come in."""
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.folder = folder
        self._command = [*command, str(folder / "server.conf"), *([mode] if mode else [])]
        self._process: subprocess.Popen[bytes] | None = None
        own = [
            "bind 127.0.0.1",
            f"port {self.port}",
            f"dir {folder}",
            f"logfile {folder / 'server.log'}",
            f"pidfile {folder / 'server.pid'}",
        ]
        if login:
            own.append(f'requirepass "{PASSWORD}"')
        if mode != "--sentinel":
            own += ['save ""', f'masterauth "{PASSWORD}"', "repl-diskless-sync-delay 0", "repl-backlog-size 16mb"]
        (folder / "server.conf").write_text("\n".join([*own, *lines, ""]))
        self.start()

    @property
    def url(self) -> str:
        """Where it is, by itself."""
        return f"redis://default:{QUOTED}@127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Its process id."""
        return int((self.folder / "server.pid").read_text())

    def start(self) -> None:
        """Starts it (again) and waits until it answers; it may still load its data."""
        self._process = start_watched(self._command)
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the server doesn't start: {(self.folder / 'server.log').read_text()[-2000:]}")
            time.sleep(0.01)

    def call(self, *words: Part) -> Any:
        """One command over a connection of its own."""
        with RespClient(self.url) as client:
            return client.call(*words)

    def wait(self, what: str, *words: Part, until: Any, timeout_s: float = 20.0) -> Any:
        """Asks again and again until the answer satisfies `until`. Fails with `what`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                answer = self.call(*words)
            except (OSError, RespError) as error:
                answer = error
            else:
                if until(answer):
                    return answer
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {timeout_s:.0f} s for {what}: {answer!r}")
            time.sleep(0.02)

    def info(self, name: str) -> str:
        """One value of INFO."""
        lines = self.call("INFO").decode().splitlines()
        return next(str(line.partition(":")[2]) for line in lines if line.startswith(f"{name}:"))

    def kill(self) -> None:
        """SIGKILL, and nothing left of it."""
        os.kill(self.pid, signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        """Ends it, if it runs."""
        process, self._process = self._process, None
        if process is not None:
            end_watched(process)

    def _answers(self) -> bool:
        try:
            self.call("PING")
        except RespError as error:
            return str(error).startswith("LOADING")
        except OSError:
            return False
        return True


def free_port() -> int:
    """A port that is free, and so is the one 10000 above, where a Cluster's nodes talk to one another."""
    start = _FIRST_PORT + int.from_bytes(os.urandom(2)) % (_LAST_PORT - _FIRST_PORT)
    for port in [*range(start, _LAST_PORT), *range(_FIRST_PORT, start)]:
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind(("127.0.0.1", port))
                other.bind(("127.0.0.1", port + 10000))
            except OSError:
                continue
            return int(port)
    raise AssertionError("no free port")
