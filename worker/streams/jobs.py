"""Taking work: new entries by weighted lanes, entries of dead peers, entries whose delivery was lost."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from worker.lane_weights import LaneWeights
from worker.streams.connection import BLOCK_MS, Link
from worker.streams.errors import ServerError
from worker.streams.keys import GROUP, LANES, QueueKeys
from worker.streams.lanes import LaneChoice
from worker.streams.leases import Entry, Leases

log = structlog.get_logger(__name__)

# A burst spreads over the workers only if none of them takes it in one bite.
MAX_ENTRIES_PER_READ = 8
RECONCILE_EVERY_S = 30.0
# Bounds of the time between two looks for entries of dead peers.
MIN_SCAN_MS = 100
MAX_SCAN_MS = 5_000


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """How work is taken. A read waits up to `block_ms` where there is nothing."""

    lease_ms: int = 30_000
    block_ms: int = BLOCK_MS
    lane_weights: LaneWeights = (8, 4, 1)

    @property
    def scan_ms(self) -> int:
        """The longest time between two looks for entries of dead peers: a quarter of a lease, within bounds.

        So what a dead peer held is taken over within a lease and a quarter, and within 5 s after a long lease.
        """
        return min(MAX_SCAN_MS, max(MIN_SCAN_MS, self.lease_ms // 4))


class Picker(Protocol):
    """Knows which entries of a lane to take, where it isn't simply the oldest."""

    @property
    def max_block_ms(self) -> int | None:
        """How long a blocking read may take now; None: as long as it likes."""
        ...

    async def pick(self, lane: str, room: int) -> list[Entry] | None:
        """At most `room` entries, or such as only have to end, under lease; None: read the lane's head.

        Raises StreamsError.
        """
        ...


@dataclass(slots=True)
class SourceStats:
    """Counters for metrics; they only grow."""

    num_read: int = 0
    num_reclaimed: int = 0
    num_lost_trimmed: int = 0


@dataclass(slots=True)
class _Timers:
    """When to do what next, in seconds of the monotonic clock."""

    next_scan: float = 0.0
    quiet_until: float = 0.0
    next_reconcile: float = 0.0
    cursors: dict[str, str] = field(default_factory=lambda: dict.fromkeys(LANES, "0-0"))


