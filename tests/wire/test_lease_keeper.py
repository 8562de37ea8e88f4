"""The thread that renews: what holds the service's loop up costs no lease, unless it lasts too long."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable

import structlog

from tests.wire.resp import RespClient
from tests.wire.workers import MakeWorker, TestWorker, eventually, push
from worker.liveness import Liveness
from worker.streams.keys import GROUP, QueueKeys
from worker.streams.lease_keeper import LeaseKeeper
from worker.streams.leases import Entry, Leases, Loss
from worker.streams.scripts import Scripts

LEASE_MS = 600
WATCHDOG_S = 3 * LEASE_MS / 1000
PATIENCE_S = 20.0


@contextlib.asynccontextmanager
async def renewed(worker: TestWorker, may_renew: Callable[[], bool] = lambda: True) -> AsyncIterator[Leases]:
    """The worker's leases, of LEASE_MS, while a thread renews them."""
    worker.leases.period_s = LEASE_MS / 6000
    renewing = asyncio.create_task(LeaseKeeper([(worker.leases, worker.lease_link)], may_renew).run())
    await eventually(lambda: worker.lease_link.is_up)
    yield worker.leases
    renewing.cancel()
    await asyncio.wait({renewing})
    assert renewing.cancelled()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("leases")]
    assert not worker.lease_link.is_up


def claim(raw: RespClient, worker: TestWorker) -> list[str]:
    """What a peer gets that looks for entries whose lease ran out."""
    key = worker.keys.jobs("normal")
    claimed = raw.call("XAUTOCLAIM", key, GROUP, "peer", LEASE_MS, "0-0", "JUSTID")[1]
    return [entry_id.decode() for entry_id in claimed]


async def test_a_loop_held_up_for_three_leases_loses_nothing(make_worker: MakeWorker, raw: RespClient) -> None:
    """It is, by this test itself, which asks for nothing that lets the loop turn."""
    worker = make_worker("w")
    await push(worker)
    (entry,) = await worker.take(1)
    async with renewed(worker):
        held_up_until = time.monotonic() + 3 * LEASE_MS / 1000
        while time.monotonic() < held_up_until:
            assert claim(raw, worker) == []
    assert raw.pending(worker.keys.jobs("normal")) == {entry.entry_id: ("w", 1)}
    assert worker.losses == []


async def test_a_loop_held_up_for_longer_than_the_watchdog_loses_its_jobs_to_a_peer_and_hears_of_it(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    worker = make_worker("w")
    await push(worker)
    (entry,) = await worker.take(1)
    liveness = Liveness(WATCHDOG_S, seconds_since_step=lambda: 0.0)
    looking = asyncio.create_task(liveness.run())
    await eventually(liveness.is_well)
    async with renewed(worker, liveness.is_well):
        began = time.monotonic()
        claimed: list[str] = []
        while not claimed:
            assert time.monotonic() < began + PATIENCE_S, "the leases of a hung service are renewed for ever"
            claimed = claim(raw, worker)
        assert claimed == [entry.entry_id]
        assert time.monotonic() - began > WATCHDOG_S
        await eventually(lambda: worker.losses == [(entry, Loss.LOST)])
    looking.cancel()
    assert raw.pending(worker.keys.jobs("normal"))[entry.entry_id][0] == "peer"


async def test_a_lost_connection_costs_no_lease(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    await push(worker)
    await worker.take(1)
    worker.lease_link.lose_before = True
    async with renewed(worker):
        generation = worker.lease_link.generation
        worker.lease_link.lose_after = True
        await eventually(lambda: not claim(raw, worker) and worker.lease_link.generation > generation)
    assert worker.losses == []


async def test_losses_are_told_in_the_loop_of_the_service(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    threads: list[str] = []
    queues: list[object] = []

    def on_loss(entry: Entry, loss: Loss) -> None:
        threads.append(threading.current_thread().name)
        queues.append(structlog.contextvars.get_contextvars().get("queue"))

    worker.leases.on_loss = on_loss
    await push(worker)
    (entry,) = await worker.take(1)
    raw.call("XCLAIM", worker.keys.jobs("normal"), GROUP, "peer", 0, entry.entry_id)
    async with renewed(worker):
        await eventually(lambda: bool(threads))
    assert threads == [threading.current_thread().name]
    assert queues == [worker.keys.queue], "what is logged of it names the queue"
    assert not worker.leases.is_held(entry.key)


async def test_one_thread_renews_several_queues_and_one_that_fails_holds_up_no_other(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    """Each queue has a link of its own, since their servers may be several."""
    worker = make_worker("w")
    await push(worker)
    (entry,) = await worker.take(1)
    worker.leases.period_s = LEASE_MS / 6000
    other_link = type(worker.lease_link)("redis://127.0.0.1:1/0", "nowhere")
    other = Leases(Scripts(other_link, QueueKeys("other"), "w"), LEASE_MS)
    other.hold(Entry("normal", "1-1", {}))
    renewing = asyncio.create_task(LeaseKeeper([(other, other_link), (worker.leases, worker.lease_link)]).run())
    await eventually(lambda: worker.lease_link.is_up)
    held_up_until = time.monotonic() + 2 * LEASE_MS / 1000
    while time.monotonic() < held_up_until:
        assert claim(raw, worker) == []
    renewing.cancel()
    await asyncio.wait({renewing})
    assert raw.pending(worker.keys.jobs("normal"))[entry.entry_id][0] == "w"
    assert len(other) == 1


async def test_what_is_held_and_released_while_the_thread_renews_is_nobody_elses(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    """It may look at an entry just after its end: then nobody has it, and its holder has let go by then."""
    worker = make_worker("w")
    worker.leases.period_s = 0.0
    renewing = asyncio.create_task(LeaseKeeper([(worker.leases, worker.lease_link)]).run())
    for _ in range(10):
        for _ in range(8):
            await push(worker)
        for entry in await worker.take(8):
            assert await worker.outcomes.drop(entry)
    renewing.cancel()
    await asyncio.wait({renewing})
    assert [loss for _, loss in worker.losses if loss is Loss.LOST] == []
    assert raw.pending(worker.keys.jobs("normal")) == {}
