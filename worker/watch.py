"""Looks after the jobs held, once a second and on a hint: cancel marks, deadlines, and what operators set."""

import asyncio
import itertools
from collections.abc import Callable, Sequence

import structlog

from worker.errors import cancelled, deadline_exceeded
from worker.job import Job
from worker.job_table import JobTable
from worker.jobs_in_flight import JobsInFlight
from worker.queue_links import QueueLinks
from worker.streams.connection import Backoff
from worker.streams.errors import ServerError, StreamsError
from worker.streams.health import tell
from worker.streams.registry import read_config

log = structlog.get_logger(__name__)

WATCH_S = 1.0
# What operators set is looked at this often without a hint, which may be lost with the stream that carries it.
READ_CONFIG_EVERY = 10


class Watch:
    """Ends jobs that are called off or overdue. `is_paused` says whether operators stopped the taking of jobs."""

    def __init__(self, table: JobTable, jobs: JobsInFlight, links: QueueLinks, on_config: Callable[[], None]) -> None:
        self._table = table
        self._jobs = jobs
        self._links = links
        self._on_config = on_config
        self.is_paused = False

    async def watch_jobs(self) -> None:
        """Once a second: deadlines and cancel marks of all jobs held; less often what operators set.

        Runs until cancelled.
        """
        for num_looks in itertools.count(1):
            await asyncio.sleep(WATCH_S)
            if num_looks % READ_CONFIG_EVERY == 0:
                await self._read_config()
            now_ms = self._links.clock.now_ms()
            for job in self._table:
                if job.envelope.is_expired(now_ms):
                    self._jobs.end(job, deadline_exceeded("running"))
            await self._check_marks([job for job in self._table if not job.is_over])

    async def follow_control(self) -> None:
        """Hints: look at once at what would be looked at later anyway. Runs until cancelled."""
        backoff = Backoff(1.0)
        await self._read_config()
        while True:
            try:
                hints = await self._links.control.read()
            except StreamsError as error:
                tell(log, "control_unread", error)
                await backoff.wait()
                continue
            backoff.reset()
            wanted = {hint.job_id for hint in hints if hint.op == "cancel"}
            await self._check_marks([job for job in self._table if job.envelope.id in wanted and not job.is_over])
            if any(hint.op == "reclaim" for hint in hints):
                self._links.source.hint_reclaim()
            if any(hint.op == "config" for hint in hints):
                await self._read_config()

    async def _check_marks(self, jobs: Sequence[Job]) -> None:
        try:
            marks = await self._links.marks.check([job.envelope.id for job in jobs])
        except StreamsError as error:
            tell(log, "cancel_marks_unread", error)
            return
        for job in jobs:
            if (reason := marks.get(job.envelope.id)) is not None:
                self._jobs.end(job, cancelled(reason, "running"))

    async def _read_config(self) -> None:
        """`paused` stops the taking of jobs; `max_depth` sheds a longer lane's oldest job; `lane_weights` shares."""
        try:
            config = await read_config(self._links.commands, self._links.keys)
        except StreamsError as error:
            if not (isinstance(error, ServerError) and error.is_wrong_type):  # the registry names such keys
                tell(log, "queue_config_unread", error)
            return
        self.is_paused = config.get("paused", "0") not in ("", "0")
        depth = config.get("max_depth", "0")
        self._links.oldest.max_depth = int(depth) if depth.isascii() and depth.isdecimal() and len(depth) < 19 else 0
        self._links.source.lanes.apply(config)
        self._on_config()
