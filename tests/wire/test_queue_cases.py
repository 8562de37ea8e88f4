"""What went wrong in other queues, on the wire: deaths inside a claim, swept names, slow recovery, names in ids."""

import asyncio
import random
import uuid
from typing import Any

import pytest

from tests.wire.resp import RespClient, encode
from tests.wire.workers import LEASE_MS, MakeWorker, TestWorker, eventually, push
from worker.protocol_envelope import NAME
from worker.streams.connection import Link
from worker.streams.keys import GROUP, LANES
from worker.streams.leases import Entry
from worker.streams.scripts import OpenStatus


def let_lease_run_out(raw: RespClient, worker: TestWorker, lane: str = "normal", idle_ms: int = 2 * LEASE_MS) -> None:
    """Whoever holds entries of a lane has not renewed them for `idle_ms`."""
    key = worker.keys.jobs(lane)
    for entry_id, (consumer, count) in raw.pending(key).items():
        raw.call("XCLAIM", key, GROUP, consumer, 0, entry_id, "IDLE", idle_ms, "RETRYCOUNT", count, "JUSTID")


@pytest.mark.parametrize("share", [0.5, 1.0], ids=["half-sent", "unanswered"])
async def test_a_worker_that_dies_inside_a_claim_keeps_nobody_else_from_claiming(
    make_worker: MakeWorker, raw: RespClient, redis_url: str, share: float
) -> None:
    """A lock around the claim would outlive whoever is killed while holding it."""
    worker = make_worker("w")
    for _ in range(3):
        await push(worker)
    key = worker.keys.jobs("normal")
    raw.call("XREADGROUP", "GROUP", GROUP, "first", "STREAMS", key, ">")
    let_lease_run_out(raw, worker)
    claim = encode(("XAUTOCLAIM", key, GROUP, "dying", LEASE_MS, "0-0", "COUNT", 8))
    with RespClient(redis_url) as dying:
        dying._socket.sendall(claim[: int(share * len(claim))])
        if share == 1.0:
            await eventually(lambda: {owner for owner, _ in raw.pending(key).values()} == {"dying"})
    let_lease_run_out(raw, worker)
    assert len(await worker.source.reclaim(8)) == 3


