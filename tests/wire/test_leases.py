"""Leases: what is held is renewed, what is not ours any more is told once, and a silent worker loses its jobs."""

from dataclasses import replace

import pytest

from tests.wire.resp import RespClient
from tests.wire.workers import LEASE_MS, MakeWorker, TestWorker, push
from worker.streams.leases import Entry, Loss

pytestmark = pytest.mark.every_topology


def idle_ms(raw: RespClient, worker: TestWorker) -> dict[str, int]:
    """Idle time of each pending entry of the normal lane."""
    answer = raw.call("XPENDING", worker.keys.jobs("normal"), "workers", "-", "+", 1000)
    return {entry_id.decode(): idle for entry_id, _, idle, _ in answer}


async def hold(worker: TestWorker, raw: RespClient, num: int) -> list[Entry]:
    """Entries that have been idle for almost a lease."""
    for _ in range(num):
        await push(worker)
    entries = await worker.take(num, room=num)
    for entry in entries:
        options = ("IDLE", LEASE_MS * 3 // 4, "JUSTID")
        raw.call("XCLAIM", worker.keys.jobs("normal"), "workers", worker.name, 0, entry.entry_id, *options)
    return entries


async def test_renewing_covers_everything_held_and_counts_no_delivery(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    entries = await hold(worker, raw, 12)
    await worker.renew()
    assert all(idle < LEASE_MS // 4 for idle in idle_ms(raw, worker).values())
    assert {count for _, count in raw.pending(worker.keys.jobs("normal")).values()} == {1}
    assert len(worker.leases) == len(entries)
    assert worker.losses == []


async def test_a_stale_owner_does_not_steal_its_job_back(make_worker: MakeWorker, raw: RespClient) -> None:
    """A bare XCLAIM would."""
    worker = make_worker("w")
    lost, kept = await hold(worker, raw, 2)
    raw.call("XCLAIM", worker.keys.jobs("normal"), "workers", "peer", 0, lost.entry_id)
    await worker.renew()
    await worker.renew()
    assert worker.losses == [(lost, Loss.LOST)]
    assert not worker.leases.is_held(lost.key)
    assert raw.pending(worker.keys.jobs("normal"))[lost.entry_id][0] == "peer"
    assert raw.pending(worker.keys.jobs("normal"))[kept.entry_id][0] == "w"


async def test_renewing_does_not_recreate_a_settled_entry(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    (entry,) = await hold(worker, raw, 1)
    raw.call("XACK", worker.keys.jobs("normal"), "workers", entry.entry_id)
    await worker.renew()
    assert worker.losses == [(entry, Loss.ORPHANED)]
    assert raw.pending(worker.keys.jobs("normal")) == {}


async def test_an_entry_deleted_from_the_stream_is_told_once_and_stays_ours(
    make_worker: MakeWorker, raw: RespClient, redis_url: str
) -> None:
    """It can't come to anybody else. 6.2 doesn't notice, and goes on renewing, which comes to the same."""
    worker = make_worker("w")
    (entry,) = await hold(worker, raw, 1)
    raw.call("XDEL", worker.keys.jobs("normal"), entry.entry_id)
    await worker.renew()
    await worker.renew()
    is_noticed = b"redis_version:6." not in raw.call("INFO", "server")
    assert worker.losses == ([(entry, Loss.ORPHANED)] if is_noticed else [])
    assert worker.leases.is_held(entry.key)


@pytest.mark.parametrize(
    "command",
    [("XGROUP", "DESTROY", "LANE", "workers"), ("DEL", "LANE"), ("SET", "LANE", "something else")],
    ids=["group", "lane", "type"],
)
async def test_what_nobody_can_take_over_stays_with_its_holder(
    make_worker: MakeWorker, raw: RespClient, command: tuple[str, ...]
) -> None:
    """Else it would end nowhere. It is told once, and other lanes are renewed all the same."""
    worker = make_worker("w")
    entries = await hold(worker, raw, 3)
    await push(worker, "low")
    (other,) = await worker.take(1)
    raw.call(*(worker.keys.jobs("normal") if word == "LANE" else word for word in command))
    await worker.renew()
    await worker.renew()
    told = sorted((entry.key, loss) for entry, loss in worker.losses)
    assert told == [(entry.key, Loss.ORPHANED) for entry in entries]
    assert len(worker.leases) == 4
    assert list(raw.pending(worker.keys.jobs("low"))) == [other.entry_id]


async def test_an_orphan_that_a_peer_gets_after_all_is_lost(make_worker: MakeWorker, raw: RespClient) -> None:
    worker, peer = make_worker("w"), make_worker("peer")
    mine, theirs = await hold(worker, raw, 2)
    raw.call("XGROUP", "DESTROY", worker.keys.jobs("normal"), "workers")
    await worker.renew()
    await peer.source.ensure_groups()
    read = ("XREADGROUP", "GROUP", "workers", "w", "COUNT", 1, "STREAMS", worker.keys.jobs("normal"), ">")
    assert raw.call(*read)[0][1][0][0].decode() == mine.entry_id
    assert [entry.key for entry in await peer.take(1)] == [theirs.key]
    worker.losses.clear()
    await worker.renew()
    assert worker.losses == [(theirs, Loss.LOST)]
    assert worker.leases.is_held(mine.key)


async def test_lanes_with_equal_entry_ids_are_held_apart(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    raw.pipeline(*[("XADD", worker.keys.jobs(lane), "77-0", "prompt", lane) for lane in ("high", "low")])
    await worker.take(2)
    raw.call("XACK", worker.keys.jobs("low"), "workers", "77-0")
    await worker.renew()
    assert [(entry.lane, loss) for entry, loss in worker.losses] == [("low", Loss.ORPHANED)]
    assert worker.leases.is_held(("high", "77-0"))


@pytest.mark.parametrize("num", [1500])
async def test_more_entries_than_fit_one_script_call_are_renewed(
    make_worker: MakeWorker, raw: RespClient, num: int
) -> None:
    worker = make_worker("w")
    raw.pipeline(*[("XADD", worker.keys.jobs("normal"), "*", "prompt", "x")] * num)
    read = ("XREADGROUP", "GROUP", "workers", "w", "COUNT", num, "STREAMS", worker.keys.jobs("normal"), ">")
    for _, entries in raw.call(*read):
        for entry_id, _ in entries:
            worker.leases.hold(Entry("normal", entry_id.decode(), {}))
    await worker.renew()
    assert worker.losses == []


async def test_a_loss_that_is_told_late_is_not_that_of_the_entry_held_by_then(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    """It was released and taken anew while the answer was on its way from the thread that renews."""
    worker = make_worker("w")
    (entry,) = await hold(worker, raw, 1)
    raw.call("XCLAIM", worker.keys.jobs("normal"), "workers", "peer", 0, entry.entry_id)
    losses = await worker.leases.renew()
    assert losses == [(entry, Loss.LOST)]
    worker.leases.release(entry.key)
    worker.leases.tell(losses)
    worker.leases.hold(replace(entry, deliveries=2))
    worker.leases.tell(losses)
    assert worker.leases.is_held(entry.key)
    assert worker.losses == []
