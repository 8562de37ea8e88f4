"""What this worker holds, and the renewing of it."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import structlog

from worker.errors import ErrorCode
from worker.streams.connection import Backoff
from worker.streams.errors import StreamsError
from worker.streams.health import tell
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
    """Owns the set of entries held, buffered or running, and renews them over its own link.

    `on_loss` is called once for each entry that turns out to be another's (which is then held no longer) or nobody's
    (which stays held until it is released).
    """

    def __init__(
        self, scripts: Scripts, lease_ms: int, on_loss: Callable[[Entry, Loss], None] = lambda entry, loss: None
    ) -> None:
        self._scripts = scripts
        self._period_s = lease_ms / 6 / 1000
        self.on_loss = on_loss
        self._held: dict[EntryKey, Entry] = {}
        self._orphaned: set[EntryKey] = set()

    def hold(self, entry: Entry) -> bool:
        """Takes `entry` under renewal. False: it is held already, so a late answer adds nothing."""
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
        self._held.pop(key, None)
        self._orphaned.discard(key)

    def is_held(self, key: EntryKey) -> bool:
        """Whether the entry is under renewal."""
        return key in self._held

    def entries(self) -> Iterable[Entry]:
        """What is under renewal."""
        return self._held.values()

    def __len__(self) -> int:
        return len(self._held)

    async def renew(self) -> None:
        """Renews everything held, lane by lane. Raises StreamsError."""
        by_lane: dict[str, list[str]] = {}
        for lane, entry_id in self._held:
            by_lane.setdefault(lane, []).append(entry_id)
        for lane, entry_ids in by_lane.items():
            result = await self._scripts.renew(lane, entry_ids)
            for entry_id in result.lost:
                self._report((lane, entry_id), Loss.LOST)
            for entry_id in result.orphaned:
                self._report((lane, entry_id), Loss.ORPHANED)

    async def run(self, may_renew: Callable[[], bool] = lambda: True) -> None:
        """Renews every sixth of a lease until cancelled; while `may_renew` says no, the leases run out.

        Waits after a lost connection stay below that sixth.
        """
        backoff = Backoff(self._period_s)
        while True:
            try:
                if may_renew():
                    await self.renew()
                backoff.reset()
                await asyncio.sleep(self._period_s)
            except StreamsError as error:
                tell(log, "lease_renewal_failed", error, num_held=len(self._held))
                await backoff.wait()

    def _report(self, key: EntryKey, loss: Loss) -> None:
        entry = self._held.get(key)
        # Released while the answer was on its way, or told before.
        if entry is None or (loss is Loss.ORPHANED and key in self._orphaned):
            return
        if loss is Loss.LOST:
            self.release(key)
        else:
            self._orphaned.add(key)
        log.warning("lease_lost", lane=key[0], entry_id=key[1], reason=loss.value)
        self.on_loss(entry, loss)