async def test_a_name_that_gets_an_entry_while_names_are_swept_keeps_it(
    make_worker: MakeWorker, raw: RespClient, redis_url: str
) -> None:
    """Looking first and deleting then destroys what comes in between; in one script nothing does."""
    sweeper, link = make_worker("w"), Link(redis_url, "test")
    key = sweeper.keys.jobs("normal")
    num_jobs = 200
    for _ in range(num_jobs):
        await push(sweeper)
    is_done = asyncio.Event()

    async def take() -> None:
        for _ in range(num_jobs):
            await link.call("XREADGROUP", "GROUP", GROUP, "busy", "COUNT", 1, "STREAMS", key, ">")
            for entry_id, *_ in await link.call("XPENDING", key, GROUP, "-", "+", 1, "busy"):
                # Handed over at once, so that the name is idle again and again.
                await link.call("XCLAIM", key, GROUP, "peer", 0, entry_id, "JUSTID")
        is_done.set()

    async def sweep() -> int:
        num_swept = 0
        while not is_done.is_set():
            num_swept += len(await sweeper.scripts.sweep_consumers("normal", idle_ms=0))
        return num_swept

    _, num_swept = await asyncio.gather(take(), sweep())
    await link.close()
    assert num_swept > 5
    assert len(raw.pending(key)) == num_jobs


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "x", "max_tokens": "100000000"},
        {"prompt": "x", "ttl_ms": "86400000"},
        {"prompt": "x", "deadline_ms": "9007199254740991"},
        {"prompt": "x", "priority": "-1000000"},
    ],
    ids=["max_tokens", "ttl_ms", "deadline_ms", "priority"],
)
@pytest.mark.parametrize("lane", LANES)
async def test_a_dead_workers_job_comes_back_after_its_lease_whatever_the_job_allows_itself(
    make_worker: MakeWorker, raw: RespClient, fields: dict[str, str], lane: str
) -> None:
    worker = make_worker("w")
    entry_id = await push(worker, lane, **fields)
    raw.call("XREADGROUP", "GROUP", GROUP, "dead", "STREAMS", worker.keys.jobs(lane), ">")
    let_lease_run_out(raw, worker, lane, LEASE_MS // 2)
    assert await worker.source.reclaim(8) == []
    let_lease_run_out(raw, worker, lane, LEASE_MS)
    assert [entry.key for entry in await worker.source.reclaim(8)] == [(lane, entry_id)]


async def test_groups_that_were_made_before_any_worker_came_are_used_as_they_are(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    """An autoscaler reads the group's lag before the first worker has started."""
    worker = make_worker("w")
    raw.call("DEL", *worker.keys.lanes)
    for key in worker.keys.lanes:
        raw.call("XGROUP", "CREATE", key, GROUP, "0", "MKSTREAM")
    entry_id = await push(worker)
    await worker.source.ensure_groups()
    assert [entry.entry_id for entry in await worker.take(1)] == [entry_id]


async def test_an_answer_that_comes_after_its_entries_were_taken_up_adds_nothing(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    worker = make_worker("w")
    await push(worker)
    key = worker.keys.jobs("normal")
    late = raw.call("XREADGROUP", "GROUP", GROUP, "w", "STREAMS", key, ">")
    (entry,) = await worker.source.reconcile(min_idle_ms=0)
    assert worker.source._entries_of(late) == []
    assert len(worker.leases) == 1
    assert worker.leases.is_held(entry.key)


MARK = uuid.uuid4().hex
BAD_IDS: list[bytes] = [
    f"{{{MARK}}}".encode(),
    f"}}:{{{MARK}}}:reply:x".encode(),
    f"{MARK}:x".encode(),
    f"{MARK} x".encode(),
    f"{MARK}\r\nx".encode(),
    f"{MARK}\0".encode(),
    f"{MARK}é".encode(),
    f"{MARK}*".encode(),
    f"../{MARK}".encode(),
    MARK.encode() + b"\xff",
    MARK.encode() + b"x" * 33,
    b"",
]


async def test_no_id_leads_to_a_key_outside_the_queues_own(make_worker: MakeWorker, raw: RespClient) -> None:
    """Braces would move a reply to another slot, or to another queue; such an id counts as none."""
    worker = make_worker("w")
    sent = [await push_raw(worker, job_id) for job_id in BAD_IDS]
    for entry in await worker.take(len(BAD_IDS), room=len(BAD_IDS)):
        envelope = worker.envelope(entry)
        assert NAME.fullmatch(envelope.id.encode())
        assert envelope.error is not None
        writer = await worker.open(entry)
        assert envelope.error.code == "bad_request"
        writer.error(envelope.error)
        await worker.replies.flush()
        await worker.outcomes.settle(envelope, "bad_request")
    assert raw.call("KEYS", f"*{MARK}*") == []
    ours = {key.decode() for key in raw.call("KEYS", worker.keys.reply("*"))}
    assert ours == {worker.keys.reply(f"normal-{entry_id}") for entry_id in sent}


async def push_raw(worker: TestWorker, job_id: bytes) -> str:
    entry_id = await worker.commands.call("XADD", worker.keys.jobs("normal"), "*", "id", job_id, "prompt", "x")
    return str(entry_id.decode())


async def test_of_many_workers_that_take_and_die_at_random_each_job_is_ended_once(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    """Starts are counted by the replies: one attempt each where nobody dies, and never two ends."""
    workers, rng = [make_worker(f"w{number}") for number in range(4)], random.Random(11)
    for number in range(40):
        await push(workers[0], id=f"job{number}", prompt="x")
    num_deaths = 0
    while raw.call("XLEN", workers[0].keys.jobs("normal")):
        worker = rng.choice(workers)
        for entry in await take_something(worker):
            if rng.random() < 0.2:
                num_deaths += 1
                worker.leases.release(entry.key)
                continue
            result, writer = await worker.replies.open(worker.envelope(entry))
            if writer is not None:
                assert result.status is OpenStatus.OPENED
                writer.end("stop", usage={}, receipt={})
                await worker.replies.flush()
                await worker.outcomes.settle(worker.envelope(entry), "done")
        let_lease_run_out(raw, worker)
    assert num_deaths > 3
    for number in range(40):
        kinds = [fields["e"] for _, fields in raw.events(workers[0].keys.reply(f"job{number}"))]
        assert kinds == ["open", "end"]


async def take_something(worker: TestWorker) -> list[Entry]:
    """What a worker with room for three finds."""
    found: list[Any] = await worker.source.reclaim(3)
    return found or await worker.source.take(3)
