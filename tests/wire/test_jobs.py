"""Taking work: bursts spread, lanes are weighted, the dead are found wherever they lie, nothing is taken twice."""

import asyncio
import itertools
import random
from collections import Counter
from typing import Any

import pytest

from tests.wire.resp import RespClient
from tests.wire.workers import LEASE_MS, MakeWorker, TestWorker, eventually, push
from worker.streams.errors import ConnectionLostError
from worker.streams.jobs import JobSource, SourceOptions, entry_of
from worker.streams.keys import LANES
from worker.streams.lanes import LaneOrder
from worker.streams.leases import Entry, EntryKey

pytestmark = pytest.mark.every_topology


def add(raw: RespClient, worker: TestWorker, lane: str, num: int) -> list[str]:
    answers = raw.pipeline(*[("XADD", worker.keys.jobs(lane), "*", "prompt", "x")] * num)
    return [entry_id.decode() for entry_id in answers]


def leave_dead(
    raw: RespClient, worker: TestWorker, lane: str, num: int, idle_ms: int = 2 * LEASE_MS, consumer: str = "dead"
) -> list[str]:
    """Entries that a worker read before it died."""
    ids = add(raw, worker, lane, num)
    key = worker.keys.jobs(lane)
    raw.call("XREADGROUP", "GROUP", "workers", consumer, "COUNT", num, "STREAMS", key, ">")
    raw.call("XCLAIM", key, "workers", consumer, 0, *ids, "IDLE", idle_ms, "JUSTID")
    return ids


async def test_a_burst_spreads_over_idle_workers(make_worker: MakeWorker, raw: RespClient) -> None:
    """With COUNT as large as the room one worker takes almost all."""
    workers = [make_worker(f"w{number}") for number in range(4)]
    add(raw, workers[0], "normal", 100)

    async def drain(worker: TestWorker) -> None:
        while await worker.source.take(128):
            pass

    await asyncio.gather(*map(drain, workers))
    shares = Counter(consumer for consumer, _ in raw.pending(workers[0].keys.jobs("normal")).values())
    assert shares.total() == 100
    assert max(shares.values()) <= 60


