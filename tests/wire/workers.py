"""Workers for the tests of the wire: the real parts on a real server, with faults that can be switched on."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from worker.protocol import JobEnvelope, parse_envelope
from worker.streams.clock import ServerClock
from worker.streams.connection import Command, Link
from worker.streams.errors import ConnectionLostError
from worker.streams.jobs import JobSource, SourceOptions
from worker.streams.keys import LANES, QueueKeys
from worker.streams.leases import Entry, Leases, Loss
from worker.streams.outcomes import Outcomes
from worker.streams.replies import Replies
from worker.streams.reply_writer import ReplyWriter
from worker.streams.scripts import OpenStatus, Scripts

LEASE_MS = 1200


class FaultyLink(Link):
    """A link that can lose the connection before a batch is sent, or after the server has carried it out."""

    lose_before = False
    lose_after = False

    async def batch(self, commands: Sequence[Command], *, generation: int | None = None) -> list[Any]:
        if self.lose_before:
            self.lose_before = False
            await self.reset()
            raise ConnectionLostError("lost before the send, by the test")
        answers = await super().batch(commands, generation=generation)
        if self.lose_after:
            self.lose_after = False
            await self.reset()
            raise ConnectionLostError("the answer was lost, by the test")
        return answers


MakeLink = Callable[[str, str, str], FaultyLink]


class TestWorker:
    """One worker's parts, without an engine: each test does the steps itself."""

    __test__ = False

    def __init__(self, url: str, keys: QueueKeys, name: str, make_link: MakeLink = FaultyLink) -> None:
        self.keys = keys
        self.name = name
        self.links = tuple(make_link(url, part, keys.queue) for part in ("commands", "jobs", "replies", "leases"))
        self.commands, self.jobs_link, self.reply_link, self.lease_link = self.links
        self.clock = ServerClock()
        self.losses: list[tuple[Entry, Loss]] = []
        self.scripts = Scripts(self.commands, keys, name)
        lease_scripts = Scripts(self.lease_link, keys, name)
        self.leases = Leases(lease_scripts, LEASE_MS, lambda entry, loss: self.losses.append((entry, loss)))
        options = SourceOptions(lease_ms=LEASE_MS, block_ms=20)
        self.source = JobSource(self.jobs_link, keys, name, self.leases, options)
        self.replies = Replies(self.reply_link, self.scripts, self.commands, keys, self.clock, model="tiny")
        self.outcomes = Outcomes(self.scripts, self.leases, LEASE_MS)
        self.closed: list[ReplyWriter] = []

    async def take(self, num_entries: int, room: int = 8) -> list[Entry]:
        """Reads until `num_entries` have come."""
        entries: list[Entry] = []
        async with asyncio.timeout(10):
            while len(entries) < num_entries:
                entries += await self.source.take(room - len(entries))
        return entries

    def envelope(self, entry: Entry) -> JobEnvelope:
        """The envelope of an entry picked up now."""
        return parse_envelope(entry.lane, entry.entry_id, entry.fields, now_ms=self.clock.now_ms())

    async def renew(self) -> None:
        """Renews all leases and hears of those that are lost."""
        self.leases.tell(await self.leases.renew())

    async def open(self, entry: Entry) -> ReplyWriter:
        """Opens the reply, which must succeed."""
        result, writer = await self.replies.open(self.envelope(entry), self.closed.append)
        assert result.status is OpenStatus.OPENED, result
        assert writer is not None
        return writer

    async def close(self) -> None:
        """Closes the connections."""
        for link in self.links:
            await link.close()


async def push(worker: TestWorker, lane: str = "normal", **fields: str) -> str:
    """XADDs a job with `fields` (a prompt if it has none); answers its entry id."""
    assert lane in LANES
    job = fields or {"prompt": "hello"}
    flat = [part for pair in job.items() for part in pair]
    entry_id = await worker.commands.call("XADD", worker.keys.jobs(lane), "*", *flat)
    return str(entry_id.decode())


async def eventually(is_true: Callable[[], bool], timeout_s: float = 10) -> None:
    """Waits for something that another task or the server brings about."""
    async with asyncio.timeout(timeout_s):
        while not is_true():  # noqa: ASYNC110 - what is waited for tells nobody when it happens
            await asyncio.sleep(0.002)


MakeWorker = Callable[[str], TestWorker]
