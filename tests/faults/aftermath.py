"""What the server holds of a queue when all is over, read without the proxy."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from tests.faults.history import Aftermath, Event
from tests.wire.resp import pairs
from worker.streams.connection import Backoff, Command, Link
from worker.streams.errors import ConnectionLostError
from worker.streams.keys import GROUP, LANES, QueueKeys

PATIENCE_S = 60.0


class Auditor(Link):
    """Only asks, so it may ask again: on a machine with too much to do, an answer that comes late is no finding."""

    def __init__(self, url: str, queue: str | None = None) -> None:
        super().__init__(url, "auditor", queue)

    async def batch(self, commands: Sequence[Command], *, generation: int | None = None) -> list[Any]:
        backoff, deadline_s = Backoff(1.0), time.monotonic() + PATIENCE_S
        while True:
            try:
                return await super().batch(commands, generation=generation)
            except ConnectionLostError:
                if time.monotonic() > deadline_s:
                    raise
                await backoff.wait()


async def until_settled(server: Link, queue: str) -> None:
    """Wait until all lanes are empty."""
    keys = QueueKeys(queue)
    while any([await server.call("XLEN", lane) for lane in keys.lanes]):  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.05)


async def read_aftermath(server: Link, queues: Sequence[str]) -> Aftermath:
    """Of all `queues` together."""
    replies: dict[str, list[Event]] = {}
    queued: list[str] = []
    pending: list[str] = []
    lasting: list[str] = []
    for keys in map(QueueKeys, queues):
        for lane in LANES:
            entries = await server.call("XRANGE", keys.jobs(lane), "-", "+")
            queued += [f"{lane}/{entry_id.decode()} {pairs(flat).get('id')}" for entry_id, flat in entries]
            held = await server.call("XPENDING", keys.jobs(lane), GROUP, "-", "+", 10_000)
            pending += [f"{lane}/{entry_id.decode()} held by {holder.decode()}" for entry_id, holder, _, _ in held]
        for key in await server.call("KEYS", keys.reply("*")):
            events = await server.call("XRANGE", key, "-", "+")
            job_id = key.decode().rpartition(":")[2]
            replies[job_id] = [Event(entry_id.decode(), pairs(flat)) for entry_id, flat in events]
        for kind in (keys.reply, keys.state, keys.cancel):
            found = await server.call("KEYS", kind("*"))
            lasting += [key.decode() for key in found if await server.call("PTTL", key) < 0]
    return Aftermath(replies, queued, pending, lasting)
