"""Looks after the jobs held, once a second and on a hint: cancel marks, deadlines, and what operators set."""

import asyncio
import itertools
from collections.abc import Callable, Sequence

import structlog

from worker.errors import cancelled, deadline_exceeded
from worker.job import Job
from worker.job_table import JobTable
from worker.jobs_in_flight import JobsInFlight
from worker.logs import LogLevel
from worker.queue_links import QueueLinks
from worker.streams.connection import Backoff
from worker.streams.errors import ServerError, StreamsError
from worker.streams.health import tell
from worker.streams.queue_config import ProblemLog, QueueConfig, parse_config
from worker.streams.registry import read_config

log = structlog.get_logger(__name__)

WATCH_S = 1.0
# What operators set is looked at this often without a hint, which may be lost with the stream that carries it.
READ_CONFIG_EVERY = 10


class Watch:
    """Ends jobs that are called off or overdue, and passes on what operators set.

    `on_config` is called when there is a reason to look at what waits, and `on_drain` once, when this worker is named
    as one to stop.
    """

    def __init__(
        self,
        table: JobTable,
        jobs: JobsInFlight,
        links: QueueLinks,
        log_level: LogLevel,
        *,
        on_config: Callable[[], None],
        on_drain: Callable[[], None],
    ) -> None:
        self._table = table
        self._jobs = jobs
        self._links = links
        self._log_level = log_level
        self._on_config = on_config
        self._on_drain = on_drain
        self._is_drained = False
        self._own_max_depth = links.oldest.max_depth
        self._problems = ProblemLog(links.keys.config)

    @property
    def config(self) -> QueueConfig:
        """What operators set, as it was last read."""
        return self._links.admission.config

    @property
    def is_paused(self) -> bool:
        """Whether operators stopped the taking of jobs."""
        return self.config.is_paused

    async def watch_jobs(self) -> None:
        """Once a second: deadlines and cancel marks of all jobs held; less often what operators set.

        Runs until cancelled.
        """
        for num_looks in itertools.count(1):
            await asyncio.sleep(WATCH_S)
            if num_looks % READ_CONFIG_EVERY == 0:
                await self.look_at_config()
            now_ms = self._links.clock.now_ms()
            for job in self._table:
                if job.envelope.is_expired(now_ms):
                    self._jobs.end(job, deadline_exceeded("running"))
            await self._check_marks([job for job in self._table if not job.is_over])

    async def follow_control(self) -> None:
        """Hints: look at once at what would be looked at later anyway. Runs until cancelled."""
        backoff = Backoff(1.0)
        is_first = True
        while True:
            try:
                hints = await self._links.control.read()
            except StreamsError as error:
                tell(log, "control_unread", error)
                await backoff.wait()
                continue
            backoff.reset()
            await self._on_cancels({hint.job_id for hint in hints if hint.op == "cancel"})
            if any(hint.op == "reclaim" for hint in hints):
                self._links.source.hint_reclaim()
            # The first read begins at the stream's end, so a hint just before it is not heard.
            if is_first or any(hint.op == "config" for hint in hints):
                await self.look_at_config()
            is_first = False

    async def _on_cancels(self, wanted: set[str]) -> None:
        held = [job for job in self._table if job.envelope.id in wanted]
        await self._check_marks([job for job in held if not job.is_over])
        if elsewhere := wanted - {job.envelope.id for job in held}:
            self._links.oldest.hint_cancel(elsewhere)
            self._on_config()

    async def _check_marks(self, jobs: Sequence[Job]) -> None:
        try:
            marks = await self._links.marks.check([job.envelope.id for job in jobs])
        except StreamsError as error:
            tell(log, "cancel_marks_unread", error)
            return
        for job in jobs:
            if (reason := marks.get(job.envelope.id)) is not None:
                self._jobs.end(job, cancelled(reason, "running"))

    async def look_at_config(self) -> None:
        """Read what operators set and pass it on. Without an answer the last one holds."""
        try:
            fields = await read_config(self._links.commands, self._links.keys)
        except StreamsError as error:
            if not (isinstance(error, ServerError) and error.is_wrong_type):  # the registry names such keys
                tell(log, "queue_config_unread", error)
            return
        config = parse_config(fields)
        self._problems.tell(config)
        if config != self.config:
            log.info("queue_config_changed", **config.changes(self.config))
        self._links.admission.configure(config)
        self._links.oldest.max_depth = self._own_max_depth if config.max_depth is None else config.max_depth
        self._links.source.lanes.use(config.lane_weights)
        self._log_level.set(self._links.keys.queue, config.log_level)
        self._on_config()
        if self._jobs.names.worker_id in config.drained_workers and not self._is_drained:
            self._is_drained = True
            log.info("worker_drained_by_operators")
            self._on_drain()
