"""Clients of one queue, by the client that ships with Pagemill, behind the proxy: they send, follow and record."""

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

from tests.faults.history import Event, History, What
from tests.faults.workload import Job
from worker.client import AsyncClient
from worker.client_errors import ReplyBrokenError
from worker.streams.connection import Link
from worker.streams.keys import QueueKeys

# Longer than any outage of a run.
PATIENCE_S = 300.0
# Share of jobs that a second client follows, which comes later.
SECOND_READERS = 0.3
MAX_LATE_S = 3.0
# Clients that wait at the same time: each has a connection, and a backlog of more proves nothing.
MAX_WAITING = 150


class Clients:
    """Sends all jobs within a time and follows each to its end. `url` leads through the proxy."""

    def __init__(self, url: str, queue: str, history: History, rng: random.Random) -> None:
        self._history = history
        self._rng = rng
        self._keys = QueueKeys(queue)
        self._senders = [AsyncClient(url, queue, retry_s=PATIENCE_S) for _ in range(4)]
        self._jobs: dict[str, Job] = {}
        # Ids of jobs that the server has acknowledged and not forgotten since.
        self._known: set[str] = set()
        self._num_waiting: Counter[str] = Counter()
        self._tasks: list[asyncio.Task[None]] = []

    async def send_all(self, jobs: Sequence[Job], seconds: float) -> None:
        """Send the jobs in random bursts spread over `seconds`, or slower; their replies are followed meanwhile."""
        moments = sorted(self._rng.uniform(0, seconds) for _ in jobs)
        started = asyncio.get_running_loop().time()
        sending = []
        for job, moment in zip(jobs, moments, strict=True):
            await asyncio.sleep(max(0.0, started + moment - asyncio.get_running_loop().time()))
            while self._num_waiting.total() >= MAX_WAITING:  # noqa: ASYNC110 - any of them may be the next to end
                await asyncio.sleep(0.05)
            sending.append(asyncio.create_task(self._send(job)))
        await asyncio.gather(*sending)

    async def finish(self) -> None:
        """Wait until every client has what it waits for."""
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        """Give up whatever is still waited for, and close the connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for sender in self._senders:
            await sender.aclose()

    async def send_forgotten(self, server: Link) -> None:
        """After the server was lost: record what it knows nothing of, and send again what a client waits for.

        `server` leads there without the proxy.
        """
        unseen = set(self._known)
        # First the lanes, then the records: a job that leaves its lane in between has a record by then.
        for lane in self._keys.lanes:
            for _, flat in await server.call("XRANGE", lane, "-", "+"):
                fields = dict(zip(flat[::2], flat[1::2], strict=True))
                unseen.discard(fields[b"id"].decode())
        for job_id in sorted(unseen):
            if not await server.call("EXISTS", self._keys.state(job_id), self._keys.reply(job_id)):
                self._history.add(What.VANISHED, job_id)
                self._known.discard(job_id)
                if self._num_waiting[job_id]:
                    self._start(self._submit(self._jobs[job_id]))

    async def _send(self, job: Job) -> None:
        self._jobs[job.job_id] = job
        await self._submit(job)
        self._start(self._follow(job.job_id, "the follower"))
        if self._rng.random() < SECOND_READERS:
            self._start(self._follow(job.job_id, "a second reader", self._rng.uniform(0, MAX_LATE_S)))
        if job.cancel_after_s is not None:
            await asyncio.sleep(job.cancel_after_s)
            self._history.add(What.CANCELLED, job.job_id)
            await self._rng.choice(self._senders).cancel(job.job_id)

    async def _submit(self, job: Job) -> None:
        sender = self._rng.choice(self._senders)
        await sender.submit(job.prompt, job_id=job.job_id, lane=job.lane, **job.fields)
        self._history.add(What.ACKED, job.job_id)
        self._known.add(job.job_id)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    async def _follow(self, job_id: str, client: str, wait_s: float = 0.0) -> None:
        self._num_waiting[job_id] += 1
        await asyncio.sleep(wait_s)
        try:
            async for event in self._senders[0].stream(job_id):
                if event.kind == "reset" and event.fields.get("why") == "reread":
                    self._history.add(What.REREAD, job_id, client)
                else:
                    self._history.add(What.SAW, job_id, client, Event(event.id, dict(event.fields)))
        except ReplyBrokenError:
            self._history.add(What.BROKEN, job_id, client)
        self._num_waiting[job_id] -= 1
