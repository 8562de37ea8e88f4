"""One queue that a worker serves, with all that serves it alone: connections, jobs held, intake, watch, registry.

Engine, tokenizer, room for jobs and metrics are the worker's, shared by all its queues.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import structlog

from worker.engine_gate import EngineGate
from worker.engine_supervisor import EngineSupervisor
from worker.intake import Intake, ServedModel
from worker.job import Job
from worker.job_table import JobTable
from worker.jobs_in_flight import JobsInFlight
from worker.logs import LogLevel
from worker.parts import Parts
from worker.queue_links import QueueLinks
from worker.queue_metrics import QueueMetrics
from worker.settings import Settings
from worker.streams.errors import StreamsError
from worker.streams.leases import Entry
from worker.streams.outcomes import persist
from worker.streams.registry import Beat
from worker.trace_recorder import TraceRecorder
from worker.watch import Watch

log = structlog.get_logger(__name__)


class ServedQueue:
    """Owner of one queue's connections, jobs and parts. `on_change` is called when its jobs or its settings changed."""

    def __init__(
        self,
        queue: str,
        settings: Settings,
        url: str,
        worker_id: str,
        parts: Parts,
        metrics: QueueMetrics,
        gate: EngineGate,
        log_level: LogLevel,
        *,
        model: str,
        recorder: TraceRecorder | None,
        on_change: Callable[[], None],
        on_drain: Callable[[], None],
    ) -> None:
        """`model` is the name that replies tell. `on_drain`: operators stop this worker. Nothing connects yet."""
        self.name = queue
        self.metrics = metrics
        self.links = QueueLinks.make(settings, url, worker_id, queue=queue, model=model)
        self.table = JobTable()
        self.jobs = JobsInFlight(
            self.table,
            self.links,
            metrics,
            gate,
            on_room=on_change,
            recorder=recorder,
            stops_unheard=settings.on_client_gone == "stop",
        )
        self.watch = Watch(self.table, self.jobs, self.links, log_level, on_config=on_change, on_drain=on_drain)
        self.links.outcomes.on_released = on_change
        self.links.leases.on_loss = self.jobs.on_loss
        self._max_wait_s = settings.lease_ms / 6000
        self._parts = parts
        self._on_change = on_change
        self._accepting: set[asyncio.Task[None]] = set()
        self._intake: Intake | None = None

    # Start.

    def use_engine(self, engine: EngineSupervisor, served: ServedModel) -> None:
        """Jobs that come are understood with `served`, under the queue's name too, and run by `engine`."""
        self.jobs.engine, self.jobs.names = engine, served.names
        self._intake = Intake(
            self.links,
            self.table,
            replace(served, model_names=served.model_names | {self.name}),
            wait_turn=self.jobs.wait_turn,
            enter_engine=self.jobs.enter_engine,
            on_closed=self.jobs.on_closed,
            on_not_begun=self.metrics.not_begun,
            max_wait_s=self._max_wait_s,
        )

    async def prepare(self) -> None:
        """Connect, learn the server's time, make the groups, read what operators set.

        Waits for a server that is away or can't do it now. Raises ServerError for what lasts.
        """
        links = self.links
        await persist(lambda: links.clock.sync(links.commands), cap_s=self._max_wait_s)
        await persist(links.source.ensure_groups, cap_s=self._max_wait_s)
        await self.watch.look_at_config()

    def start_parts(self, *, beat: Callable[[], Beat]) -> None:
        """Run what serves this queue until it is cancelled; log lines of all of it name the queue."""
        parts: dict[str, Coroutine[Any, Any, None]] = {
            "replies": self.links.replies.run(),
            "settling": self.jobs.settle_closed(),
            "registry": self.links.registry.run(beat),
            "control": self.watch.follow_control(),
            "watch": self.watch.watch_jobs(),
        }
        with structlog.contextvars.bound_contextvars(queue=self.name):
            for name, part in parts.items():
                self._parts.spawn(f"{name} of {self.name}", part)

    # Jobs.

    @property
    def num_held(self) -> int:
        """Jobs that are taken and not settled."""
        return len(self.links.leases)

    @property
    def is_paused(self) -> bool:
        """Whether operators stopped the taking of jobs."""
        return self.watch.is_paused

    def accept(self, entry: Entry) -> None:
        """Take an entry in, by a task of its own. The engine must be there."""
        assert self._intake is not None, f"queue {self.name}: an entry came before the engine"
        with structlog.contextvars.bound_contextvars(queue=self.name):
            task = self._parts.spawn(f"accept {self.name}/{entry.lane}/{entry.entry_id}", self._intake.accept(entry))
        self._accepting.add(task)
        task.add_done_callback(self._accepted)

    def _accepted(self, task: "asyncio.Task[None]") -> None:
        self._accepting.discard(task)
        self._on_change()  # a duplicate has left by now

    # End.

    async def hand_over_all(self) -> None:
        """Give every job to a peer that isn't settled, and whose end can't be written; those that are just coming are
        taken in first.
        """
        if self._accepting:
            await asyncio.wait(self._accepting)
        with structlog.contextvars.bound_contextvars(queue=self.name):
            # All at once: what waits to be written holds up no other.
            await asyncio.gather(*(self._hand_over(job) for job in self.table))

    async def _hand_over(self, job: Job) -> None:
        """Give a job to a peer; where that fails, its lease runs out, and the others are handed over all the same."""
        try:
            await self.jobs.hand_over(job)
        except StreamsError as error:
            log.error("hand_over_failed", **job.log_ids, error=str(error))
            self.links.leases.forget(job.entry)

    async def close(self) -> None:
        """Close the connections."""
        await self.links.close()
