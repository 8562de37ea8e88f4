"""A worker without room: it ends what nobody needs to run, and takes nothing else."""

import pytest

from tests.wire.resp import RespClient
from tests.wire.workers import MakeWorker, TestWorker, push
from worker.errors import ErrorCode
from worker.streams import backlog, overload
from worker.streams.errors import ConnectionLostError
from worker.streams.keys import lot_of
from worker.streams.leases import Entry
from worker.streams.overload import OldestWatch
from worker.streams.scripts import LaneView


def watch(worker: TestWorker, max_depth: int = 0) -> OldestWatch:
    return OldestWatch(
        worker.commands,
        worker.scripts,
        worker.keys,
        worker.clock,
        worker.leases,
        max_depth,
    )


async def looks(oldest: OldestWatch) -> list[Entry]:
    """What the first of several looks takes that takes anything: one goes on where the last one stopped."""
    for _ in range(100):
        if entries := await oldest.look():
            return entries
    raise AssertionError("nothing was taken in 100 looks")


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


async def test_the_oldest_are_shed_from_a_lane_that_is_too_long(make_worker: MakeWorker, raw: RespClient) -> None:
    """All that are too many at once: a lane may grow faster than by one job a second."""
    worker = make_worker("w")
    oldest = watch(worker, max_depth=2)
    ids = [await push(worker, id=f"job{number}", prompt="x") for number in range(4)]
    shed = await oldest.look()
    assert [(entry.entry_id, entry.must_end) for entry in shed] == [(each, ErrorCode.OVERLOADED) for each in ids[:2]]
    assert (oldest.depths["normal"], oldest.is_due) == (4, False)
    assert await oldest.look() == [], "those that end are in the lane until they are settled"
    for entry in shed:
        await worker.outcomes.drop(entry)
    assert await oldest.look() == []
    assert raw.call("XLEN", worker.keys.jobs("normal")) == 2


