"""Whose turn it is, where several tenants' jobs wait in one lane, or a tenant has to wait.

A lane is first in, first out, so whoever sends a thousand jobs would keep all others waiting. Each free place goes to
the tenant that has the fewest jobs on this worker for its weight; between equals, and within a tenant, to the oldest.
"""

from collections import Counter

from worker.streams.admission import Admission
from worker.streams.backlog import order_of
from worker.streams.jobs import MAX_ENTRIES_PER_READ
from worker.streams.keys import LANES, lot_of
from worker.streams.leases import Entry, Leases
from worker.streams.overload import OldestWatch

# How long a read may block while tenants have to wait: their time comes without a new entry.
WAITING_BLOCK_MS = 50


class Turns:
    """Picks entries of a lane. Without `is_fair` the oldest whose tenant needn't wait comes first."""

    def __init__(self, oldest: OldestWatch, admission: Admission, leases: Leases, *, is_fair: bool) -> None:
        self._oldest = oldest
        self._backlog = oldest.backlog
        self._admission = admission
        self._leases = leases
        self._is_fair = is_fair
        self._has_lots = dict.fromkeys(LANES, False)

    @property
    def max_block_ms(self) -> int | None:
        """How long a blocking read may take now; None: as long as it likes."""
        return WAITING_BLOCK_MS if any(self._has_lots.values()) else None

    async def pick(self, lane: str, room: int) -> list[Entry] | None:
        """The entries to take next, under lease; none where it is nobody's turn. None: just read the lane's head.

        Raises StreamsError.
        """
        known = await self._backlog.look(lane)
        self._has_lots[lane] = known is not None and bool(known.lots)
        if known is None:
            return None
        if unneeded := await self._oldest.look_if_due(lane, known, self._admission.must_wait):
            return unneeded
        oldest = known.oldest_by_lot()
        free = {lot: entry_id for lot, entry_id in oldest.items() if not self._admission.must_wait(lot)}
        if not free:
            # What comes next must not wait behind those that have to.
            await self._backlog.set_aside(lane)
            return []
        # One after the other where there is only one tenant, or a place for everybody.
        if not known.lots and (len(oldest) == 1 or (len(free) == len(oldest) and known.num_unread <= room)):
            return None
        lot = self._first(free)
        if any(waiting.name == lot for waiting in known.lots):
            is_only = len(free) == 1 and not self._admission.limits(lot).is_limited
            entries = await self._backlog.take_lot(lane, lot, min(room, MAX_ENTRIES_PER_READ) if is_only else 1)
        else:
            entry = await self._backlog.take(lane, free[lot])
            entries = [] if entry is None else [entry]
        return self._leases.hold_new(entries)

    def _first(self, free: dict[str, str]) -> str:
        held = Counter(lot_of(entry.fields.get(b"tenant", b"")) for entry in self._leases.entries())

        def turn(lot: str) -> tuple[float, tuple[int, int]]:
            share = (held[lot] + 1) / self._admission.limits(lot).weight if self._is_fair else 0.0
            return share, order_of(free[lot])

        return min(free, key=turn)
