"""What waits in the lanes, as one worker knows it: whose it is, and until when it may wait.

    never read  ───── read by a worker, which runs it
                  └── read and put back ──► a lot: the tenant has to wait, or somebody else came first
                                        └─► handed over: its worker stopped

A group read reaches only the head of a lane. To reach an entry further back, those before it are read as well and put
into lots: the consumer group's pending list keeps them, in order and by tenant, so there is no other list that could
disagree with it, and when all workers die it is one like any other that nobody renews.
"""

import itertools
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from worker.protocol_envelope import waiting_limits
from worker.streams.clock import ServerClock
from worker.streams.jobs import entry_of
from worker.streams.keys import HANDOVER, LANES
from worker.streams.leases import Entry
from worker.streams.scripts import LaneView, Lot, Scripts

# Entries looked at in one call, each with all its fields inside the server.
PAGE = 64
# How far one look goes in any case, how long it may page on beyond that, in seconds, and how many entries of a lane are
# known at most.
MIN_PAGES = 16
LOOK_S = 0.02
MAX_KNOWN = 20_000


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """An entry that no worker has. `order` is what its lane is sorted by; `lot`: its tenant's, or `handover`.

    `deadline_ms` is by the server's clock, None where there is no limit.
    """

    entry_id: str
    order: tuple[int, int]
    lot: str
    job_id: str
    deadline_ms: int | None


class LaneBacklog:
    """What is known of one lane. `length` counts its entries, also those that run; `lots` are those that hold any."""

    def __init__(self) -> None:
        self.length = 0
        self.lots: tuple[Lot, ...] = ()
        self.cursors: dict[str, str] = {}
        self._seen: dict[str, set[str]] = {}
        self._unread: dict[str, deque[WaitingJob]] = {}
        self._aside: dict[str, WaitingJob] = {}
        self._delivered = (0, 0)
        self._last_id = ""

    @property
    def after(self) -> str:
        """The id after which to look for more; "" where nothing unread is known."""
        return self._last_id if self._unread else ""

    @property
    def num_unread(self) -> int:
        """Entries known that nobody has read."""
        return sum(map(len, self._unread.values()))

    @property
    def num_known(self) -> int:
        """Entries known."""
        return self.num_unread + len(self._aside)

    def waiting(self) -> list[WaitingJob]:
        """Everything that is known to wait, the oldest first."""
        jobs = [*self._aside.values(), *(job for jobs in self._unread.values() for job in jobs)]
        return sorted(jobs, key=attrgetter("order"))

    def oldest_by_lot(self) -> dict[str, str]:
        """The oldest waiting entry of each tenant: what lies in its lot was sent before what nobody has read."""
        oldest = {lot: jobs[0].entry_id for lot, jobs in self._unread.items()}
        return oldest | {lot.name: lot.oldest_id for lot in self.lots}

    def update(self, view: LaneView, jobs: Iterable[WaitingJob]) -> None:
        """Take in a look: `jobs` are those of the view."""
        delivered = order_of(view.last_delivered_id)
        if delivered < self._delivered:  # the group was lost and made anew: the next look begins at its beginning
            self.clear()
            jobs = ()
        self.length, self.lots, self._delivered = view.length, view.lots, delivered
        self._pop_unread(delivered)
        last = order_of(self._last_id) if self._unread else delivered
        for job in jobs:
            if job.order > last:
                self._unread.setdefault(job.lot, deque()).append(job)
                self._last_id = job.entry_id

    def put_aside(self, jobs: Iterable[WaitingJob]) -> None:
        """These wait in lots, or handed over."""
        self._aside.update({job.entry_id: job for job in jobs})

    def passed(self, entry_id: str) -> None:
        """This entry was reached, so everything unread before it is in a lot."""
        self.put_aside(self._pop_unread(order_of(entry_id)))

    def forget(self, entry_id: str) -> None:
        """It waits no longer."""
        if self._aside.pop(entry_id, None) is not None:
            return
        for lot, jobs in list(self._unread.items()):
            self._unread[lot] = deque(job for job in jobs if job.entry_id != entry_id)
            if not self._unread[lot]:
                del self._unread[lot]

    def seen_aside(self, name: str, jobs: list[WaitingJob], is_last: bool) -> None:
        """A page of what waits under `name`. After the last page, whatever was on none of them waits no longer."""
        self.put_aside(jobs)
        seen = self._seen.setdefault(name, set())
        seen.update(job.entry_id for job in jobs)
        if not is_last:
            self.cursors[name] = jobs[-1].entry_id
            return
        self._forget_scan(name)
        gone = [job for job in self._aside.values() if job.lot == name and job.entry_id not in seen]
        for job in gone:
            del self._aside[job.entry_id]

    def prune(self) -> None:
        """Forget what others have taken out of the lots meanwhile: they take the oldest."""
        oldest = {lot.name: order_of(lot.oldest_id) for lot in self.lots}
        gone = [
            entry_id
            for entry_id, job in self._aside.items()
            if job.lot != HANDOVER and not (job.lot in oldest and job.order >= oldest[job.lot])
        ]
        for entry_id in gone:
            del self._aside[entry_id]
        for name in [name for name in self.cursors if name != HANDOVER and name not in oldest]:
            self._forget_scan(name)

    def _forget_scan(self, name: str) -> None:
        """There may be very many tenants, of each of which nothing stays here."""
        self.cursors.pop(name, None)
        self._seen.pop(name, None)

    def clear(self) -> None:
        """Nothing is known."""
        self._unread.clear()
        self._aside.clear()
        self.cursors.clear()
        self._seen.clear()
        self.length, self.lots, self._delivered, self._last_id = 0, (), (0, 0), ""

    def _pop_unread(self, last: tuple[int, int]) -> list[WaitingJob]:
        popped: list[WaitingJob] = []
        for lot, jobs in list(self._unread.items()):
            while jobs and jobs[0].order <= last:
                popped.append(jobs.popleft())
            if not jobs:
                del self._unread[lot]
        return popped


