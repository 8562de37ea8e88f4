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
# Entries that one call reads to reach one further back: each comes with all its fields, of up to a megabyte.
MAX_IDS_PER_REACH = 32
# A tenant may be ahead of its rate by so many milliseconds' worth.
BURST_MS = 1000.0
SCRIPT_NAMES = (
    "open",
    "blame",
    "renew",
    "settle",
    "drop",
    "hand_over",
    "look_ahead",
    "look_aside",
    "take_waiting",
    "take_lot",
    "admit",
    "charge",
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
    """What settling found, and handing over, and blaming.

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
    entry was opened before; `is_reply_gone`: it was, and nothing is left of its reply. ENDED says how the reply ended:
    `terminal` is `end` or `error`, with the error's code and the `usage` that was told. BLOCKED names the `key` that
    holds what leaves no way to answer.
    """

    status: OpenStatus
    attempt: int = 0
    covered: int = 0
    crashes: int = 0
    solo: int = 0
    cancel_reason: str | None = None
    is_resumed: bool = False
    is_reply_gone: bool = False
    terminal: str = ""
    terminal_code: str = ""
    usage: str | None = None
    key: str = ""


@dataclass(frozen=True, slots=True)
class RenewResult:
    """Entries of one lane that another consumer has, and entries that nobody has (any more)."""

    lost: frozenset[str]
    orphaned: frozenset[str]


@dataclass(frozen=True, slots=True)
class Lot:
    """Entries of one tenant that were read and put back, waiting in the group under the tenant's name."""

    name: str
    num_entries: int
    oldest_id: str


@dataclass(frozen=True, slots=True)
class LaneView:
    """What waits in a lane. `length` counts all entries, also those that run; `entries`: id, lot and limiting fields
    of some that nobody has read; `has_more`: of those there may be more."""

    length: int
    last_delivered_id: str
    lots: tuple[Lot, ...]
    entries: tuple[tuple[str, str, list[bytes]], ...]
    has_more: bool


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
            is_resumed=is_resumed > 0,
            is_reply_gone=is_resumed == 2,
        )

    async def blame(
        self, lane: str, entry_id: str, job_id: str, *, crashes: int, solo: int, is_alone: bool
    ) -> SettleStatus:
        """Writes what is known of a job's crashes into its record: DONE, OTHER or UNRECORDED."""
        keys = self._keys
        answer = await self._run(
            "blame",
            [keys.jobs(lane), keys.state(job_id)],
            *(GROUP, self._consumer, entry_id, lane, crashes, solo, "1" if is_alone else "0"),
        )
        return SettleStatus(answer.decode())

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
        self,
        lane: str,
        entry_id: str,
        job_id: str,
        *,
        idle_ms: int,
        is_urgent: bool = True,
        consumer: str = HANDOVER,
    ) -> SettleStatus:
        """Gives an entry back as if it had been idle for `idle_ms`; a peer takes it once that reaches its lease.

        `is_urgent` wakes the peers. `consumer` is the name that it waits under: a lot's, where it waits for its tenant.
        """
        keys = self._keys
        answer = await self._run(
            "hand_over",
            [keys.jobs(lane), keys.state(job_id), keys.control],
            *(GROUP, self._consumer, entry_id, lane, consumer, idle_ms, "1" if is_urgent else "0"),
        )
        return SettleStatus(answer.decode())

    async def look_ahead(self, lane: str, after: str, *, max_entries: int, touch_ms: int) -> LaneView | None:
        """What waits in `lane`, its unread entries from the id `after` on ("": from the first); None: no such group.

        Entries that lie in a lot for `touch_ms` are touched, so that nobody takes them for a dead worker's.
        """
        answer = await self._run("look_ahead", [self._keys.jobs(lane)], GROUP, after, max_entries, touch_ms)
        if not answer:
            return None
        length, delivered, lots, entries, has_more = answer
        return LaneView(
            length=int(length),
            last_delivered_id=delivered.decode(),
            lots=tuple(Lot(name.decode(), int(num), oldest.decode()) for name, num, oldest in lots),
            entries=tuple((entry_id.decode(), lot.decode(), flat) for entry_id, lot, flat in entries),
            has_more=has_more == 1,
        )

    async def look_aside(
        self, lane: str, consumer: str, after: str, *, max_entries: int
    ) -> list[tuple[str, list[bytes]]]:
        """Ids and limiting fields of what waits in `lane` under a lot's name or handed over, from `after` on."""
        keys = [self._keys.jobs(lane)]
        answer = await self._run("look_aside", keys, GROUP, consumer, after, max_entries)
        return [(entry_id.decode(), flat) for entry_id, flat in answer]

    async def take_waiting(self, lane: str, entry_id: str) -> tuple[list[bytes], int] | None:
        """Takes one entry that waits, wherever; answers its flat fields and deliveries, None where it is gone."""
        answer = await self._reach(lane, entry_id, "0")
        return None if answer is None else (answer[0], int(answer[1]))

    async def set_aside(self, lane: str, entry_id: str) -> None:
        """Puts the unread entries up to `entry_id` into the lots of their tenants."""
        await self._reach(lane, entry_id, "1")

    async def _reach(self, lane: str, entry_id: str, is_aside: str) -> Any:
        arguments = (GROUP, self._consumer, entry_id, HANDOVER, MAX_IDS_PER_REACH, is_aside)
        while (answer := await self._run("take_waiting", [self._keys.jobs(lane)], *arguments)) == b"more":
            pass
        return answer

    async def take_lot(self, lane: str, lot: str, num_entries: int) -> list[tuple[str, list[bytes], int]]:
        """Takes the oldest entries of a lot; answers their ids, flat fields and deliveries."""
        answer = await self._run("take_lot", [self._keys.jobs(lane)], GROUP, self._consumer, lot, num_entries)
        return [(entry_id.decode(), flat, int(deliveries)) for entry_id, flat, deliveries in answer]

    async def admit(
        self,
        lane: str,
        entry_id: str,
        job_id: str,
        tenant: str,
        *,
        lease_ms: int,
        concurrency: int | None,
        rate: float | None,
        is_token_limited: bool,
        run_ttl_ms: int,
    ) -> tuple[str, int]:
        """Whether a job may begin: `admitted`, or what is in the way (`concurrency`, `rate`, `tokens`) and for how
        many ms, 0 where nobody knows."""
        keys = self._keys
        interval_ms = 0.0 if rate is None else 1000 / rate
        answer = await self._run(
            "admit",
            [keys.running(tenant), keys.rate(tenant), keys.token_rate(tenant), keys.state(job_id), *keys.lanes],
            *(GROUP, f"{lane}/{entry_id}", lease_ms, concurrency or 0),
            # A second's worth of jobs may begin at once, and one at least.
            *(interval_ms, max(0.0, BURST_MS - interval_ms), "1" if is_token_limited else "0", BURST_MS),
            *(run_ttl_ms, HANDOVER),
        )
        return answer[0].decode(), int(answer[1]) if len(answer) > 1 else 0

    async def charge(self, tenant: str, num_tokens: int, token_rate: float) -> None:
        """Charges a tenant for tokens that it has had."""
        await self._run("charge", [self._keys.token_rate(tenant)], 1000 * num_tokens / token_rate)

    async def beat(self, *, expiry_ms: int, fields: Mapping[str, str | int | float]) -> int:
        """Writes this worker's entry in the registry; answers the server's time in ms."""
        pairs = [part for pair in fields.items() for part in pair]
        keys = [self._keys.workers, self._keys.worker(self._consumer)]
        return int(await self._run("beat", keys, self._consumer, expiry_ms, *pairs))

    async def sweep_consumers(self, lane: str, *, idle_ms: int) -> list[str]:
        """Deletes consumer names of `lane` that hold nothing and were idle that long; answers them."""
        deleted = await self._run("sweep_consumers", [self._keys.jobs(lane)], GROUP, idle_ms, HANDOVER)
        return [name.decode() for name in deleted]
