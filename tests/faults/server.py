"""A real server that is killed, and that can lose the last second of its append-only file as in a power cut."""

import asyncio
import os
import signal
import time
from collections import deque
from pathlib import Path

from tests.faults.checker import Promise
from worker.embedded import EmbeddedServer

SAMPLE_S = 0.05
# How long before a power cut the last write may lie that the disk still has.
MAX_CUT_S = 1.0


class FaultyServer:
    """Owner of the server process and of its file. `crash` brings it back on another port, under the same password."""

    def __init__(self, folder: Path, command: list[str], promise: Promise) -> None:
        # Rewriting the file would leave nothing of the lengths that it had before.
        extra = {"appendfsync": promise.value, "auto-aof-rewrite-percentage": "0"}
        self._folder = folder
        self._server = EmbeddedServer(folder, command, extra)
        self._lengths: deque[tuple[float, int]] = deque(maxlen=int(2 * MAX_CUT_S / SAMPLE_S))

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return "127.0.0.1", self._server.port

    @property
    def url(self) -> str:
        """Where it is, without any proxy."""
        return self._server.url

    async def start(self) -> None:
        """Start it and wait until it answers."""
        await asyncio.to_thread(self._server.start)
        self._lengths.clear()
        self._note_length()

    async def stop(self) -> None:
        """End it cleanly."""
        await asyncio.to_thread(self._server.stop)

    async def watch_file(self) -> None:
        """Remember how long the append-only file was when, until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            self._note_length()

    async def crash(self, forget_s: float = 0.0) -> None:
        """SIGKILL. With `forget_s`, what the file got in the last so many seconds is cut off, in mid-command maybe."""
        os.kill(int(self._server.pid_file.read_text()), signal.SIGKILL)
        killed_at = time.monotonic()
        await self.stop()  # what is left of it: the watcher and the lock
        if forget_s:
            kept = [length for at, length in self._lengths if at <= killed_at - forget_s]
            length = kept[-1] if kept else self._lengths[0][1]
            os.truncate(self._file(), length)

    def _note_length(self) -> None:
        self._lengths.append((time.monotonic(), self._file().stat().st_size))

    def _file(self) -> Path:
        """The append-only file that is written now: one of several parts since Redis 7."""
        parts = sorted(self._folder.rglob("*.incr.aof"))
        return parts[-1] if parts else self._folder / "appendonly.aof"
