"""What the server holds of a queue when all is over, read without the proxy."""

import asyncio
from collections.abc import Sequence

from tests.faults.history import Aftermath, Event
from tests.wire.resp import pairs
from worker.streams.connection import Link
from worker.streams.keys import GROUP, LANES, QueueKeys


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
