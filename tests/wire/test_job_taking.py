"""Workers that serve several queues: each gets its share, none holds up another, and no seat is taken twice."""

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack

import pytest

from tests.servers.groups import Served
from tests.wire.light_workers import LightWorker, at_once
from tests.wire.resp import RespClient
from tests.wire.workers import eventually
from worker import job_taking
from worker.errors import ErrorCode
from worker.lane_weights import LaneWeights
from worker.streams import jobs, overload
from worker.streams.errors import ConnectionLostError
from worker.streams.keys import GROUP, LANES, QueueKeys
from worker.streams.leases import Entry


@pytest.fixture
def names(keys: QueueKeys) -> list[str]:
    """Three queues that no other test uses."""
    return [f"{keys.queue}.{number}" for number in range(3)]


@pytest.fixture
def client(valkey_url: str) -> Iterable[RespClient]:
    """A client of the server that these tests share."""
    with RespClient(valkey_url) as client:
        yield client


def add(client: RespClient, queue: str, num: int, lane: str = "normal", **fields: str) -> None:
    flat = [part for pair in ({"prompt": "x"} | fields).items() for part in pair]
    client.pipeline(*[("XADD", QueueKeys(queue).jobs(lane), "*", *flat)] * num)


def num_pending(client: RespClient, queues: Iterable[str]) -> int:
    return sum(len(client.pending(QueueKeys(queue).jobs(lane))) for queue in queues for lane in LANES)


async def until_done(worker: LightWorker, num: int) -> None:
    await eventually(lambda: worker.num_done >= num, 30)


class Gate:
    """Work that goes on until the gate is opened."""

    def __init__(self) -> None:
        self.is_open = asyncio.Event()

    async def __call__(self, _worker: LightWorker, _queue: str, _entry: Entry) -> None:
        await self.is_open.wait()


async def test_queues_share_a_full_worker_alike(valkey_url: str, names: list[str], client: RespClient) -> None:
    for queue, num in zip(names, (200, 60, 60), strict=True):
        add(client, queue, num)
    async with LightWorker(valkey_url, names, at_once, num_seats=2) as worker:
        await until_done(worker, 320)
    counts = Counter(queue for queue, _ in worker.started[:150])
    assert all(count == pytest.approx(50, rel=0.1) for count in counts.values()), counts


async def test_free_seats_are_divided_from_the_start(valkey_url: str, names: list[str], client: RespClient) -> None:
    """A queue that is full takes not all seats of an empty worker for as long as its jobs run."""
    for queue in names:
        add(client, queue, 20)
    gate = Gate()
    async with LightWorker(valkey_url, names, gate, num_seats=9) as worker:
        await eventually(lambda: len(worker.started) >= 9)
        assert Counter(queue for queue, _ in worker.started) == dict.fromkeys(names, 3)
        gate.is_open.set()


async def test_one_job_beside_hundreds_begins_among_the_next(
    valkey_url: str, names: list[str], client: RespClient
) -> None:
    add(client, names[0], 400)
    async with LightWorker(valkey_url, names, at_once, num_seats=4) as worker:
        await eventually(lambda: len(worker.started) > 100, 30)
        num_before = len(worker.started)
        add(client, names[2], 1)
        await until_done(worker, 401)
    place = [queue for queue, _ in worker.started].index(names[2])
    # What was taken while the job was on its way to the server stands before it.
    assert place - num_before <= 100


@pytest.mark.parametrize("num_seats", [1, 4])
async def test_a_worker_holds_no_more_than_it_has_seats(
    valkey_url: str, names: list[str], client: RespClient, num_seats: int
) -> None:
    for queue in names:
        for lane in LANES:
            add(client, queue, 5, lane)
    gate = Gate()
    async with LightWorker(valkey_url, names, gate, num_seats=num_seats) as worker:
        await eventually(lambda: worker.num_held >= num_seats)
        for served in worker.queues:
            await served.links.reading.call("PING")  # behind a read that may be under way
        assert worker.num_held == num_pending(client, names) == num_seats
        gate.is_open.set()
        await until_done(worker, 45)
    assert len(worker.started) == 45


