"""What a worker without room still does: it ends jobs that nobody needs to run."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from worker.errors import ErrorCode
from worker.protocol_envelope import JobEnvelope
from worker.streams.clock import ServerClock
from worker.streams.connection import Link
from worker.streams.jobs import entry_of
from worker.streams.keys import LANES, QueueKeys
from worker.streams.leases import Entry, Leases
from worker.streams.scripts import Scripts

EnvelopeParser = Callable[[Entry, int], JobEnvelope]


@dataclass(frozen=True, slots=True)
class _Head:
    """The oldest undelivered entry of a lane, as it was last seen."""

    entry_id: str
    job_id: str
    deadline_ms: int | None


class OldestWatch:
    """Looks at the oldest undelivered entry of each lane and takes it if it is to end unrun.

    A group read reaches only the head of a lane, so the oldest is what is shed when a lane is longer than
    `max_depth` (0: never). `parse` makes an envelope of an entry and the time.
    """

    def __init__(
        self,
        link: Link,
        scripts: Scripts,
        keys: QueueKeys,
        clock: ServerClock,
        leases: Leases,
        parse: EnvelopeParser,
        max_depth: int = 0,
    ) -> None:
        self._link = link
        self._scripts = scripts
        self._keys = keys
        self._clock = clock
        self._leases = leases
        self._parse = parse
        self._heads: dict[str, _Head] = {}
        self.max_depth = max_depth

    async def look(self) -> list[Entry]:
        """At most one entry per lane, with `must_end` set, under lease. Call it once a second. Raises StreamsError."""
        entries: list[Entry] = []
        for lane in LANES:
            known = self._heads.get(lane)
            length, entry_id, flat = await self._scripts.peek_oldest(lane, known.entry_id if known else "")
            if entry_id is None:
                self._heads.pop(lane, None)
                continue
            if flat is not None:
                envelope = self._parse(entry_of(lane, entry_id, flat), self._clock.now_ms())
                known = self._heads[lane] = _Head(entry_id, envelope.id, envelope.deadline_ms)
            if known is not None and (why := await self._why_end(known, length)) is not None:
                entries += await self._take(lane, entry_id, why)
        return self._leases.hold_new(entries)

    async def _why_end(self, head: _Head, length: int) -> ErrorCode | None:
        if head.deadline_ms is not None and self._clock.now_ms() >= head.deadline_ms:
            return ErrorCode.DEADLINE_EXCEEDED
        if await self._link.call("EXISTS", self._keys.cancel(head.job_id)):
            return ErrorCode.CANCELLED
        if self.max_depth and length > self.max_depth:
            return ErrorCode.OVERLOADED
        return None

    async def _take(self, lane: str, entry_id: str, why: ErrorCode) -> list[Entry]:
        flat = await self._scripts.take_oldest(lane, entry_id)
        if flat is None:
            return []
        return [replace(entry_of(lane, entry_id, flat), must_end=why)]
