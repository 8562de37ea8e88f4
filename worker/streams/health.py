"""What a worker waits for when Redis doesn't do what it should: one line in the log, and the reason for readiness."""

import threading
import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import structlog

from worker.streams.errors import ConnectionLostError, ServerError, StreamsError

log = structlog.get_logger(__name__)

# What lasts is told again after so many seconds, and nothing more often.
SAY_AGAIN_S = 30.0
# A command that was refused and is never tried again, since its job went elsewhere, counts no longer.
FORGET_COMMAND_S = 30.0
# Nor does a connection that nobody needs any more, where others have had answers since.
FORGET_LINK_S = 5.0
# Of a worker's connections some read blocks for two seconds at most, so an answer comes at least that often.
SILENT_S = 3.0

_MEANINGS = {
    "LOADING": "the server is reading its data from disk",
    "MASTERDOWN": "the replica has lost its primary",
    "READONLY": "the server is a replica now: looking for the primary",
    "OOM": "the server's memory is full: raise maxmemory, or remove what needn't be there",
    "NOREPLICAS": "the server has fewer replicas than min-replicas-to-write demands",
    "CLUSTERDOWN": "the Cluster doesn't serve all slots",
    "TRYAGAIN": "the queue's slot is moving to another node",
    "MOVED": "the queue's slot has moved to another node",
    "ASK": "the queue's slot is moving to another node",
    "BUSY": "the server runs somebody's slow script",
    "MISCONF": "the server can't write to its disk",
    "NOPERM": "the user lacks a right (docs/deploying.md)",
}


@dataclass(slots=True)
class _Trouble:
    is_connection: bool
    reason: str
    since: float
    last: float


class ServerHealth:
    """Hears of every command that fails for the server's sake, by connection and command.

    A trouble ends when the same command is taken over the same connection; a lost connection, with an answer over a
    new one. Threads may tell and ask.
    """

    def __init__(self) -> None:
        self._troubles: dict[tuple[str, Hashable], _Trouble] = {}
        self._last_answer = time.monotonic()
        self._began = 0.0
        self._said: dict[str, float] = {}
        self._is_told = False
        # Leases are renewed from a thread of their own, over a link that tells here too.
        self._lock = threading.Lock()

    @property
    def is_troubled(self) -> bool:
        """Whether anything is still to end."""
        return bool(self._troubles)

    @property
    def trouble(self) -> str | None:
        """What is waited for now, in words; None while all is well."""
        lasting = [trouble for trouble in tuple(self._troubles.values()) if self._lasts(trouble)]
        return min(lasting, key=lambda trouble: trouble.since).reason if lasting else None

    @property
    def is_cut_off(self) -> bool:
        """Whether the server is out of reach, or says nothing at all, which is worse than one that refuses."""
        if time.monotonic() - self._last_answer > SILENT_S:
            return True
        return any(trouble.is_connection and self._lasts(trouble) for trouble in tuple(self._troubles.values()))

    def lost(self, link: str, error: ConnectionLostError) -> None:
        """`link` has no connection."""
        kind = f"{str(error).partition(':')[0]} {error.is_passing}"
        self._add((link, None), kind, str(error), is_connection=True)

    def refused(self, link: str, command: Hashable, error: ServerError) -> None:
        """The server can't do this command now. Errors that say something of the command alone are passed over."""
        if error.is_temporary or error.code == "NOPERM":
            reason = f"{_MEANINGS.get(error.code, str(error))} ({error.code})"
            self._add((link, command), error.code, reason, is_connection=False)

    def heard(self, link: str) -> None:
        """An answer came over this connection, whatever it was."""
        self._last_answer = time.monotonic()
        if self._troubles:
            self.answered(link, None)

    def answered(self, link: str, command: Hashable) -> None:
        """The server has done this command."""
        with self._lock:
            self._troubles.pop((link, command), None)
            self._troubles = {name: trouble for name, trouble in self._troubles.items() if self._lasts(trouble)}
            if not self._troubles and self._is_told:
                self._is_told = False
                log.info("redis_serves_again", seconds=round(time.monotonic() - self._began, 1))

    def _add(self, key: tuple[str, Hashable], kind: str, reason: str, *, is_connection: bool) -> None:
        now = time.monotonic()
        with self._lock:
            self._troubles = {name: trouble for name, trouble in self._troubles.items() if self._lasts(trouble)}
            if not self._troubles:
                self._began = now
            known = self._troubles.get(key)
            self._troubles[key] = _Trouble(is_connection, reason, now if known is None else known.since, now)
            if now - self._said.get(kind, -SAY_AGAIN_S) < SAY_AGAIN_S:
                return
            self._said[kind] = now
            self._is_told = True
        log.warning("redis_waited_for", reason=reason, link=key[0], seconds=round(now - self._began, 1))

    def _lasts(self, trouble: _Trouble) -> bool:
        age_s = time.monotonic() - trouble.last
        if trouble.is_connection:
            return age_s < FORGET_LINK_S or self._last_answer <= trouble.last
        return age_s < FORGET_COMMAND_S


def tell(logger: Any, event: str, error: StreamsError, **keys: Any) -> None:
    """Logs what a part of the worker could not do. Where ServerHealth tells the reason, only for debugging."""
    is_known = isinstance(error, ConnectionLostError) or (isinstance(error, ServerError) and error.is_temporary)
    (logger.debug if is_known else logger.warning)(event, error=str(error), **keys)