class Backlog:
    """Looks at the lanes. One task at a time may call it; all raise StreamsError."""

    def __init__(self, scripts: Scripts, clock: ServerClock, touch_ms: int = 10_000) -> None:
        """`touch_ms` lies well below a lease."""
        self._scripts = scripts
        self._clock = clock
        self._touch_ms = touch_ms
        self._lanes = {lane: LaneBacklog() for lane in LANES}

    async def look(self, lane: str) -> LaneBacklog | None:
        """The lane as it is now; None where there is no such group, so that a plain read finds out why."""
        known = self._lanes[lane]
        until = time.monotonic() + LOOK_S
        for num_pages in itertools.count(1):
            view = await self._scripts.look_ahead(lane, known.after, max_entries=PAGE, touch_ms=self._touch_ms)
            if view is None:
                known.clear()
                return None
            is_full = known.num_known >= MAX_KNOWN
            known.update(view, [] if is_full else [self._job(lane, *entry) for entry in view.entries])
            if is_full or not view.has_more or (num_pages >= MIN_PAGES and time.monotonic() > until):
                break
        return known

    async def look_aside(self, lane: str) -> None:
        """Learn of what other workers put back: a page of each lot, and of what was handed over, goes on each time."""
        known = self._lanes[lane]
        known.prune()
        for name in [HANDOVER, *(lot.name for lot in known.lots)]:
            if known.num_known >= MAX_KNOWN and name != HANDOVER:
                return
            after = known.cursors.get(name, "0-0")
            page = await self._scripts.look_aside(lane, name, after, max_entries=PAGE)
            jobs = [self._job(lane, entry_id, name, flat) for entry_id, flat in page]
            known.seen_aside(name, jobs, is_last=len(page) < PAGE)

    async def take(self, lane: str, entry_id: str) -> Entry | None:
        """Take one entry, wherever it waits; None where it is gone."""
        answer = await self._scripts.take_waiting(lane, entry_id)
        if answer is not None:
            self._lanes[lane].passed(entry_id)
        self._lanes[lane].forget(entry_id)
        return None if answer is None else entry_of(lane, entry_id, *answer)

    async def take_lot(self, lane: str, lot: str, num_entries: int) -> list[Entry]:
        """Take the oldest entries of a lot."""
        entries = [entry_of(lane, *found) for found in await self._scripts.take_lot(lane, lot, num_entries)]
        for entry in entries:
            self._lanes[lane].forget(entry.entry_id)
        return entries

    async def set_aside(self, lane: str) -> None:
        """Put all unread entries that are known into lots."""
        known = self._lanes[lane]
        if entry_id := known.after:
            await self._scripts.set_aside(lane, entry_id)
            known.passed(entry_id)

    def _job(self, lane: str, entry_id: str, lot: str, flat: list[bytes]) -> WaitingJob:
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        job_id, deadline_ms = waiting_limits(lane, entry_id, fields, self._clock.now_ms())
        return WaitingJob(entry_id, order_of(entry_id), lot, job_id, deadline_ms)


def order_of(entry_id: str) -> tuple[int, int]:
    """What entries of one lane are sorted by."""
    ms, _, seq = entry_id.partition("-")
    return int(ms), int(seq)
