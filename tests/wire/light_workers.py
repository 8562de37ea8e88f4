"""Workers whose jobs a test runs: everything of the real worker but its engine, several queues included."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

from worker.engine_gate import EngineGate
from worker.job_taking import JobTaking
from worker.logs import LogLevel
from worker.metrics import WorkerMetrics
from worker.parts import Parts
from worker.queue_metrics import QueueMetrics
from worker.served_queue import ServedQueue
from worker.settings import Settings, load_settings
from worker.streams.lease_keeper import LeaseKeeper
from worker.streams.leases import Entry

Work = Callable[["LightWorker", str, Entry], Awaitable[None]]
"""Runs a job of a queue by its name; afterwards it is settled."""


class LightQueue(ServedQueue):
    """A queue that gives its entries to the worker's own work."""

    def __init__(self, queue: str, worker: "LightWorker", settings: Settings, url: str, metrics: QueueMetrics) -> None:
        super().__init__(
            *(queue, settings, url, worker.name, worker.parts, metrics, worker.gate, LogLevel()),
            model="light",
            recorder=None,
            on_change=worker.changed.set,
            on_drain=worker.changed.set,
        )
        self._worker = worker

    def accept(self, entry: Entry) -> None:
        self._worker.started.append((self.name, entry))
        self._worker.parts.spawn(f"work {entry.entry_id}", self._work(entry))

    async def _work(self, entry: Entry) -> None:
        await self._worker.work(self._worker, self.name, entry)
        await self.links.outcomes.drop(entry)
        self._worker.num_done += 1
        self._worker.changed.set()


class LightWorker:
    """Takes jobs of `queues` with so many seats while it is entered. `started` has all that it was ever given."""

    def __init__(
        self, url: str, queues: Sequence[str], work: Work, *, num_seats: int, lease_ms: int = 30_000, name: str = "w"
    ) -> None:
        settings = load_settings({"redis_url": url, "queue": ",".join(queues), "lease_ms": str(lease_ms)})
        self.name = name
        self.work = work
        self.started: list[tuple[str, Entry]] = []
        self.num_done = 0
        self.changed = asyncio.Event()
        self._stop = asyncio.Event()
        self.parts = Parts(self.changed.set)
        metrics = WorkerMetrics(worker_id=name, queues=queues, model="light", version="0")
        self.gate = EngineGate(metrics)
        self.queues = [LightQueue(queue, self, settings, url, metrics.of_queue(queue)) for queue in queues]
        self._taking = JobTaking(self.queues, self.parts, self.changed, num_seats=lambda: num_seats, lease_ms=lease_ms)

    @property
    def num_held(self) -> int:
        """Jobs of all queues that it has and has not settled."""
        return sum(queue.num_held for queue in self.queues)

    async def __aenter__(self) -> Self:
        for queue in self.queues:
            await queue.prepare()
            queue.start_parts(beat=lambda: {"model": "light"})
        held = [(queue.links.leases, queue.links.leasing) for queue in self.queues]
        self.parts.spawn("leases", LeaseKeeper(held).run())
        self._running = self.parts.spawn("taking", self._taking.run(self._stop))
        return self

    async def stop_taking(self) -> None:
        """Take no more jobs, as at the beginning of a shutdown."""
        self._stop.set()
        self.changed.set()
        await self._running

    async def __aexit__(self, *_: object) -> None:
        await self.parts.end()
        for queue in self.queues:
            await queue.close()
        if self.parts.failure is not None:
            raise self.parts.failure


async def at_once(_worker: LightWorker, _queue: str, _entry: Entry) -> None:
    """Work that is done as soon as it begins."""