class JobSource:
    """Takes entries for one consumer over one link of its own, since it blocks.

    Every entry is under the care of `leases` before it is returned. One task at a time may call the methods.
    All raise ConnectionLostError or ServerError; call again after a back-off of less than a sixth of a lease.
    """

    def __init__(self, link: Link, keys: QueueKeys, consumer: str, leases: Leases, options: SourceOptions) -> None:
        self._link = link
        self._keys = keys
        self._consumer = consumer
        self._leases = leases
        self._options = options
        self._timers = _Timers(next_reconcile=time.monotonic() + RECONCILE_EVERY_S)
        self._generation = 0
        self._blocked: set[str] = set()
        self.lanes = LaneChoice(options.lane_weights)
        self.picker: Picker | None = None
        self.stats = SourceStats()

    async def ensure_groups(self) -> None:
        """Makes the consumer group of each lane where it is missing. It starts at 0: settled entries are gone.

        A lane whose key holds something else is left alone, here as in all that follows: the others go on.
        """
        commands = [("XGROUP", "CREATE", key, GROUP, "0", "MKSTREAM") for key in self._keys.lanes]
        for answer in await self._link.batch(commands):
            if isinstance(answer, ServerError) and not (answer.code == "BUSYGROUP" or answer.is_wrong_type):
                raise answer

    def hint_reclaim(self) -> None:
        """A peer handed something over: look at once (but for the quiet time after a connect)."""
        self._timers.next_scan = 0.0

    def leave_to_peers(self) -> None:
        """This worker has let jobs go: it takes none of them back before every peer has had the time to look."""
        until = time.monotonic() + self._options.scan_ms / 1000
        self._timers.quiet_until = max(self._timers.quiet_until, until)

    def doubt(self) -> None:
        """The answer to a read was lost, and maybe what it brought: look for that as soon as it can't be on its way any
        more, which is well before its lease ends.
        """
        shows_s = time.monotonic() + self._options.lease_ms / 3000
        self._timers.next_reconcile = min(self._timers.next_reconcile, shows_s)

    async def take(self, room: int) -> list[Entry]:
        """Entries for a worker with `room` (at least 1) free places; waits up to `block_ms` if there are none."""
        return await self.take_at_once(room) or await self.wait(self._options.block_ms)

    async def take_at_once(self, room: int) -> list[Entry]:
        """What is there now, for a worker with `room` (at least 1) free places: at most that, and at most 8.

        What dead peers held goes first.
        """

        async def read() -> list[Entry]:
            return await self._overdue(room) or await self._read_lanes(room)

        return await self._with_groups(read)

    async def wait(self, block_ms: int = BLOCK_MS) -> list[Entry]:
        """The first entries to come within `block_ms`: one per lane, so it can be more than the room there is. Those
        wait in the caller's buffer.
        """
        return await self._with_groups(lambda: self._read_blocking(block_ms))

    @property
    def must_look(self) -> bool:
        """Whether only `take_at_once` may find something, though it has found nothing just now: a scan is due, the
        connection is another, tenants have to wait, or a lane that held something else may have been put right.
        """
        timers, now = self._timers, time.monotonic()
        is_connected = self._link.is_up and self._link.generation == self._generation
        is_due = now >= min(max(timers.next_scan, timers.quiet_until), timers.next_reconcile)
        is_waited_for = self.picker is not None and self.picker.max_block_ms is not None
        return is_due or not is_connected or is_waited_for or bool(self._blocked)

    async def _with_groups(self, read: Callable[[], Awaitable[list[Entry]]]) -> list[Entry]:
        try:
            return await read()
        except ServerError as error:
            if error.code != "NOGROUP":
                raise
            log.warning("consumer_group_missing", queue=self._keys.queue)
            await self.ensure_groups()
            return []

    async def reclaim(self, room: int) -> list[Entry]:
        """Up to `room` (and 8) entries whose lease ran out. The scan goes on where it stopped, lane by lane."""
        entries: list[Entry] = []
        room = min(room, MAX_ENTRIES_PER_READ)
        for lane in LANES:
            while len(entries) < room:
                cursor, found = await self._auto_claim(lane, self._timers.cursors[lane], room - len(entries))
                self._timers.cursors[lane] = cursor
                entries += found
                if cursor == "0-0":
                    break
        is_through = len(entries) < room
        wait_s = self._options.scan_ms / 1000 * random.uniform(0.5, 1.0) if is_through else 0.0
        self._timers.next_scan = time.monotonic() + wait_s
        entries = self._leases.hold_new(entries)
        self.stats.num_reclaimed += len(entries)
        return entries

    async def take_up(self) -> list[Entry]:
        """What was delivered to this worker and never arrived, if it is time to look for it. It needs no room: nobody
        else is given it before its lease ends.
        """

        async def look() -> list[Entry]:
            if await self._is_new_connection() or time.monotonic() < self._timers.next_reconcile:
                return []
            return await self.reconcile()

        return await self._with_groups(look)

    async def reconcile(self, min_idle_ms: int | None = None) -> list[Entry]:
        """Entries pending under our name that we don't hold: the answer to their delivery was lost.

        Only those idle for a third of a lease, since an answer may still be on its way.
        """
        if min_idle_ms is None:
            min_idle_ms = self._options.lease_ms // 3
        entries: list[Entry] = []
        for lane in LANES:
            for entry_id, idle_ms, deliveries in await self._pending(lane):
                if idle_ms >= min_idle_ms and not self._leases.is_held((lane, entry_id)):
                    entries += await self._fetch(lane, entry_id, deliveries)
        self._timers.next_reconcile = time.monotonic() + RECONCILE_EVERY_S
        return self._leases.hold_new(entries)

    async def _overdue(self, room: int) -> list[Entry]:
        """The scans whose time has come."""
        if await self._is_new_connection():
            return []
        now = time.monotonic()
        entries: list[Entry] = []
        if now >= max(self._timers.next_scan, self._timers.quiet_until):
            entries = await self.reclaim(room)
        if not entries and now >= self._timers.next_reconcile:
            entries = await self.reconcile()
        return entries

    async def _is_new_connection(self) -> bool:
        """Whether the connection is another than at the last look; then nothing is looked for at once."""
        if self._link.is_up and self._link.generation == self._generation:
            return False
        # After an outage every entry looks dead: the living need time to renew before anybody reclaims.
        await self.ensure_groups()
        self._generation = self._link.generation
        self._timers.quiet_until = time.monotonic() + self._options.lease_ms / 3000
        return True

    async def _read_lanes(self, room: int) -> list[Entry]:
        """The quick read, which doesn't wait: the first lane in weighted order that has something."""
        empty: list[str] = []
        for lane in self.lanes.order.order():
            entries = await self._pick(lane, room)
            if entries:
                self.lanes.order.charge(lane, len(entries), empty)
                return entries
            empty.append(lane)
        self.lanes.order.level()
        return []

    async def _pick(self, lane: str, room: int) -> list[Entry]:
        """Up to `room` (and 8) entries of a lane: those whose turn it is, where it isn't simply the oldest one's."""
        picked = None if self.picker is None else await self.picker.pick(lane, room)
        if picked is None:
            count = min(room, MAX_ENTRIES_PER_READ)
            answer = await self._ask(lane, *self._read_group("COUNT", count, "STREAMS", self._keys.jobs(lane), ">"))
            return self._entries_of(answer)
        self._blocked.discard(lane)
        self.stats.num_read += len(picked)
        return picked

    async def _read_blocking(self, block_ms: int) -> list[Entry]:
        """COUNT is per stream, so this asks for 1 and may bring one entry per lane.

        Waits no longer than to the next scan, and for no lane that the quick read found to hold something else.
        """
        until_scan_s = max(self._timers.next_scan, self._timers.quiet_until) - time.monotonic()
        block_ms = max(1, int(min(block_ms, 1000 * until_scan_s)))
        if self.picker is not None and self.picker.max_block_ms is not None:
            block_ms = min(block_ms, self.picker.max_block_ms)
        lanes = [lane for lane in LANES if lane not in self._blocked]
        if not lanes:
            await asyncio.sleep(block_ms / 1000)
            return []
        command = self._read_group("COUNT", 1, "BLOCK", block_ms, "STREAMS", *map(self._keys.jobs, lanes))
        try:
            entries = self._entries_of(await self._link.call(*command, *(">" for _ in lanes)))
        except ServerError as error:
            if not error.is_wrong_type:
                raise
            return []  # a lane's key was overwritten just now: the next quick read finds out which
        for entry in entries:
            self.lanes.order.charge(entry.lane, 1)
        return entries

    async def _ask(self, lane: str, *command: str | int) -> Any:
        """The answer to a command on a lane, None where the lane's key holds something else."""
        try:
            answer = await self._link.call(*command)
        except ServerError as error:
            if not error.is_wrong_type:
                raise
            self._blocked.add(lane)
            return None
        self._blocked.discard(lane)
        return answer

    def _read_group(self, *rest: str | int) -> tuple[str | int, ...]:
        return ("XREADGROUP", "GROUP", GROUP, self._consumer, *rest)

    def _entries_of(self, answer: Any) -> list[Entry]:
        lanes = {self._keys.jobs(lane).encode(): lane for lane in LANES}
        entries = [
            entry_of(lanes[key], entry_id.decode(), flat)
            for key, delivered in answer or []
            for entry_id, flat in delivered
        ]
        self.stats.num_read += len(entries)
        return self._leases.hold_new(entries)

    async def _auto_claim(self, lane: str, cursor: str, count: int) -> tuple[str, list[Entry]]:
        """One XAUTOCLAIM: the next cursor, and what was claimed with its delivery counts."""
        key = self._keys.jobs(lane)
        claim = ("XAUTOCLAIM", key, GROUP, self._consumer, self._options.lease_ms, cursor, "COUNT", count)
        answer = await self._ask(lane, *claim)
        if answer is None:
            return "0-0", []
        next_cursor, claimed = answer[0].decode(), answer[1]
        if len(answer) > 2 and answer[2]:  # since 7.0: entries that were trimmed
            self._count_trimmed(lane, len(answer[2]))
        if not claimed:
            return next_cursor, []
        bodies = {item[0].decode(): item[1] for item in claimed if item is not None and item[1] is not None}
        entries: list[Entry] = []
        for entry_id, _, deliveries in await self._pending(lane):
            if entry_id in bodies:
                entries.append(entry_of(lane, entry_id, bodies[entry_id], deliveries))
            elif len(bodies) < len(claimed) and not self._leases.is_held((lane, entry_id)):
                entries += await self._fetch(lane, entry_id, deliveries)  # 6.2: nil stands for a trimmed entry
        return next_cursor, entries

    async def _pending(self, lane: str) -> list[tuple[str, int, int]]:
        """Entry id, idle ms and delivery count of all that is pending under our name."""
        key = self._keys.jobs(lane)
        answer = await self._ask(lane, "XPENDING", key, GROUP, "-", "+", 1_000_000, self._consumer)
        return [(entry_id.decode(), int(idle), int(count)) for entry_id, _, idle, count in answer or []]

    async def _fetch(self, lane: str, entry_id: str, deliveries: int) -> list[Entry]:
        """The entry that is pending under our name, if it still exists; else it is acknowledged and counted."""
        key = self._keys.jobs(lane)
        found = await self._ask(lane, "XRANGE", key, entry_id, entry_id, "COUNT", 1)
        if found is None:
            return []
        if not found:
            await self._link.call("XACK", key, GROUP, entry_id)
            self._count_trimmed(lane, 1)
            return []
        return [entry_of(lane, entry_id, found[0][1], deliveries)]

    def _count_trimmed(self, lane: str, num_entries: int) -> None:
        self.stats.num_lost_trimmed += num_entries
        log.error("jobs_lost_trimmed", queue=self._keys.queue, lane=lane, num_entries=num_entries)


def entry_of(lane: str, entry_id: str, flat: list[bytes], deliveries: int = 1) -> Entry:
    """The entry whose fields came as name, value, name, value, ..."""
    names = flat[::2]
    fields = dict(zip(names, flat[1::2], strict=False))
    repeated = [name for name, count in Counter(names).items() if count > 1] if len(fields) < len(names) else []
    return Entry(lane, entry_id, fields, deliveries, tuple(repeated))