async def test_no_read_brings_more_than_eight_or_the_room(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    add(raw, worker, "normal", 30)
    assert len(await worker.source.take(128)) == 8
    assert len(await worker.source.take(3)) == 3


async def test_lanes_are_served_by_weight_and_none_starves(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    for lane in LANES:
        add(raw, worker, lane, 1000)
    counts: Counter[str] = Counter()
    while counts.total() < 1300:
        counts.update(entry.lane for entry in await worker.source.take(8))
    shares = {lane: counts[lane] / counts.total() for lane in LANES}
    assert shares["high"] == pytest.approx(8 / 13, rel=0.1)
    assert shares["normal"] == pytest.approx(4 / 13, rel=0.1)
    assert shares["low"] == pytest.approx(1 / 13, rel=0.1)


async def test_jobs_that_came_one_by_one_are_held_against_no_lane(make_worker: MakeWorker, raw: RespClient) -> None:
    """A worker that waits gets them by blocking reads, while no other lane has any: nobody was passed over."""
    worker = make_worker("w")
    for _ in range(20):
        add(raw, worker, "high", 1)
        assert [entry.lane for entry in await worker.source.wait(1000)] == ["high"]
        assert await worker.source.take_at_once(8) == []
    for lane in LANES:
        add(raw, worker, lane, 13)
    counts: Counter[str] = Counter()
    while counts.total() < 13:
        counts.update(entry.lane for entry in await worker.source.take(1))
    assert counts == {"high": 8, "normal": 4, "low": 1}


async def test_strict_order_serves_the_low_lane_last(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    worker.source.lanes.use("strict")
    for lane in LANES:
        add(raw, worker, lane, 10)
    entries = await worker.take(30, room=30)
    assert [entry.lane for entry in entries] == ["high"] * 10 + ["normal"] * 10 + ["low"] * 10


async def test_an_idle_lane_saves_nothing_up() -> None:
    order = LaneOrder()
    for _ in range(1000):
        order.charge("high", 1, ["low"] if order.order()[0] == "low" else [])
    order.charge("high", 1, ["normal", "low"])
    served = []
    for _ in range(26):
        lane = order.order()[0]
        order.charge(lane, 1)
        served.append(lane)
    assert Counter(served)["low"] <= 3


async def test_a_blocking_read_may_bring_one_entry_per_lane(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    await worker.source.ensure_groups()
    await worker.source.take(1)
    reading = asyncio.create_task(worker.source.take(1))
    await eventually(lambda: b"blocked_clients:0" not in raw.call("INFO", "clients") or reading.done())
    raw.pipeline(("MULTI",), *[("XADD", worker.keys.jobs(lane), "*", "prompt", "x") for lane in LANES], ("EXEC",))
    entries = await reading or await worker.source.take(1)
    assert 1 <= len(entries) <= 3
    assert all(worker.leases.is_held(entry.key) for entry in entries)


async def test_nothing_is_an_empty_list(make_worker: MakeWorker) -> None:
    worker = make_worker("w")
    assert [await worker.source.take(4) for _ in range(3)] == [[], [], []]


async def test_a_dead_entry_far_back_among_living_ones_is_found(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    living = leave_dead(raw, worker, "normal", 100, idle_ms=0)
    (dead,) = leave_dead(raw, worker, "normal", 1)
    (entry,) = await worker.source.reclaim(1)
    assert entry.entry_id == dead
    assert dead not in living


async def test_a_scan_that_the_room_stopped_goes_on_where_it_was(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    dead = {("low", entry_id) for entry_id in leave_dead(raw, worker, "low", 20)}
    dead |= {("high", entry_id) for entry_id in leave_dead(raw, worker, "high", 20)}
    found = []
    for room in (5, 100, 100, 100, 100, 100):
        found += [entry.key for entry in await worker.source.reclaim(room)]
    assert len(found) == len(set(found)) == 40
    assert set(found) == dead


async def test_reclaimed_entries_tell_their_deliveries(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    (entry_id,) = leave_dead(raw, worker, "normal", 1)
    key = worker.keys.jobs("normal")
    raw.call("XCLAIM", key, "workers", "dead", 0, entry_id, "RETRYCOUNT", 9, "IDLE", 2 * LEASE_MS, "JUSTID")
    (entry,) = await worker.source.reclaim(1)
    assert (entry.deliveries, entry.fields) == (10, {b"prompt": b"x"})


async def test_what_a_living_peer_holds_is_left_alone(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    leave_dead(raw, worker, "normal", 5, idle_ms=LEASE_MS // 2)
    assert await worker.source.reclaim(8) == []


async def test_nothing_is_reclaimed_right_after_a_connect(make_worker: MakeWorker, raw: RespClient) -> None:
    """After an outage all entries look dead; the living renew first. A hint changes nothing about that."""
    worker = make_worker("w")
    leave_dead(raw, worker, "normal", 3)
    for _ in range(3):
        worker.source.hint_reclaim()
        assert await worker.source.take(8) == []
    assert len(await worker.take(3)) == 3
    leave_dead(raw, worker, "normal", 1)
    await worker.jobs_link.reset()
    worker.source.hint_reclaim()
    assert await worker.source.take(8) == []
    assert worker.source.stats.num_reclaimed == 3


async def test_what_is_reclaimed_goes_before_new_entries(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    leave_dead(raw, worker, "low", 1)
    async with asyncio.timeout(10):
        while worker.source.stats.num_reclaimed == 0:
            entries = await worker.source.take(1)
    assert [entry.lane for entry in entries] == ["low"]
    leave_dead(raw, worker, "low", 1)
    add(raw, worker, "high", 1)
    worker.source.hint_reclaim()
    assert [entry.lane for entry in await worker.source.take(4)] == ["low"]


@pytest.mark.parametrize("how", ["reclaim", "reconcile"])
async def test_what_was_claimed_before_the_connection_was_lost_is_claimed_again(
    make_worker: MakeWorker, raw: RespClient, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """An entry that is held but was never handed on would be renewed for ever, and nobody would run it."""
    worker = make_worker("w")
    consumer = "w" if how == "reconcile" else "dead"
    dead = {(lane, entry_id) for lane in LANES for entry_id in leave_dead(raw, worker, lane, 1, consumer=consumer)}
    call, num_calls = worker.jobs_link.call, itertools.count()

    async def lose_the_last(*command: str | int) -> Any:
        worker.jobs_link.lose_after = next(num_calls) == 4
        return await call(*command)

    monkeypatch.setattr(worker.jobs_link, "call", lose_the_last)
    with pytest.raises(ConnectionLostError):
        await (worker.source.reclaim(8) if how == "reclaim" else worker.source.reconcile())
    assert len(worker.leases) == 0
    for lane, entry_id in dead:
        raw.call("XCLAIM", worker.keys.jobs(lane), "workers", "w", 0, entry_id, "IDLE", 2 * LEASE_MS, "JUSTID")
    assert {entry.key for entry in await worker.source.reclaim(8)} == dead


async def test_a_trimmed_entry_is_skipped_acknowledged_and_counted(make_worker: MakeWorker, raw: RespClient) -> None:
    """6.2 answers nil for it, later servers list its id."""
    worker = make_worker("w")
    leave_dead(raw, worker, "normal", 3)
    (kept,) = leave_dead(raw, worker, "normal", 1)
    raw.call("XTRIM", worker.keys.jobs("normal"), "MAXLEN", 1)
    entries = [entry for _ in range(3) for entry in await worker.source.reclaim(8)]
    assert [entry.entry_id for entry in entries] == [kept]
    assert worker.source.stats.num_lost_trimmed == 3
    assert list(raw.pending(worker.keys.jobs("normal"))) == [kept]


async def test_entries_whose_delivery_was_lost_are_taken_up(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    await worker.source.take(4)
    ids = add(raw, worker, "normal", 3)
    raw.call("XREADGROUP", "GROUP", "workers", "w", "COUNT", 3, "STREAMS", worker.keys.jobs("normal"), ">")
    assert await worker.source.reconcile() == [], "an answer may still be on its way"
    entries = await worker.source.reconcile(min_idle_ms=0)
    assert [entry.entry_id for entry in entries] == ids
    assert await worker.source.reconcile(min_idle_ms=0) == [], "what is held is not taken twice"


async def test_a_lost_group_comes_back_with_the_entries_in_flight(make_worker: MakeWorker, raw: RespClient) -> None:
    """To a peer they are new; their holder goes on with what it has."""
    worker, peer = make_worker("w"), make_worker("peer")
    entry_id = await push(worker)
    (entry,) = await worker.take(1)
    for taker in (worker, peer):
        raw.call("XGROUP", "DESTROY", worker.keys.jobs("normal"), "workers")
        await worker.renew()
        await taker.source.ensure_groups()
        taken: list[Entry] = []
        while not raw.pending(worker.keys.jobs("normal")):
            taken = await taker.source.take(1)
        assert [again.key for again in taken] == ([] if taker is worker else [("normal", entry_id)])
    assert worker.leases.is_held(entry.key)


@pytest.mark.parametrize(("lease_ms", "scan_ms"), [(300, 100), (1000, 250), (2000, 500), (30_000, 5000)])
def test_a_short_lease_is_looked_after_more_often(lease_ms: int, scan_ms: int) -> None:
    assert SourceOptions(lease_ms=lease_ms).scan_ms == scan_ms


async def test_a_read_waits_no_longer_than_to_the_next_scan(make_worker: MakeWorker, raw: RespClient) -> None:
    """A worker that waits for new entries for a minute would leave a dead peer's for as long."""
    worker = make_worker("w")
    source = JobSource(worker.jobs_link, worker.keys, "w", worker.leases, SourceOptions(LEASE_MS, block_ms=9000))
    (entry_id,) = leave_dead(raw, worker, "normal", 1)
    found: list[Entry] = []
    async with asyncio.timeout(8):
        while not found:
            found = await source.take(8)
    assert [entry.entry_id for entry in found] == [entry_id]


@pytest.mark.parametrize("scan", ["next_scan", "next_reconcile"])
async def test_a_scan_that_finds_no_group_makes_it_anew(make_worker: MakeWorker, raw: RespClient, scan: str) -> None:
    """All keys may be lost while no read is under way; the scan that comes first must not stop at that for ever."""
    worker = make_worker("w")
    while not worker.source.stats.num_reclaimed:
        leave_dead(raw, worker, "low", 1)
        await worker.source.take(1)
    raw.call("DEL", *worker.keys.lanes)
    worker.source._timers.next_scan = float("inf")
    setattr(worker.source._timers, scan, 0.0)
    await push(worker)
    assert len(await worker.take(1)) == 1


async def test_all_keys_lost_while_reading_is_no_end(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    await worker.source.take(1)
    raw.call("DEL", *worker.keys.lanes)
    await worker.source.take(1)
    await push(worker)
    assert len(await worker.take(1)) == 1


async def test_a_job_is_delivered_once_however_many_workers_read(make_worker: MakeWorker, raw: RespClient) -> None:
    workers = [make_worker(f"w{number}") for number in range(5)]
    sent = {(lane, entry_id) for lane in LANES for entry_id in add(raw, workers[0], lane, 40)}
    rng = random.Random(7)
    taken: list[EntryKey] = []
    async with asyncio.timeout(30):
        while len(taken) < 120:
            some = rng.sample(workers, 3)
            answers = await asyncio.gather(*(worker.source.take(rng.randint(1, 9)) for worker in some))
            taken += [entry.key for entries in answers for entry in entries]
    assert sorted(taken) == sorted(sent)


def test_fields_that_are_given_twice_are_named() -> None:
    entry = entry_of("low", "1-0", [b"a", b"1", b"b", b"2", b"a", b"3"])
    assert (entry.fields, entry.repeated) == ({b"a": b"3", b"b": b"2"}, (b"a",))
