"""A server at its memory limit: what may still be written, and in which order the scripts must therefore write."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.wire.resp import RespClient, RespError
from tests.wire.workers import MakeWorker, push
from worker.streams.errors import ServerError
from worker.streams.keys import HANDOVER
from worker.streams.reply_writer import ReplyStatus
from worker.streams.scripts import SettleStatus


class Fullness:
    """Fills and empties the server."""

    def __init__(self, raw: RespClient) -> None:
        self._raw = raw

    def fill(self) -> None:
        self._raw.call("CONFIG", "SET", "maxmemory", "1")

    def empty(self) -> None:
        self._raw.call("CONFIG", "SET", "maxmemory", "0")


@pytest.fixture
def server(raw: RespClient) -> Iterator[Fullness]:
    fullness = Fullness(raw)
    yield fullness
    fullness.empty()


def test_of_two_pipelined_events_a_server_can_refuse_the_first_and_take_the_second(
    raw: RespClient, server: Fullness
) -> None:
    """Why a reply has one write in flight."""
    raw.call("XADD", "pagemill:{full}:reply:a", "5-0", "e", "open")
    server.fill()
    (refused,) = raw.pipeline(("XADD", "pagemill:{full}:reply:a", "5-1", "e", "token"))
    server.empty()
    (taken,) = raw.pipeline(("XADD", "pagemill:{full}:reply:a", "5-2", "e", "token"))
    assert isinstance(refused, RespError)
    assert taken == b"5-2"
    with pytest.raises(RespError, match="equal or smaller"):
        raw.call("XADD", "pagemill:{full}:reply:a", "5-1", "e", "token")
    raw.call("DEL", "pagemill:{full}:reply:a")


async def test_a_full_server_refuses_an_open_and_keeps_nothing_of_it(
    make_worker: MakeWorker, raw: RespClient, server: Fullness
) -> None:
    worker = make_worker("w")
    await push(worker, id="a", prompt="x")
    (entry,) = await worker.take(1)
    server.fill()
    with pytest.raises(ServerError) as caught:
        await worker.replies.open(worker.envelope(entry))
    assert caught.value.is_passing
    server.empty()
    assert raw.call("EXISTS", worker.keys.reply("a"), worker.keys.state("a")) == 0
    assert (await worker.open(entry)).last_id.endswith("-0")


async def test_a_full_server_still_lets_jobs_be_renewed_and_settled(
    make_worker: MakeWorker, raw: RespClient, server: Fullness
) -> None:
    worker = make_worker("w")
    await push(worker, id="a", prompt="x")
    (entry,) = await worker.take(1)
    writer = await worker.open(entry)
    writer.end("length", usage={}, receipt={})
    await worker.replies.flush()
    server.fill()
    await worker.renew()
    assert worker.losses == []
    assert await worker.outcomes.settle(worker.envelope(entry), "done") is SettleStatus.DONE
    server.empty()
    assert raw.hash(worker.keys.state("a"))["status"] == "done"
    assert raw.call("XLEN", worker.keys.jobs("normal")) == 0


async def test_a_full_server_still_lets_jobs_be_dropped_and_handed_over(
    make_worker: MakeWorker, raw: RespClient, server: Fullness
) -> None:
    worker = make_worker("w")
    await push(worker, id="a", prompt="x")
    await push(worker, id="b", prompt="x")
    first, second = await worker.take(2)
    await worker.open(first)
    server.fill()
    assert await worker.outcomes.hand_over(worker.envelope(first))
    assert await worker.outcomes.drop(second)
    server.empty()
    assert raw.pending(worker.keys.jobs("normal")) == {first.entry_id: (HANDOVER, 0)}
    assert raw.hash(worker.keys.state("a"))["status"] == "queued"


async def test_tokens_wait_for_a_full_server_and_none_is_lost(
    make_worker: MakeWorker, raw: RespClient, server: Fullness
) -> None:
    """The event that was refused is sent again as it was; what came meanwhile goes into the next one."""
    worker = make_worker("w")
    await push(worker, id="a", prompt="x")
    (entry,) = await worker.take(1)
    writer = await worker.open(entry)
    server.fill()
    writer.token([1], "a")
    assert not await worker.replies.flush()
    in_flight = writer.in_flight
    writer.token([2], "b")
    assert not await worker.replies.flush()
    assert writer.in_flight is in_flight
    server.empty()
    writing = asyncio.create_task(worker.replies.run())
    await worker.replies.drained(writer)
    writing.cancel()
    tokens = [event["ids"] for _, event in raw.events(worker.keys.reply("a")) if event["e"] == "token"]
    assert tokens == ["[1]", "[2]"]
    assert writer.status is ReplyStatus.LIVE
