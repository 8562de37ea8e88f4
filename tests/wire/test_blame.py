"""What a job's record says of its crashes: written by whoever owns the entry, and read at the next open."""

from collections.abc import Iterator

import pytest

from tests.wire.resp import RespClient
from tests.wire.workers import MakeWorker, TestWorker, push
from worker.streams.keys import QueueKeys
from worker.streams.leases import Entry
from worker.streams.recovery import read_workers
from worker.streams.scripts import OpenResult, SettleStatus


@pytest.fixture
def full(raw: RespClient) -> Iterator[None]:
    """The server gives memory back at the end."""
    yield
    raw.call("CONFIG", "SET", "maxmemory", "0")


async def opened(worker: TestWorker) -> Entry:
    """A job of that id, taken and opened by `worker`."""
    await push(worker, id="a", prompt="x")
    (entry,) = await worker.take(1)
    await worker.open(entry)
    return entry


async def blame(worker: TestWorker, entry: Entry, crashes: int, solo: int, *, is_alone: bool = False) -> SettleStatus:
    return await worker.outcomes.blame(worker.envelope(entry), crashes=crashes, solo=solo, is_alone=is_alone)


async def open_as(worker: TestWorker, entry: Entry, raw: RespClient, own_attempt: int = 0) -> OpenResult:
    """The entry has come to `worker`, which opens it."""
    raw.call("XCLAIM", worker.keys.jobs(entry.lane), "workers", worker.name, 0, entry.entry_id)
    envelope = worker.envelope(entry)
    return await worker.scripts.open(
        *(entry.lane, entry.entry_id, "a"),
        digest=envelope.digest,
        model="tiny",
        run_ttl_ms=60_000,
        own_attempt=own_attempt,
    )


def marks(raw: RespClient, keys: QueueKeys) -> tuple[str, ...]:
    """crashes, solo and alone, as the record has them."""
    record = raw.hash(keys.state("a"))
    return tuple(record[name] for name in ("crashes", "solo", "alone"))


async def test_the_owner_writes_the_marks_as_often_as_it_likes(make_worker: MakeWorker, raw: RespClient) -> None:
    """A call whose answer was lost is repeated, and counts nothing twice."""
    worker = make_worker("w")
    entry = await opened(worker)
    for _ in range(2):
        assert await blame(worker, entry, 2, 1, is_alone=True) is SettleStatus.DONE
        assert marks(raw, worker.keys) == ("2", "1", "1")
    worker.commands.lose_after = True
    assert await blame(worker, entry, 2, 0) is SettleStatus.DONE
    assert marks(raw, worker.keys) == ("2", "0", "0")
    assert raw.pending(worker.keys.jobs("normal")) == {entry.entry_id: ("w", 0)}, "it is no delivery"


async def test_nobody_else_writes_them(make_worker: MakeWorker, raw: RespClient) -> None:
    """Not who has lost the entry, before or after its new owner opens it; nor anybody once it was handed over."""
    first, second = make_worker("first"), make_worker("second")
    entry = await opened(first)
    raw.call("XCLAIM", first.keys.jobs("normal"), "workers", "second", 0, entry.entry_id)
    assert await blame(first, entry, 9, 9) is SettleStatus.OTHER
    assert await blame(second, entry, 9, 9) is SettleStatus.OTHER, "it was not opened yet"
    await second.open(entry)
    assert await blame(first, entry, 9, 9) is SettleStatus.OTHER
    assert marks(raw, first.keys) == ("1", "0", "0")
    await second.outcomes.hand_over(second.envelope(entry))
    assert await blame(second, entry, 9, 9) is SettleStatus.OTHER
    assert marks(raw, first.keys) == ("1", "0", "0")


async def test_a_record_that_ended_or_is_none_is_left_alone(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    entry = await opened(worker)
    state = worker.keys.state("a")
    raw.call("DEL", state)
    assert await blame(worker, entry, 1, 0) is SettleStatus.UNRECORDED
    assert raw.call("EXISTS", state) == 0, "a record without an expiry"
    raw.call("SET", state, "junk")
    assert await blame(worker, entry, 1, 0) is SettleStatus.UNRECORDED
    assert raw.call("GET", state) == b"junk"
    raw.call("DEL", state)
    raw.call("HSET", state, "entry", f"normal/{entry.entry_id}", "worker", "w", "status", "done")
    assert await blame(worker, entry, 1, 0) is SettleStatus.OTHER


async def test_an_entry_that_nobody_has_keeps_its_marks_too(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    entry = await opened(worker)
    raw.call("DEL", worker.keys.jobs("normal"))
    assert await blame(worker, entry, 1, 0) is SettleStatus.DONE
    assert marks(raw, worker.keys) == ("1", "0", "0")


@pytest.mark.usefixtures("full")
async def test_a_full_server_takes_the_marks(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    entry = await opened(worker)
    raw.call("CONFIG", "SET", "maxmemory", "1")
    assert await blame(worker, entry, 1, 0, is_alone=True) is SettleStatus.DONE
    assert marks(raw, worker.keys) == ("1", "0", "1")


async def test_a_worker_that_is_lost_counts_once_and_as_alone_only_where_the_job_was(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    """After one engine that died under it: the first worker while it was alone, the second while it was not."""
    workers = [make_worker(name) for name in ("first", "second", "third")]
    entry = await opened(workers[0])
    await blame(workers[0], entry, 1, 0)
    await blame(workers[0], entry, 1, 0, is_alone=True)
    result = await open_as(workers[1], entry, raw)
    assert (result.crashes, result.solo) == (2, 1)
    assert marks(raw, workers[0].keys) == ("2", "1", "0")
    result = await open_as(workers[2], entry, raw)
    assert (result.crashes, result.solo) == (3, 1)


async def test_who_opens_its_own_reply_anew_is_as_alone_as_before(make_worker: MakeWorker, raw: RespClient) -> None:
    """The server lost events in a failover: whoever runs the job opens again, and goes on. That is no crash."""
    worker = make_worker("w")
    entry = await opened(worker)
    await blame(worker, entry, 2, 1, is_alone=True)
    result = await open_as(worker, entry, raw, own_attempt=1)
    assert (result.crashes, result.solo) == (2, 1)
    assert marks(raw, worker.keys) == ("2", "1", "1")
    await open_as(worker, entry, raw)
    assert marks(raw, worker.keys) == ("2", "1", "0"), "the entry came once more, and nothing runs yet"


async def test_handing_over_a_job_that_is_alone_is_no_crash(make_worker: MakeWorker, raw: RespClient) -> None:
    first, second = make_worker("first"), make_worker("second")
    entry = await opened(first)
    await blame(first, entry, 2, 1, is_alone=True)
    await first.outcomes.hand_over(first.envelope(entry))
    result = await open_as(second, entry, raw)
    assert (result.crashes, result.solo) == (2, 1)
    assert marks(raw, first.keys) == ("2", "1", "0")


async def test_a_reply_tells_who_has_had_its_job(make_worker: MakeWorker, raw: RespClient) -> None:
    workers = [make_worker(name) for name in ("first", "second", "third")]
    entry = await opened(workers[0])
    reply = workers[0].keys.reply("a")
    ((first_id, _),) = raw.events(reply)
    attempt = first_id.partition("-")[0]
    for number in range(600):  # more than a page of events between the first two
        raw.call("XADD", reply, f"{attempt}-{number + 1}", "e", "token", "ids", "[1]", "n", number + 1)
    for worker in (workers[1], workers[1], workers[2]):
        await open_as(worker, entry, raw)
    assert await read_workers(workers[2].commands, reply) == ["first", "second", "second", "third"]
