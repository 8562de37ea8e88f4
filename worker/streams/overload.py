"""Waiting jobs that nobody needs to run: overdue, called off, or too many. They are taken only to be ended."""

import math
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from worker.errors import ErrorCode
from worker.streams.backlog import Backlog, LaneBacklog, WaitingJob
from worker.streams.clock import ServerClock
from worker.streams.connection import Link
from worker.streams.keys import HANDOVER, LANES, QueueKeys
from worker.streams.leases import Entry, Leases
from worker.streams.scripts import Scripts
from worker.streams.service_rate import ServiceRate

# Entries of a lane that one look takes at most: each is opened and ended beside what runs.
MAX_ENDED_PER_LOOK = 64
# Cancel marks of waiting jobs that are asked for in one look without a hint; the next look goes on behind them.
MAX_MARKS_PER_LOOK = 200
# How often to look without a reason, in seconds.
LOOK_S = 1.0


class OldestWatch:
    """Looks through what waits, in lots and handed over too, and takes what is to end unrun, the oldest first.

    Where a lane is longer than `max_depth` (0: never) the oldest are shed: their clients have waited longest, and are
    the likeliest to have left. Each of the queue's workers sheds its share of what is too much.
    """

    def __init__(
        self,
        link: Link,
        scripts: Scripts,
        keys: QueueKeys,
        clock: ServerClock,
        leases: Leases,
        max_depth: int = 0,
        touch_ms: int = 10_000,
    ) -> None:
        self._link = link
        self._keys = keys
        self._clock = clock
        self._leases = leases
        self._hinted: dict[str, set[str]] = {lane: set() for lane in LANES}
        self._next_mark = dict.fromkeys(LANES, 0)
        self._looked_at = dict.fromkeys(LANES, 0.0)
        self._has_more = False
        self.backlog = Backlog(scripts, clock, touch_ms)
        self.rate = ServiceRate()
        self.depths = dict.fromkeys(LANES, 0)
        self.max_depth = max_depth

    def hint_cancel(self, job_ids: Collection[str]) -> None:
        """These jobs, not held here, may have been called off: ask for their marks at the next look."""
        for hinted in self._hinted.values():
            hinted.update(job_ids)

    @property
    def is_due(self) -> bool:
        """Whether there is a reason to look at once: a hint, more to end than the last look took, or its time."""
        is_time = time.monotonic() - min(self._looked_at.values()) >= LOOK_S
        return is_time or self._has_more or any(self._hinted.values())

    async def look(self) -> list[Entry]:
        """Entries with `must_end` set, under lease. Call it once a second, and on a hint. Raises StreamsError."""
        entries: list[Entry] = []
        self._has_more = False
        for lane in LANES:
            known = await self.backlog.look(lane)
            self._looked_at[lane] = time.monotonic()
            if known is None:
                self._hinted[lane].clear()
            else:
                entries += await self._look_at(lane, known, may_shed=lambda lot: lot != HANDOVER)
        return self._leases.hold_new(entries)

    async def look_if_due(self, lane: str, known: LaneBacklog, must_wait: Callable[[str], bool]) -> list[Entry]:
        """The same for a worker that has room: only lots that have to wait are shed."""
        if not known.lots:
            self._hinted[lane].clear()
            return []
        if not self._hinted[lane] and time.monotonic() - self._looked_at[lane] < LOOK_S:
            return []
        self._looked_at[lane] = time.monotonic()
        return self._leases.hold_new(await self._look_at(lane, known, may_shed=must_wait))

    async def _look_at(self, lane: str, known: LaneBacklog, *, may_shed: Callable[[str], bool]) -> list[Entry]:
        """What was handed over was begun, so it is never shed."""
        await self.backlog.look_aside(lane)
        self.depths[lane] = known.length
        # Those that are ending are in the lane until they are settled.
        num_ending = sum(entry.lane == lane and entry.must_end is not None for entry in self._leases.entries())
        num_over = known.length - num_ending - self.max_depth if self.max_depth else 0
        if num_over > 0:
            await self._count_workers()
            # Peers look at the same time, and what they end is in the lane until it is settled: each ends its share.
            num_over = math.ceil(num_over / self.rate.num_workers)
        jobs = known.waiting()
        marked = await self._marked(lane, jobs)
        now_ms = self._clock.now_ms()
        entries: list[Entry] = []
        for job in jobs:
            if len(entries) == MAX_ENDED_PER_LOOK:
                self._has_more = True
                break
            if job.deadline_ms is not None and now_ms >= job.deadline_ms:
                why = ErrorCode.DEADLINE_EXCEEDED
            elif job.job_id in marked:
                why = ErrorCode.CANCELLED
            elif len(entries) < num_over and may_shed(job.lot):
                why = ErrorCode.OVERLOADED
            else:
                continue
            entry = await self.backlog.take(lane, job.entry_id)
            if entry is not None:
                entries.append(replace(entry, must_end=why))
        return entries

    async def _count_workers(self) -> None:
        (names,) = await self._link.batch([("ZRANGE", self._keys.workers, 0, -1)])
        if isinstance(names, list):
            self.rate.num_workers = max(1, len(names))

    async def _marked(self, lane: str, jobs: list[WaitingJob]) -> set[str]:
        """Those of `jobs` that were called off, of a part of them: the hinted ones, and some more in turn."""
        hinted, self._hinted[lane] = self._hinted[lane], set()
        start = self._next_mark[lane] if self._next_mark[lane] < len(jobs) else 0
        some = jobs[start : start + MAX_MARKS_PER_LOOK]
        self._next_mark[lane] = start + len(some)
        asked = {job.job_id for job in some} | {job.job_id for job in jobs if job.job_id in hinted}
        if not asked:
            return set()
        ids = list(asked)
        answers = await self._link.batch([("EXISTS", self._keys.cancel(job_id)) for job_id in ids])
        return {job_id for job_id, answer in zip(ids, answers, strict=True) if answer == 1}
