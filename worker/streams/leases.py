"""What this worker holds, and the renewing of it."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import structlog

from worker.errors import ErrorCode
from worker.streams.scripts import Scripts

log = structlog.get_logger(__name__)

EntryKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Entry:
    """A job as it was delivered: entry `entry_id` of `lane`, with its raw fields.

    `deliveries` counts deliveries since the job was last opened. `repeated` names fields that the entry has more than
    once (the last one is in `fields`). `must_end` is set where a worker without room took it only to end it:
    `deadline_exceeded`, `cancelled` or `overloaded`.
    """

    lane: str
    entry_id: str
    fields: dict[bytes, bytes] = field(repr=False)
    deliveries: int = 1
    repeated: tuple[bytes, ...] = ()
    must_end: ErrorCode | None = None

    @property
    def key(self) -> EntryKey:
        """An entry id alone is unique only within its lane."""
        return (self.lane, self.entry_id)


class Loss(StrEnum):
    """Why a lease could not be renewed.

    LOST: another worker has the entry: stop, emit nothing, don't settle. ORPHANED: nobody has it, since the entry, its
    group or its lane was deleted: finish it, or it never ends. If it is delivered once more after all, to us it is
    held already, and the open of a peer fences us.
    """

    LOST = "lost"
    ORPHANED = "orphaned"


class Leases:
    """Owns the set of entries of one queue that are held, buffered or running, and asks the server to renew them.

    All but `renew` belong to the loop of the service; `renew` may be awaited in another thread (see `LeaseKeeper`).

    `on_loss` is called once for each entry that turns out to be another's (which is then held no longer) or nobody's
    (which stays held until it is released).
    """

    def __init__(
        self, scripts: Scripts, lease_ms: int, on_loss: Callable[[Entry, Loss], None] = lambda entry, loss: None
    ) -> None:
        """`scripts` use a link of their own, so that renewal never waits for anything else."""
        self._scripts = scripts
        self.period_s = lease_ms / 6 / 1000
        self.on_loss = on_loss
        self._held: dict[EntryKey, Entry] = {}
        self._orphaned: set[EntryKey] = set()
        # For changes of `_held` against its copying by another thread.
        self._lock = threading.Lock()

    @property
    def queue(self) -> str:
        """The queue's name."""
        return self._scripts.queue

    def hold(self, entry: Entry) -> bool:
        """Takes `entry` under renewal. False: it is held already, so a late answer adds nothing."""
        with self._lock:
            if entry.key in self._held:
                return False
            self._held[entry.key] = entry
        return True

    def hold_new(self, entries: Iterable[Entry]) -> list[Entry]:
        """Takes `entries` under renewal; answers those that were not held already.

        Call it when nothing can fail any more before they are worked on: what is held and lost is renewed for ever.
        """
        return [entry for entry in entries if self.hold(entry)]

    def release(self, key: EntryKey) -> None:
        """The entry is settled, dropped or handed over."""
        with self._lock:
            self._held.pop(key, None)
        self._orphaned.discard(key)

    def forget(self, entry: Entry) -> None:
        """This delivery is ours no more; where the same entry was claimed anew, that claim stays."""
        if self.holds(entry):
            self.release(entry.key)

    def holds(self, entry: Entry) -> bool:
        """Whether this delivery is under renewal, and not a later one of the same entry."""
        return self._held.get(entry.key) is entry

    def held(self, key: EntryKey) -> Entry | None:
        """The delivery of an entry that is under renewal."""
        return self._held.get(key)

    def is_held(self, key: EntryKey) -> bool:
        """Whether the entry is under renewal."""
        return key in self._held

    def entries(self) -> Iterable[Entry]:
        """What is under renewal."""
        return self._held.values()

    def __len__(self) -> int:
        return len(self._held)

    async def renew(self) -> list[tuple[Entry, Loss]]:
        """Renews everything held, lane by lane; answers what could not be renewed, for `tell`. Raises StreamsError."""
        with self._lock:
            held = list(self._held.values())
        by_lane: dict[str, dict[str, Entry]] = {}
        for entry in held:
            by_lane.setdefault(entry.lane, {})[entry.entry_id] = entry
        losses: list[tuple[Entry, Loss]] = []
        for lane, entries in by_lane.items():
            result = await self._scripts.renew(lane, list(entries))
            losses += [(entries[entry_id], Loss.LOST) for entry_id in result.lost]
            losses += [(entries[entry_id], Loss.ORPHANED) for entry_id in result.orphaned]
        return losses

    def tell(self, losses: Iterable[tuple[Entry, Loss]]) -> None:
        """Acts on what a renewal has found: calls `on_loss`."""
        for entry, loss in losses:
            # Released while the answer was on its way, taken anew even, or told before.
            if not self.holds(entry) or (loss is Loss.ORPHANED and entry.key in self._orphaned):
                continue
            if loss is Loss.LOST:
                self.release(entry.key)
            else:
                self._orphaned.add(entry.key)
            log.warning("lease_lost", lane=entry.lane, entry_id=entry.entry_id, reason=loss.value)
            self.on_loss(entry, loss)
