"""A worker without room: it ends what nobody needs to run, and takes nothing else."""

import pytest

from tests.wire.resp import RespClient
from tests.wire.workers import MakeWorker, TestWorker, push
from worker.errors import ErrorCode
from worker.protocol import parse_envelope
from worker.streams.errors import ConnectionLostError
from worker.streams.overload import OldestWatch


def watch(worker: TestWorker, max_depth: int = 0) -> OldestWatch:
    return OldestWatch(
        worker.commands,
        worker.scripts,
        worker.keys,
        worker.clock,
        worker.leases,
        lambda entry, now_ms: parse_envelope(entry.lane, entry.entry_id, entry.fields, now_ms=now_ms),
        max_depth,
    )


async def test_nothing_is_taken_that_may_still_run(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    oldest = watch(worker, max_depth=10)
    assert await oldest.look() == []
    await push(worker, id="a", prompt="x", ttl_ms="600000")
    for _ in range(3):
        assert await oldest.look() == []
    assert raw.pending(worker.keys.jobs("normal")) == {}


async def test_the_oldest_is_taken_once_its_time_is_up(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    oldest = watch(worker)
    await push(worker, id="a", prompt="x", deadline_ms="5")
    await push(worker, id="b", prompt="x")
    (entry,) = await oldest.look()
    assert (entry.fields[b"id"], entry.must_end) == (b"a", ErrorCode.DEADLINE_EXCEEDED)
    assert worker.leases.is_held(entry.key)
    assert list(raw.pending(worker.keys.jobs("normal"))) == [entry.entry_id]
    assert await oldest.look() == [], "the next one has time"


async def test_a_cancelled_job_is_met_while_it_waits(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    oldest = watch(worker)
    await push(worker, "low", id="a", prompt="x")
    assert await oldest.look() == []
    raw.call("SET", worker.keys.cancel("a"), "user left", "EX", 86400)
    (entry,) = await oldest.look()
    assert (entry.lane, entry.must_end) == ("low", ErrorCode.CANCELLED)


async def test_the_oldest_is_shed_from_a_lane_that_is_too_long(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    oldest = watch(worker, max_depth=2)
    ids = [await push(worker, id=f"job{number}", prompt="x") for number in range(4)]
    shed = []
    for _ in range(4):
        for entry in await oldest.look():
            assert entry.must_end is ErrorCode.OVERLOADED
            shed.append(entry.entry_id)
            await worker.outcomes.drop(entry)
    assert shed == ids[:2]
    assert raw.call("XLEN", worker.keys.jobs("normal")) == 2


async def test_what_was_taken_before_the_connection_was_lost_is_not_held(
    make_worker: MakeWorker, raw: RespClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held and never handed on, it would be renewed for ever, and nobody would end it."""
    worker = make_worker("w")
    await push(worker, "high", id="a", prompt="x", deadline_ms="5")
    peek = worker.scripts.peek_oldest

    async def lose_the_second(lane: str, known_entry_id: str = "") -> tuple[int, str | None, list[bytes] | None]:
        worker.commands.lose_after = lane != "high"
        return await peek(lane, known_entry_id)

    monkeypatch.setattr(worker.scripts, "peek_oldest", lose_the_second)
    with pytest.raises(ConnectionLostError):
        await watch(worker).look()
    assert [consumer for consumer, _ in raw.pending(worker.keys.jobs("high")).values()] == ["w"]
    assert len(worker.leases) == 0


async def test_a_faster_peer_leaves_nothing_to_take(make_worker: MakeWorker) -> None:
    worker, peer = make_worker("w"), make_worker("peer")
    await push(worker, id="a", prompt="x", deadline_ms="5")
    await push(worker, id="b", prompt="x")
    _, head, _ = await worker.scripts.peek_oldest("normal")
    assert head is not None
    await peer.take(1, room=1)
    assert await worker.scripts.take_oldest("normal", head) is None


async def test_a_known_head_is_not_sent_twice(make_worker: MakeWorker) -> None:
    """A large job at the head would otherwise cross the network every second."""
    worker = make_worker("w")
    entry_id = await push(worker, id="a", prompt="x")
    assert await worker.scripts.peek_oldest("normal") == (1, entry_id, [b"id", b"a", b"prompt", b"x"])
    assert await worker.scripts.peek_oldest("normal", entry_id) == (1, entry_id, None)


@pytest.mark.parametrize("fields", [("", ""), ("id", "not an id", "deadline_ms", "x")])
async def test_malformed_heads_are_left_for_whoever_has_room(make_worker: MakeWorker, fields: tuple[str, ...]) -> None:
    worker = make_worker("w")
    await worker.commands.call("XADD", worker.keys.jobs("normal"), "*", *fields)
    assert await watch(worker).look() == []
