"""A Valkey of our own, for whoever has no Redis: started, watched and stopped by this process.

Nothing is left running, whatever ends this process: see `worker.watched_process`. A server that ends by itself is
started again by `keep_running`, on the same data and at the same address, so that clients find it again.
"""

import asyncio
import fcntl
import json
import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import structlog

from worker.errors import StartupError
from worker.server_choice import choose_server, find_servers, record_writer
from worker.watched_process import end_watched, let_go, start_watched

log = structlog.get_logger(__name__)

ProgressCallback = Callable[[str, int, int], None]

START_TIMEOUT_S = 120.0  # reading a large append-only file takes its time
TELL_AFTER_S = 1.0  # a start that takes longer is told as progress
PROBE_TIMEOUT_S = 5.0
LOCK_TIMEOUT_S = 2.0  # a killed worker's server may be on its way out
NUM_PORT_TRIES = 5
# A server that ends more often than this within the time is not started again.
MAX_ENDS = 5
ENDS_WINDOW_S = 60.0
WATCH_S = 0.25

LOCK_FILE = "lock"
URL_FILE = "redis.url"
_READING = "reading the stored jobs"


class EmbeddedServer:
    """A server on loopback with a random password and an append-only file in `data_dir`, which survives restarts.

    Use it as a context manager, or call `start` and `stop`. `command` starts another server binary than the one
    found. Raises StartupError, one line that says what to do.
    """

    def __init__(
        self,
        data_dir: Path,
        command: Sequence[str] | None = None,
        extra: Mapping[str, str] | None = None,
        progress: ProgressCallback | None = None,
    ):
        """`extra` holds further lines of the server's configuration; `progress` is told of a start that takes long."""
        self._data_dir = data_dir
        self._commands = None if command is None else [list(command)]
        self._command: list[str] = []
        self._extra = dict(extra or {})
        self._progress = progress
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopping = threading.Event()
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
        return self._data_dir / URL_FILE

    def start(self) -> str:
        """Starts the server, waits until it answers, and returns its URL."""
        commands = self._commands or find_servers()
        self._make_data_dir()
        self._take_lock()
        self._is_stopping.clear()
        try:
            self._command, version = choose_server(self._data_dir, commands)
            for _ in range(NUM_PORT_TRIES):
                self._port = _free_port()
                if self._launch():
                    record_writer(self._data_dir, version)
                    log.info("embedded_redis_started", port=self._port, data_dir=str(self._data_dir))
                    return self.url
            raise StartupError(
                f"{self._command[0]} found no free port on 127.0.0.1: stop what holds them all, or try again"
            )
        except BaseException:
            self.stop()
            raise

    async def keep_running(self) -> None:
        """Start the server again whenever it ends by itself, until cancelled.

        Raises StartupError once that happened too often within a minute, failed starts included.
        """
        ends: list[float] = []
        reason = f"see {self._log_file}"
        try:
            while True:
                await asyncio.sleep(WATCH_S)
                if not await asyncio.to_thread(self._is_down):
                    continue
                ends = [*(at for at in ends if time.monotonic() - at < ENDS_WINDOW_S), time.monotonic()]
                log.error("embedded_redis_ended", port=self._port, times=len(ends))
                if len(ends) > MAX_ENDS:
                    raise StartupError(f"the embedded server ended {len(ends)} times within a minute: {reason}")
                await asyncio.sleep(min(2.0, 0.05 * 2 ** len(ends)))
                try:
                    await asyncio.to_thread(self._restart)
                except StartupError as error:
                    reason = str(error)
        finally:
            self._is_stopping.set()  # ends a start that is under way in its thread

    def stop(self) -> None:
        """Ends the server cleanly; what was acknowledged is on disk. Does nothing if it doesn't run."""
        self._is_stopping.set()
        process, self._process = self._process, None
        if process is not None:
            end_watched(process)
            log.info("embedded_redis_stopped", port=self._port)
        if self._lock is not None:
            self.url_file.unlink(missing_ok=True)
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
            lock = (self._data_dir / LOCK_FILE).open("wb")
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

    def _is_down(self) -> bool:
        """Whether the server ended. Its watcher alone may have: the server goes on then, and ends with the pipe."""
        return self._process is None or (self._process.poll() is not None and not self._answers())

    def _restart(self) -> None:
        """Starts the server again, on the same data and at the same address. Raises StartupError."""
        process, self._process = self._process, None
        if process is not None:
            end_watched(process)
        if not self._launch():
            raise StartupError(f"another program has taken its port {self._port} on 127.0.0.1")
        log.warning("embedded_redis_restarted", port=self._port)

    def _launch(self) -> bool:
        """Starts the server on `self._port` and writes its address. False: another program took that port."""
        assert self._lock is not None, "the data folder is locked"
        config = self._data_dir / "server.conf"
        _write_private(config, self._config())
        log_start = self._log_file.stat().st_size if self._log_file.exists() else 0
        # Server and watcher inherit the lock, so that the next worker waits until both are gone.
        process = start_watched(
            [*self._command, str(config)], keep_open=[self._lock.fileno()], goes_too=self.url_file.resolve()
        )
        self._process = process
        started = time.monotonic()
        is_told = False
        while not self._answers():
            if process.poll() is not None:
                let_go(process)
                self._process = None
                return self._explain(log_start)
            if self._is_stopping.is_set():
                raise StartupError("stopped before the embedded server answered")
            waited_s = time.monotonic() - started
            if waited_s > START_TIMEOUT_S:
                raise StartupError(
                    f"{self._command[0]} doesn't answer after {START_TIMEOUT_S:.0f} s: see {self._log_file}"
                )
            if self._progress is not None and waited_s > TELL_AFTER_S:
                is_told = True
                self._progress(_READING, 0, 0)
            time.sleep(0.01)
        if self._progress is not None and is_told:
            self._progress(_READING, 1, 1)
        _write_private(self.url_file, self.url + "\n")
        return True

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


def is_in_use(data_dir: Path) -> bool:
    """Whether an embedded server, or its worker, holds this folder now."""
    try:
        with (data_dir / LOCK_FILE).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return True  # it can't be told here; a connection will show it
    return False


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
