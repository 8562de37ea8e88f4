"""Takes the jobs of all queues while there is room, in fair turns.

    some seat is free, and a queue may have jobs   a read that doesn't wait, queue by queue in the order of their turns;
                                                   where several have jobs the free seats are divided among them
    seats are free, and no queue has a job         every queue waits for one, on a connection of its own
    no seat is free, or the queue is paused        once a second a look at the oldest, which may have to end unrun

A read has its seats reserved while it is under way, so that all reads together bring no more than there is room for
(but for the entries that a waiting read brings beyond its one, see `JobSource.wait`). Each read is a task of its own:
a queue whose server is slow, or that can't be read at all, holds up no other.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import structlog

from worker.parts import Parts
from worker.served_queue import ServedQueue
from worker.streams.connection import BLOCK_MS, Backoff
from worker.streams.errors import StreamsError
from worker.streams.health import tell
from worker.streams.jobs import MAX_ENTRIES_PER_READ
from worker.streams.leases import Entry
from worker.stride import Stride

log = structlog.get_logger(__name__)

# Longest that a queue which can't be read goes without a look at its oldest jobs; a quarter of a lease where shorter.
LOOK_EVERY_S = 1.0
# How long one queue waits for a job while there are fewer seats than queues that wait for one.
SLICE_MS = 100
# A read that takes longer than it should by so much gives its seats back: what it brings may be too much then.
PATIENCE_S = 1.0


class Read(Enum):
    """What a queue's task is doing."""

    NONE = "none"
    AT_ONCE = "at once"
    WAIT = "wait"
    LOOK = "look"
    BACKOFF = "backoff"


@dataclass(slots=True, eq=False)
class _Reader:
    """A queue and the one read that may be under way for it."""

    queue: ServedQueue
    backoff: Backoff
    doing: Read = Read.NONE
    num_seats: int = 0
    # Until when its seats are kept for it.
    keeps_until_s: float = 0.0
    # What an ended read has brought.
    found: list[Entry] = field(default_factory=list)
    # It had nothing when it was last read, and nobody has had anything since.
    is_empty: bool = False
    waited_at_s: float = 0.0
    unread_since_s: float | None = None

    def seats(self, now_s: float) -> int:
        """Seats that its read may fill."""
        return self.num_seats if now_s < self.keeps_until_s else 0

    @property
    def has_no_say(self) -> bool:
        """Whether it takes no part in the turns now: it has nothing, or can't or mustn't be read."""
        return self.is_empty or self.doing is Read.BACKOFF or self.queue.is_paused


