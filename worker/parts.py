"""The tasks of a worker: its parts, which run until it ends, and the entries that are just being taken in."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

log = structlog.get_logger(__name__)

# How long a part that was cancelled may take before it is cancelled again.
CANCEL_AGAIN_S = 1.0


class Parts:
    """Owner of the worker's tasks. `on_failure` is called whenever one fails; `failure` is the first one's error."""

    def __init__(self, on_failure: Callable[[], None]) -> None:
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[None]] = set()
        self.failure: BaseException | None = None

    def spawn(self, name: str, part: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run a part. One without which the worker can't go on says so by failing."""
        task = asyncio.create_task(part, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("worker_part_failed", part=task.get_name(), exc_info=error)
        self.failure = self.failure or error
        self._on_failure()

    async def end(self) -> None:
        """Cancel all that still run, and wait for them."""
        # A library's task may swallow a cancellation (asyncio.wait_for does on Python 3.11): ask again until all ended.
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(tuple(self._tasks), timeout=CANCEL_AGAIN_S)
