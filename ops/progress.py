"""How far a long start has come: bars on a terminal, a few plain lines elsewhere, or events of the log where that is
to be JSON. All write to stderr.

A reporter is called with (stage, done, total) as often as its caller likes and from any thread. A stage is over when
`done` reaches `total`; a `total` of 0 means that nobody knows how much there is.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

import structlog

from worker.logs import is_json

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

log = structlog.get_logger(__name__)

# Seconds between two plain lines of one stage.
_LINE_INTERVAL_S = 5.0


class ProgressReporter(Protocol):
    """What long work calls while it goes on."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Stage `stage` has done `done` of `total`."""

    def close(self) -> None:
        """The start is over: take the bars down."""


class PlainProgress:
    """A line when a stage begins, one every few seconds, and one when a stage of some length is over."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._started: dict[str, float] = {}
        self._told: dict[str, float] = {}
        self._finished: set[str] = set()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """See ProgressReporter."""
        with self._lock:
            if stage in self._finished:
                return
            now = time.monotonic()
            is_new = stage not in self._started
            self._started.setdefault(stage, now)
            if total and done >= total:
                self._finished.add(stage)
                self._tell(stage, f"done in {now - self._started[stage]:.1f} s", now)
            elif is_new or now - self._told[stage] >= _LINE_INTERVAL_S:
                self._tell(stage, f"{100 * done // total} %" if total else "…", now)

    def close(self) -> None:
        """See ProgressReporter."""

    def _tell(self, stage: str, words: str, now: float) -> None:
        self._told[stage] = now
        print(f"{stage}: {words}", file=self._stream, flush=True)


class LoggedProgress(PlainProgress):
    """The same as events of the log."""

    def _tell(self, stage: str, words: str, now: float) -> None:
        self._told[stage] = now
        log.info("start_goes_on", stage=stage, progress=words)


class BarProgress:
    """A bar for each stage, which stays as a line when its stage is over."""

    def __init__(self, progress: "Progress") -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        """See ProgressReporter."""
        with self._lock:
            if stage not in self._tasks:
                self._tasks[stage] = self._progress.add_task(stage, total=total or None)
            self._progress.update(self._tasks[stage], completed=done, total=total or None)

    def close(self) -> None:
        """See ProgressReporter."""
        self._progress.stop()


@contextmanager
def progress_reporter(stream: TextIO | None = None) -> Iterator[ProgressReporter]:
    """A reporter for `stream` (stderr where left out); bars are taken down at the end of the block."""
    stream = stream or sys.stderr
    if is_json():
        yield LoggedProgress(stream)
        return
    if not stream.isatty():
        yield PlainProgress(stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<28}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=stream)) as progress:
        yield BarProgress(progress)
