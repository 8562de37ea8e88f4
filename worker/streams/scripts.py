"""The Lua scripts of `lua/`, each with a typed stub. Everything that depends on owning an entry is asked inside."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files
from typing import Any

from worker.streams.connection import Argument, Link
from worker.streams.errors import ServerError
from worker.streams.keys import GROUP, HANDOVER, QueueKeys

# XCLAIM's arguments pass over Lua's stack, which holds about 8,000.
MAX_IDS_PER_RENEWAL = 1000
SCRIPT_NAMES = (
    "open",
    "renew",
    "settle",
    "drop",
    "hand_over",
    "peek_oldest",
    "take_oldest",
    "beat",
    "sweep_consumers",
)


class OpenStatus(StrEnum):
    """What became of an attempt to open a reply."""

    OPENED = "opened"
    LOST = "lost"
    DUPLICATE = "duplicate"
    CONFLICT = "conflict"
    ENDED = "ended"
    BLOCKED = "blocked"


class SettleStatus(StrEnum):
    """What settling found, and handing over.

    OTHER: another consumer has the entry, so nothing was done. UNENDED: the server has lost the terminal event, so
    nothing was done. GONE: nobody has it, after a success whose answer was lost or because entry, group or lane were
    deleted. UNRECORDED: done, but the record's key holds something else.
    """

    DONE = "done"
    UNRECORDED = "unrecorded"
    OTHER = "other"
    UNENDED = "unended"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class OpenResult:
    """Answer of `open`.

    Only OPENED has the rest: `attempt`; `covered`: tokens that earlier attempts stored; `crashes` and `solo` as the
    record has them now; `cancel_reason`: the cancel mark's value, None where there is no mark; `is_resumed`: this
    entry was opened before. ENDED says how the reply ended: `terminal` is `end` or `error`, with the error's code
    and the `usage` that was told. BLOCKED names the `key` that holds what leaves no way to answer.
    """

    status: OpenStatus
    attempt: int = 0
    covered: int = 0
    crashes: int = 0
    solo: int = 0
    cancel_reason: str | None = None
    is_resumed: bool = False
    terminal: str = ""
    terminal_code: str = ""
    usage: str | None = None
    key: str = ""


@dataclass(frozen=True, slots=True)
class RenewResult:
    """Entries of one lane that another consumer has, and entries that nobody has (any more)."""

    lost: frozenset[str]
    orphaned: frozenset[str]


def source_of(name: str) -> str:
    """The Lua of one of SCRIPT_NAMES."""
    return files("worker.streams").joinpath("lua", f"{name}.lua").read_text()


class _Script:
    def __init__(self, name: str) -> None:
        self._source = source_of(name).encode()
        self._sha = hashlib.sha1(self._source, usedforsecurity=False).hexdigest()

    async def run(self, link: Link, keys: Sequence[str], arguments: Sequence[Argument]) -> Any:
        tail = (len(keys), *keys, *arguments)
        try:
            return await link.call("EVALSHA", self._sha, *tail)
        except ServerError as error:
            if error.code != "NOSCRIPT":
                raise
        return await link.call("EVAL", self._source, *tail)


class Scripts:
    """The scripts of one queue, called over one link as one consumer.

    Each raises ConnectionLostError where the answer was lost (each may then be called again) and ServerError where
    the server refused.
    """

    def __init__(self, link: Link, keys: QueueKeys, consumer: str) -> None:
        self._link = link
        self._keys = keys
        self._consumer = consumer
        self._scripts = {name: _Script(name) for name in SCRIPT_NAMES}

    @property
    def queue(self) -> str:
        """The queue's name."""
        return self._keys.queue

    async def _run(self, name: str, keys: Sequence[str], *arguments: Argument) -> Any:
        return await self._scripts[name].run(self._link, keys, arguments)

    async def open(
        self,
        lane: str,
        entry_id: str,
        job_id: str,
        *,
        digest: str,
        model: str,
        run_ttl_ms: int,
        tenant: str = "",
        own_attempt: int = 0,
    ) -> OpenResult:
        """Opens the reply with event ATTEMPT-0, if the entry is ours and not yet ended; the record says `running`.

        `own_attempt` is the caller's own attempt of this reply where it opens anew.
        """
        keys = self._keys
        answer = await self._run(
            "open",
            [keys.jobs(lane), keys.reply(job_id), keys.state(job_id), keys.cancel(job_id), *keys.lanes],
            *(GROUP, self._consumer, entry_id, lane, digest, model, run_ttl_ms, own_attempt, tenant),
        )
        status = OpenStatus(answer[0].decode())
        if status is OpenStatus.ENDED:
            terminal, code, usage = (None if part is None else part.decode("utf-8", "replace") for part in answer[1:])
            return OpenResult(status, terminal=terminal or "", terminal_code=code or "", usage=usage)
        if status is OpenStatus.BLOCKED:
            return OpenResult(status, key=answer[1].decode())
        if status is not OpenStatus.OPENED:
            return OpenResult(status)
        _, attempt, covered, crashes, solo, mark, is_resumed = answer
        return OpenResult(
            status,
            attempt=int(attempt),
            covered=int(covered),
            crashes=int(crashes),
            solo=int(solo),
            cancel_reason=None if mark is None else mark.decode("utf-8", "replace"),
            is_resumed=is_resumed == 1,
        )

    async def renew(self, lane: str, entry_ids: Sequence[str]) -> RenewResult:
        """Renews the leases of the entries held in `lane`; answers those that could not be renewed."""
        lost: set[str] = set()
        orphaned: set[str] = set()
        for start in range(0, len(entry_ids), MAX_IDS_PER_RENEWAL):
            some = entry_ids[start : start + MAX_IDS_PER_RENEWAL]
            answer = await self._run("renew", [self._keys.jobs(lane)], GROUP, self._consumer, *some)
            lost.update(entry_id.decode() for entry_id in answer[0])
            orphaned.update(entry_id.decode() for entry_id in answer[1])
        return RenewResult(frozenset(lost), frozenset(orphaned))

    async def settle(
        self,
        lane: str,
        entry_id: str,
        job_id: str,
        *,
        outcome: str,
        result_ttl_ms: int,
        prompt_ref: str | None = None,
        record: Mapping[str, str] | None = None,
    ) -> SettleStatus:
        """Takes the entry off the queue. The terminal event comes first, never afterwards: without it nothing is done.

        `outcome` becomes the record's status ("" leaves it), `record` more of its fields (timings, usage). Reply and
        record live on for `result_ttl_ms`. The prompt that `prompt_ref` names is removed.
        """
        keys = self._keys
        touched = [keys.jobs(lane), keys.cancel(job_id), keys.state(job_id), keys.reply(job_id)]
        if prompt_ref is not None:
            touched.append(keys.prompt(prompt_ref))
        pairs = [text for pair in (record or {}).items() for text in pair]
        answer = await self._run(
            "settle", touched, GROUP, self._consumer, entry_id, lane, outcome, result_ttl_ms, *pairs
        )
        return SettleStatus(answer.decode())

    async def drop(self, lane: str, entry_id: str) -> bool:
        """Drops a duplicate or a conflict. False: the entry was not ours."""
        return bool(await self._run("drop", [self._keys.jobs(lane)], GROUP, self._consumer, entry_id) == 1)

    async def hand_over(
        self, lane: str, entry_id: str, job_id: str, *, idle_ms: int, is_urgent: bool = True
    ) -> SettleStatus:
        """Gives an entry back as if it had been idle for `idle_ms`; a peer takes it once that reaches its lease.

        `is_urgent` wakes the peers.
        """
        keys = self._keys
        answer = await self._run(
            "hand_over",
            [keys.jobs(lane), keys.state(job_id), keys.control],
            *(GROUP, self._consumer, entry_id, lane, HANDOVER, idle_ms, "1" if is_urgent else "0"),
        )
        return SettleStatus(answer.decode())

    async def peek_oldest(self, lane: str, known_entry_id: str = "") -> tuple[int, str | None, list[bytes] | None]:
        """Length of the lane, id of its oldest undelivered entry, and its fields (unless it is the known one)."""
        length, *rest = await self._run("peek_oldest", [self._keys.jobs(lane)], GROUP, known_entry_id)
        entry_id = rest[0].decode() if rest else None
        return int(length), entry_id, rest[1] if len(rest) > 1 else None

    async def take_oldest(self, lane: str, entry_id: str) -> list[bytes] | None:
        """Takes the oldest undelivered entry if it is `entry_id`; answers its flat fields, or None."""
        answer = await self._run("take_oldest", [self._keys.jobs(lane)], GROUP, self._consumer, entry_id)
        return None if answer is None else answer[1]

    async def beat(self, *, expiry_ms: int, fields: Mapping[str, str | int | float]) -> int:
        """Writes this worker's entry in the registry; answers the server's time in ms."""
        pairs = [part for pair in fields.items() for part in pair]
        keys = [self._keys.workers, self._keys.worker(self._consumer)]
        return int(await self._run("beat", keys, self._consumer, expiry_ms, *pairs))

    async def sweep_consumers(self, lane: str, *, idle_ms: int) -> list[str]:
        """Deletes consumer names of `lane` that hold nothing and were idle that long; answers them."""
        deleted = await self._run("sweep_consumers", [self._keys.jobs(lane)], GROUP, idle_ms, HANDOVER)
        return [name.decode() for name in deleted]