async def test_a_read_under_way_keeps_its_seat(
    valkey_url: str, names: list[str], client: RespClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others that end before it take no more than is left."""
    late, gate = asyncio.Event(), Gate()
    worker = LightWorker(valkey_url, names, gate, num_seats=3)
    slow, *others = [queue.links for queue in worker.queues]
    really = slow.source.take_at_once

    async def take_late(room: int) -> list[Entry]:
        await late.wait()
        return await really(room)

    monkeypatch.setattr(slow.source, "take_at_once", take_late)
    for queue in names:
        add(client, queue, 5)
    async with worker:
        await eventually(lambda: len(worker.started) >= 2)
        for links in others:
            await links.reading.call("PING")  # behind a read that may be under way
        late.set()
        await eventually(lambda: names[0] in {queue for queue, _ in worker.started})
        assert Counter(queue for queue, _ in worker.started) == dict.fromkeys(names, 1)
        gate.is_open.set()


async def test_a_single_seat_waits_for_every_queue_in_turn(
    valkey_url: str, names: list[str], client: RespClient
) -> None:
    order = [*names, *reversed(names)]
    async with LightWorker(valkey_url, names, at_once, num_seats=1) as worker:
        for number, queue in enumerate(order, 1):
            add(client, queue, 1, LANES[number % 3])
            await until_done(worker, number)
    assert [queue for queue, _ in worker.started] == order


async def test_eight_workers_start_a_thousand_jobs_once_each(
    valkey_url: str, names: list[str], client: RespClient
) -> None:
    seed = random.randrange(10**6)
    sys.stdout.write(f"seed {seed}\n")
    rng = random.Random(seed)
    jobs = Counter((rng.choice(names), rng.choice(LANES)) for _ in range(1000))
    for (queue, lane), num in jobs.items():
        add(client, queue, num, lane)
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(
                LightWorker(valkey_url, rng.sample(names, 3), at_once, num_seats=rng.randint(1, 16), name=f"w{number}")
            )
            for number in range(8)
        ]
        await eventually(lambda: sum(worker.num_done for worker in workers) >= 1000, 60)
    started = [(queue, *entry.key) for worker in workers for queue, entry in worker.started]
    assert len(started) == len(set(started)) == 1000
    assert num_pending(client, names) == 0


async def test_no_job_waits_while_a_peer_has_a_free_seat(valkey_url: str, names: list[str], client: RespClient) -> None:
    """Two long jobs and two short ones, two workers of two seats: the short ones end while the long ones run."""
    gate = Gate()

    async def work(worker: LightWorker, queue: str, entry: Entry) -> None:
        if entry.fields[b"kind"] == b"long":
            await gate(worker, queue, entry)

    queues = names[:2]
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(LightWorker(valkey_url, queues, work, num_seats=2, name=f"w{number}"))
            for number in range(2)
        ]
        for queue in queues:
            add(client, queue, 1, kind="long")
        for queue in queues:
            add(client, queue, 1, kind="short")
        await eventually(lambda: sum(worker.num_done for worker in workers) == 2)
        assert sum(worker.num_held for worker in workers) == 2
        gate.is_open.set()
        await eventually(lambda: sum(worker.num_done for worker in workers) == 4)


async def test_jobs_longer_than_half_a_lease_come_once_to_workers_of_one_seat(
    valkey_url: str, names: list[str], client: RespClient
) -> None:
    """What a blocking read has brought beyond the room waits in the worker, under lease like what runs."""
    lease_ms = 600

    async def work(_worker: LightWorker, _queue: str, _entry: Entry) -> None:
        await asyncio.sleep(0.6 * lease_ms / 1000)

    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(
                LightWorker(valkey_url, names[:1], work, num_seats=1, lease_ms=lease_ms, name=f"w{number}")
            )
            for number in range(2)
        ]
        adds = [("XADD", QueueKeys(names[0]).jobs(lane), "*", "prompt", "x") for lane in LANES] * 3
        client.pipeline(("MULTI",), *adds, ("EXEC",))
        await eventually(lambda: sum(worker.num_done for worker in workers) >= 9, 30)
    entries = [entry for worker in workers for _, entry in worker.started]
    assert len({entry.key for entry in entries}) == len(entries) == 9
    assert {entry.deliveries for entry in entries} == {1}


async def test_queues_of_one_worker_may_lie_on_different_nodes_of_a_cluster(
    serve: Callable[[str], Served], keys: QueueKeys
) -> None:
    cluster = serve("cluster")
    urls = {queue: cluster.direct_url(queue) for queue in (f"{keys.queue}.{number}" for number in range(60))}
    queues = list({url: queue for queue, url in urls.items()}.values())
    for queue in queues:
        with RespClient(urls[queue]) as client:
            add(client, queue, 20)
    async with LightWorker(cluster.url, queues, at_once, num_seats=2) as worker:
        await until_done(worker, 20 * len(queues))
    assert Counter(queue for queue, _ in worker.started) == dict.fromkeys(queues, 20)
    assert len(queues) == 3, "sixty slots lie on all three nodes"


@pytest.mark.parametrize("trouble", ["a string", "no group"])
async def test_a_queue_in_trouble_holds_up_no_other(
    valkey_url: str, names: list[str], client: RespClient, trouble: str
) -> None:
    """Of its own lanes, too, only the one whose key holds something else stands still."""
    broken = QueueKeys(names[0])
    async with LightWorker(valkey_url, names, at_once, num_seats=1) as worker:
        add(client, names[1], 1)
        await until_done(worker, 1)
        if trouble == "a string":
            client.pipeline(("MULTI",), ("DEL", broken.jobs("high")), ("SET", broken.jobs("high"), "x"), ("EXEC",))
        else:
            client.pipeline(*[("XGROUP", "DESTROY", key, "workers") for key in broken.lanes])
        for queue in names:
            add(client, queue, 30)
            add(client, queue, 5, "low")
        await until_done(worker, 1 + 3 * 35)
        if trouble == "a string":
            client.call("DEL", broken.jobs("high"))
            add(client, names[0], 1, "high")
            await until_done(worker, 2 + 3 * 35)


async def test_a_queue_whose_server_is_silent_or_gone_holds_up_no_other(
    valkey_url: str, names: list[str], client: RespClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(_room: int) -> list[Entry]:
        await asyncio.Event().wait()
        return []

    async def gone(_room: int) -> list[Entry]:
        raise ConnectionLostError("gone, by the test")

    worker = LightWorker(valkey_url, names, at_once, num_seats=1)
    monkeypatch.setattr(worker.queues[0].links.source, "take_at_once", silent)
    monkeypatch.setattr(worker.queues[1].links.source, "take_at_once", gone)
    for queue in names:
        add(client, queue, 20)
    async with worker:
        await until_done(worker, 20)
    assert {queue for queue, _ in worker.started} == {names[2]}


async def test_nothing_is_taken_after_the_stop_however_late_an_answer_comes(
    valkey_url: str, names: list[str], client: RespClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be held, and nobody would run it or hand it over."""
    late, under_way, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
    worker = LightWorker(valkey_url, names, at_once, num_seats=4)
    slow = worker.queues[0].links
    really = slow.source.take_at_once

    async def take_late(room: int) -> list[Entry]:
        under_way.set()
        try:
            await late.wait()
            return await really(room)
        finally:
            ended.set()

    monkeypatch.setattr(slow.source, "take_at_once", take_late)
    async with worker:
        add(client, names[0], 1)
        await under_way.wait()
        await worker.stop_taking()
        late.set()
        await ended.wait()
        assert worker.num_held == num_pending(client, names) == 0


async def test_a_queue_that_was_away_for_long_gets_its_share_and_no_more(
    valkey_url: str, names: list[str], client: RespClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(_room: int) -> list[Entry]:
        raise ConnectionLostError("gone, by the test")

    worker = LightWorker(valkey_url, names[:2], at_once, num_seats=1, lease_ms=300)
    source = worker.queues[0].links.source
    really = source.take_at_once
    monkeypatch.setattr(source, "take_at_once", gone)
    for queue in names[:2]:
        add(client, queue, 400)
    async with worker:
        await until_done(worker, 60)
        monkeypatch.setattr(source, "take_at_once", really)
        await eventually(lambda: names[0] in {queue for queue, _ in worker.started}, 30)
        first = len(worker.started)
        await eventually(lambda: len(worker.started) >= first + 60, 30)
    counts = Counter(queue for queue, _ in worker.started[first : first + 60])
    assert counts[names[0]] == pytest.approx(30, rel=0.1)


def deliver(client: RespClient, queue: str, consumer: str = "w") -> None:
    """A job that a worker is given, and doesn't hear of."""
    lane = QueueKeys(queue).jobs("normal")
    client.call("XADD", lane, "*", "prompt", "x")
    client.call("XREADGROUP", "GROUP", GROUP, consumer, "COUNT", 1, "STREAMS", lane, ">")


@pytest.mark.parametrize("why", ["full", "paused"])
async def test_what_never_arrived_is_taken_up_by_a_worker_that_reads_nothing(
    valkey_url: str, names: list[str], client: RespClient, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Nobody else is given it before its lease ends."""
    monkeypatch.setattr(jobs, "RECONCILE_EVERY_S", 0.1)
    if why == "paused":
        client.call("HSET", QueueKeys(names[0]).config, "paused", 1)
    gate = Gate()
    async with LightWorker(valkey_url, names[:1], gate, num_seats=1, lease_ms=600) as worker:
        if why == "full":
            add(client, names[0], 1)
            await eventually(lambda: len(worker.started) == 1)
        num_before = len(worker.started)
        deliver(client, names[0])
        await eventually(lambda: len(worker.started) > num_before)
        assert worker.started[-1][1].deliveries == 1
        gate.is_open.set()


async def test_after_a_lost_answer_what_it_brought_is_taken_up_before_its_lease_ends(
    valkey_url: str, names: list[str], client: RespClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = LightWorker(valkey_url, names[:1], at_once, num_seats=1, lease_ms=6000)
    source = worker.queues[0].links.source
    really = source.take_at_once

    async def lose_the_first(room: int) -> list[Entry]:
        monkeypatch.setattr(source, "take_at_once", really)
        deliver(client, names[0])
        raise ConnectionLostError("the answer was lost, by the test")

    monkeypatch.setattr(source, "take_at_once", lose_the_first)
    async with worker:
        await until_done(worker, 1)
    assert worker.started[0][1].deliveries == 1, "it was not reclaimed"


@pytest.mark.parametrize("when", ["between looks", "while it looks"])
async def test_a_hint_has_a_full_worker_look_at_once_whenever_it_comes(
    valkey_url: str, names: list[str], client: RespClient, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(overload, "LOOK_S", 3600.0)  # but for hints it would never look
    monkeypatch.setattr(job_taking, "LOOK_EVERY_S", 3600.0)
    keys, gate, may_end = QueueKeys(names[0]), Gate(), asyncio.Event()
    worker = LightWorker(valkey_url, names[:1], gate, num_seats=1, lease_ms=3_600_000)
    oldest = worker.queues[0].links.oldest
    oldest._looked_at = dict.fromkeys(LANES, time.monotonic())
    really, num_looks = oldest.look, 0

    async def look_and_wait() -> list[Entry]:
        nonlocal num_looks
        found = await really()
        num_looks += 1
        await may_end.wait()
        return found

    monkeypatch.setattr(oldest, "look", look_and_wait)

    def call_off(job_id: str) -> None:
        client.call("SET", keys.cancel(job_id), "user left", "EX", 86400)
        client.call("XADD", keys.control, "*", "op", "cancel", "id", job_id)

    async with worker:
        add(client, names[0], 1, id="runs")
        await eventually(lambda: len(worker.started) == 1)
        await eventually(lambda: worker.queues[0].links.control._last_id is not None)
        for job_id in ("first", "second"):
            add(client, names[0], 1, id=job_id)
        if when == "between looks":
            may_end.set()
        call_off("first")
        await eventually(lambda: num_looks >= 1)
        call_off("second")
        await eventually(lambda: bool(oldest._hinted["normal"]) or num_looks >= 2)
        may_end.set()
        await eventually(lambda: len(worker.started) == 3)
        assert [entry.must_end for _, entry in worker.started] == [None, *[ErrorCode.CANCELLED] * 2]
        gate.is_open.set()


async def test_a_full_worker_ends_overdue_jobs_of_all_queues(
    valkey_url: str, names: list[str], client: RespClient
) -> None:
    gate = Gate()
    async with LightWorker(valkey_url, names, gate, num_seats=1) as worker:
        add(client, names[0], 1)
        await eventually(lambda: worker.num_held == 1)
        for queue in names:
            add(client, queue, 1, deadline_ms="5")
        await eventually(lambda: len(worker.started) == 4)
        ended = {queue for queue, entry in worker.started if entry.must_end is ErrorCode.DEADLINE_EXCEEDED}
        assert ended == set(names)
        gate.is_open.set()


async def test_a_paused_queue_pauses_no_other(valkey_url: str, names: list[str], client: RespClient) -> None:
    paused = QueueKeys(names[0])
    client.call("HSET", paused.config, "paused", "1")
    async with LightWorker(valkey_url, names, at_once, num_seats=2) as worker:
        await eventually(lambda: worker.queues[0].is_paused)
        for queue in names:
            add(client, queue, 10)
        await until_done(worker, 20)
        assert Counter(queue for queue, _ in worker.started) == {names[1]: 10, names[2]: 10}
        client.call("HDEL", paused.config, "paused")
        client.call("XADD", paused.control, "*", "op", "config")
        await until_done(worker, 30)


async def test_operators_set_the_lane_weights_of_each_queue(
    valkey_url: str, names: list[str], client: RespClient
) -> None:
    def held() -> list[LaneWeights]:
        return [queue.links.source.lanes.weights for queue in worker.queues]

    for queue, weights in zip(names, ("strict", "1:1:1", "8:4"), strict=True):
        client.call("HSET", QueueKeys(queue).config, "lane_weights", weights)
    async with LightWorker(valkey_url, names, at_once, num_seats=1) as worker:
        await eventually(lambda: held() == ["strict", (1, 1, 1), (8, 4, 1)])
        for queue, command in zip(names, (["HDEL"], ["HSET"], ["HSET"]), strict=True):
            value = ["5:3:2"] if command == ["HSET"] else []
            client.call(*command, QueueKeys(queue).config, "lane_weights", *value)
            client.call("XADD", QueueKeys(queue).control, "*", "op", "config")
        await eventually(lambda: held() == [(8, 4, 1), (5, 3, 2), (5, 3, 2)])