async def test_workers_that_look_at_once_shed_no_more_than_is_too_much(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    workers = [make_worker(f"w{number}") for number in range(3)]
    watches = [watch(worker, max_depth=4) for worker in workers]
    for worker in workers:
        raw.call("ZADD", worker.keys.workers, 1, worker.name)
    ids = [await push(workers[0], id=f"job{number}", prompt="x") for number in range(10)]
    shed = [entry for oldest in watches for entry in await oldest.look()]
    assert [entry.entry_id for entry in shed] == ids[:6], "none of them is settled yet"
    assert {entry.must_end for entry in shed} == {ErrorCode.OVERLOADED}


async def test_what_was_taken_before_the_connection_was_lost_is_not_held(
    make_worker: MakeWorker, raw: RespClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held and never handed on, it would be renewed for ever, and nobody would end it."""
    worker = make_worker("w")
    await push(worker, "high", id="a", prompt="x", deadline_ms="5")
    look_ahead = worker.scripts.look_ahead

    async def lose_the_second(lane: str, after: str, *, max_entries: int, touch_ms: int) -> LaneView | None:
        worker.commands.lose_after = lane != "high"
        return await look_ahead(lane, after, max_entries=max_entries, touch_ms=touch_ms)

    monkeypatch.setattr(worker.scripts, "look_ahead", lose_the_second)
    with pytest.raises(ConnectionLostError):
        await watch(worker).look()
    assert [consumer for consumer, _ in raw.pending(worker.keys.jobs("high")).values()] == ["w"]
    assert len(worker.leases) == 0


async def test_a_faster_peer_leaves_nothing_to_take(make_worker: MakeWorker) -> None:
    worker, peer = make_worker("w"), make_worker("peer")
    await push(worker, id="a", prompt="x", deadline_ms="5")
    await push(worker, id="b", prompt="x")
    view = await worker.scripts.look_ahead("normal", "", max_entries=1, touch_ms=1000)
    assert view is not None
    head = view.entries[0][0]
    await peer.take(1, room=1)
    assert await worker.scripts.take_waiting("normal", head) is None


async def test_what_is_known_is_not_sent_twice_and_a_prompt_never(make_worker: MakeWorker) -> None:
    """A large job would otherwise cross the network every second, only to be looked at."""
    worker = make_worker("w")
    entry_id = await push(worker, id="a", tenant="acme", prompt="x", ttl_ms="5", idempotency_key="k" * 2000)
    view = await worker.scripts.look_ahead("normal", "", max_entries=8, touch_ms=1000)
    assert view is not None
    fields = [b"id", b"a", b"tenant", b"acme", b"ttl_ms", b"5", b"idempotency_key", b"k" * 1024]
    assert view.entries == ((entry_id, lot_of(b"acme"), fields),)
    view = await worker.scripts.look_ahead("normal", entry_id, max_entries=8, touch_ms=1000)
    assert view is not None
    assert (view.length, view.entries) == (1, ())


@pytest.mark.parametrize("why", [ErrorCode.CANCELLED, ErrorCode.DEADLINE_EXCEEDED])
async def test_a_job_in_the_middle_of_a_lane_is_ended_and_the_others_keep_their_order(
    make_worker: MakeWorker, raw: RespClient, why: ErrorCode
) -> None:
    """A group read reaches only the head, so what lies before it is read too, and waits in its tenant's lot."""
    worker = make_worker("w")
    oldest = watch(worker)
    overdue = {"deadline_ms": "5"} if why is ErrorCode.DEADLINE_EXCEEDED else {}
    ids = [
        await push(worker, id=f"job{number}", prompt="x", **(overdue if number == 70 else {})) for number in range(80)
    ]
    if why is ErrorCode.CANCELLED:
        raw.call("SET", worker.keys.cancel("job70"), "user left", "EX", 86400)
    (entry,) = await looks(oldest)
    assert (entry.fields[b"id"], entry.must_end, entry.deliveries) == (b"job70", why, 1)
    assert len(worker.leases) == 1
    pending = raw.pending(worker.keys.jobs("normal"))
    assert pending == {entry.entry_id: ("w", 1)} | dict.fromkeys(ids[:70] + ids[71:72], (lot_of(b""), 0))
    assert await worker.outcomes.drop(entry)
    # The next one is read as well, or the lag would be null. (6.2 knows none.)
    assert raw.group(worker.keys.jobs("normal")).get("lag", 8) == 8
    await push(worker, id="later", prompt="x")
    assert await oldest.look() == []
    lot = [entry.entry_id for entry in await oldest.backlog.take_lot("normal", lot_of(b""), 1000)]
    assert lot == ids[:70] + ids[71:72]


async def test_a_job_between_owners_is_ended_though_nobody_has_room(make_worker: MakeWorker, raw: RespClient) -> None:
    former, worker = make_worker("former"), make_worker("w")
    await push(former, id="a", prompt="x")
    (entry,) = await former.take(1)
    await former.open(entry)
    await former.outcomes.hand_over(former.envelope(entry))
    raw.call("SET", worker.keys.cancel("a"), "user left", "EX", 86400)
    (again,) = await watch(worker).look()
    assert (again.entry_id, again.must_end, again.deliveries) == (entry.entry_id, ErrorCode.CANCELLED, 1)


async def test_a_hint_names_a_job_further_back_than_one_look_asks_for(
    make_worker: MakeWorker, raw: RespClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overload, "MAX_MARKS_PER_LOOK", 2)
    worker = make_worker("w")
    oldest = watch(worker)
    for number in range(5):
        await push(worker, id=f"job{number}", prompt="x")
    for number in (0, 3):
        raw.call("SET", worker.keys.cancel(f"job{number}"), "", "EX", 86400)
    oldest.hint_cancel({"job3", "unknown"})
    was_due = oldest.is_due
    assert [entry.fields[b"id"] for entry in await oldest.look()] == [b"job0", b"job3"]
    assert (was_due, oldest.is_due) == (True, False)
    raw.call("SET", worker.keys.cancel("job4"), "", "EX", 86400)
    assert [entry.fields[b"id"] for entry in await looks(oldest)] == [b"job4"], "without a hint the looks go round"


async def test_a_typed_id_from_the_future_has_its_time_from_when_it_is_picked_up(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker("w")
    future = f"{worker.clock.now_ms() + 3_600_000}-0"
    await worker.commands.call("XADD", worker.keys.jobs("normal"), future, "prompt", "x", "ttl_ms", 1)
    oldest = watch(worker)
    now_ms = worker.clock.now_ms
    for later_ms in (0, 1000, 100_000):
        monkeypatch.setattr(worker.clock, "now_ms", lambda later_ms=later_ms: now_ms() + later_ms)
        assert await oldest.look() == []


async def test_what_was_handed_over_half_done_is_not_shed(make_worker: MakeWorker) -> None:
    former, worker = make_worker("former"), make_worker("w")
    await push(former, id="begun", prompt="x")
    (entry,) = await former.take(1)
    await former.open(entry)
    await former.outcomes.hand_over(former.envelope(entry))
    for number in range(3):
        await push(worker, id=f"job{number}", prompt="x")
    shed = await watch(worker, max_depth=2).look()
    assert [entry.fields[b"id"] for entry in shed] == [b"job0", b"job1"]


async def test_a_group_that_is_made_anew_is_looked_through_anew(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    oldest = watch(worker)
    await push(worker, id="a", prompt="x")
    await worker.take(1)
    await push(worker, id="b", prompt="x")
    assert await oldest.look() == []
    raw.call("XGROUP", "DESTROY", worker.keys.jobs("normal"), "workers")
    assert await oldest.look() == []
    await worker.source.ensure_groups()
    raw.call("SET", worker.keys.cancel("a"), "", "EX", 86400)
    worker.leases.release(next(iter(worker.leases.entries())).key)
    assert [entry.fields[b"id"] for entry in await looks(oldest)] == [b"a"]


@pytest.mark.parametrize("fields", [("", ""), ("id", "not an id", "deadline_ms", "x")])
async def test_malformed_heads_are_left_for_whoever_has_room(make_worker: MakeWorker, fields: tuple[str, ...]) -> None:
    worker = make_worker("w")
    await worker.commands.call("XADD", worker.keys.jobs("normal"), "*", *fields)
    assert await watch(worker).look() == []


async def test_what_peers_have_taken_meanwhile_is_forgotten(
    make_worker: MakeWorker, raw: RespClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From lots and from what was handed over, however many pages they have."""
    monkeypatch.setattr(backlog, "PAGE", 2)
    peer, worker = make_worker("peer"), make_worker("w")
    oldest = watch(worker)
    for number in range(5):
        await push(peer, id=f"job{number}", prompt="x")
    for entry in await peer.take(5):
        await peer.outcomes.hand_over(peer.envelope(entry))
    ids = [await push(peer, id=f"waiting{number}", prompt="x") for number in range(5)]
    await peer.scripts.set_aside("normal", ids[-1])
    for _ in range(6):
        assert await oldest.look() == []
    known = await oldest.backlog.look("normal")
    assert known is not None
    assert known.num_known == 10
    for entry in [*await peer.source.reclaim(3), *await oldest.backlog.take_lot("normal", lot_of(b""), 3)]:
        await peer.outcomes.drop(entry)
    raw.call("XDEL", worker.keys.jobs("normal"), *ids[:3])
    for _ in range(6):
        assert await oldest.look() == []
    assert known.num_known == 4


async def test_nothing_is_kept_of_tenants_whose_lots_were_looked_through_or_are_gone(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their names are their clients' choice, so there may be any number of them."""
    monkeypatch.setattr(backlog, "PAGE", 2)
    worker = make_worker("w")
    oldest = watch(worker)
    names = [f"tenant{number}" for number in range(4)]
    for number in range(12):
        last = await push(worker, prompt="x", tenant=names[number % 4])
    await worker.scripts.set_aside("normal", last)
    assert await oldest.look() == []
    known = oldest.backlog._lanes["normal"]
    assert set(known.cursors) == {lot_of(name.encode()) for name in names}, "each has a second page"
    assert await oldest.look() == []
    assert (known.cursors, known._seen) == ({}, {})
    assert await oldest.look() == []
    for name in names:
        await oldest.backlog.take_lot("normal", lot_of(name.encode()), 3)
    assert await oldest.look() == []
    assert (known.cursors, known._seen, known.num_known) == ({}, {}, 0)


async def test_no_more_is_known_of_a_lane_than_there_is_room_for(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "PAGE", 8)
    monkeypatch.setattr(backlog, "MAX_KNOWN", 8)
    worker = make_worker("w")
    oldest = watch(worker)
    for number in range(20):
        await push(worker, id=f"job{number}", prompt="x", deadline_ms="5" if number == 19 else "9999999999999")
    for _ in range(4):
        assert await oldest.look() == []
    known = await oldest.backlog.look("normal")
    assert known is not None
    assert known.num_known == 8
    await worker.take(13, room=13)
    assert [entry.fields[b"id"] for entry in await looks(oldest)] == [b"job19"]