class JobTaking:
    """Owner of the reads. `changed` is set by others whenever a seat became free or a queue's settings changed."""

    def __init__(
        self,
        queues: Sequence[ServedQueue],
        parts: Parts,
        changed: asyncio.Event,
        *,
        num_seats: Callable[[], int],
        lease_ms: int,
    ) -> None:
        """`num_seats`: how many jobs the worker may hold now. The reads are tasks of `parts`.

        What waits in its tenant's lot looks dead where nobody looks at it for a lease.
        """
        self._readers = {queue.name: _Reader(queue, Backoff(lease_ms / 6000)) for queue in queues}
        self._look_every_s = min(LOOK_EVERY_S, lease_ms / 4000)
        self._turns = Stride(dict.fromkeys(self._readers, 1))
        self._num_seats = num_seats
        self._changed = changed
        self._parts = parts
        self._reads: dict[asyncio.Task[None], _Reader] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Take jobs until `stop` is set, which `changed` must tell. What is being read then is still taken in, unless
        it comes too late: its lease runs out, and a peer takes it.
        """
        while not stop.is_set():
            self._changed.clear()
            self._start_reads(time.monotonic())
            await self._until_something_happens()
            self._take_in()
        await self._end_reads()

    async def _end_reads(self) -> None:
        for task, reader in self._reads.items():
            if reader.doing is Read.BACKOFF:
                task.cancel()
        if self._reads:
            _, late = await asyncio.wait(self._reads, timeout=BLOCK_MS / 1000 + PATIENCE_S)
            for task in late:
                task.cancel()
            await asyncio.wait(self._reads, timeout=PATIENCE_S)
        self._take_in()

    # Which queue is read, and how.

    def _start_reads(self, now_s: float) -> None:
        readers = [self._readers[name] for name in self._turns.order()]
        num_free = self._num_free(now_s)
        if num_free <= 0 and not any(reader.seats(now_s) for reader in readers):
            for reader in readers:
                reader.is_empty = False  # by the time that there is room again nobody knows
        open_ = [reader for reader in readers if reader.doing is Read.NONE and not reader.queue.is_paused]
        hungry = [reader for reader in open_ if not reader.is_empty]
        for index, reader in enumerate(hungry):
            if num_free <= 0:
                break
            room = min(max(1, num_free // (len(hungry) - index)), MAX_ENTRIES_PER_READ)
            num_free -= room
            self._start(reader, Read.AT_ONCE, room, now_s)
        is_looking = any(reader.doing is Read.AT_ONCE and reader.seats(now_s) for reader in readers)
        if not hungry and not is_looking:
            self._start_waiting(open_, num_free, now_s)
        for reader in readers:
            self._look_at_times(reader, now_s)

    def _start_waiting(self, readers: list[_Reader], num_free: int, now_s: float) -> None:
        """No queue has a job now. Where there are too few seats for all to wait, they take turns at it, in slices."""
        block_ms = BLOCK_MS if len(readers) <= num_free else SLICE_MS
        for reader in sorted(readers, key=lambda reader: reader.waited_at_s)[: max(0, num_free)]:
            reader.waited_at_s = now_s
            self._start(reader, Read.WAIT, 1, now_s, block_ms)

    def _look_at_times(self, reader: _Reader, now_s: float) -> None:
        """A queue that isn't read is looked at once a second: jobs that are overdue or called off need no room."""
        if reader.doing is not Read.NONE or not (reader.queue.is_paused or self._num_free(now_s) <= 0):
            reader.unread_since_s = None
            return
        if reader.unread_since_s is None:
            reader.unread_since_s = now_s
        # A hint may have come while the last look was under way.
        if now_s - reader.unread_since_s >= self._look_every_s or reader.queue.links.oldest.is_due:
            reader.unread_since_s = None
            self._start(reader, Read.LOOK, 0, now_s)

    def _num_free(self, now_s: float) -> int:
        readers = self._readers.values()
        return self._num_seats() - sum(reader.queue.num_held + reader.seats(now_s) for reader in readers)

    # Reads.

    def _start(self, reader: _Reader, read: Read, num_seats: int, now_s: float, block_ms: int = 0) -> None:
        reader.doing, reader.num_seats = read, num_seats
        reader.keeps_until_s = now_s + block_ms / 1000 + PATIENCE_S
        with structlog.contextvars.bound_contextvars(queue=reader.queue.name):
            self._reads[self._parts.spawn(f"read {reader.queue.name}", self._read(reader, block_ms))] = reader

    async def _read(self, reader: _Reader, block_ms: int) -> None:
        """One read. After an error it ends only after a while."""
        links = reader.queue.links
        try:
            match reader.doing:
                case Read.AT_ONCE:
                    reader.found = await links.source.take_at_once(reader.num_seats)
                case Read.WAIT:
                    reader.found = await links.source.wait(block_ms)
                case _:
                    reader.found = await links.source.take_up() or await links.oldest.look()
        except StreamsError as error:
            tell(log, "queue_unread", error)
            links.source.doubt()
            reader.doing, reader.num_seats, reader.is_empty = Read.BACKOFF, 0, False
            self._changed.set()
            await reader.backoff.wait()
        else:
            reader.backoff.reset()

    async def _until_something_happens(self) -> None:
        """Until a read has ended, something changed, or it is time for a look."""
        looks = [reader.unread_since_s for reader in self._readers.values() if reader.unread_since_s is not None]
        timeout_s = min(looks, default=time.monotonic()) + self._look_every_s - time.monotonic()
        changed = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait(
                {changed, *self._reads}, timeout=max(0.0, timeout_s), return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            changed.cancel()

    def _take_in(self) -> None:
        """Accept what the ended reads have brought, and charge it to the queues' turns."""
        for task in [task for task in self._reads if task.done()]:
            reader = self._reads.pop(task)
            read, reader.doing, reader.num_seats = reader.doing, Read.NONE, 0
            entries, reader.found = reader.found, []
            for entry in entries:
                reader.queue.accept(entry)
            if read in (Read.AT_ONCE, Read.WAIT):
                self._learn(reader, read, len(entries))
        for reader in self._readers.values():
            reader.queue.metrics.set_jobs_held(reader.queue.num_held)

    def _learn(self, reader: _Reader, read: Read, num_entries: int) -> None:
        """What a read says of its queue, and of the turns."""
        if num_entries == 0:
            reader.is_empty = read is Read.AT_ONCE or not reader.queue.links.source.must_look
            if all(other.has_no_say for other in self._readers.values()):
                self._turns.level()
            return
        silent = [other.queue.name for other in self._readers.values() if other.has_no_say and other is not reader]
        self._turns.charge(reader.queue.name, num_entries, silent)
        for other in self._readers.values():
            if other.doing is not Read.WAIT:
                other.is_empty = False
