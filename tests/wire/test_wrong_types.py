"""Keys that hold something else: each costs what it is for, is named in the log, and nothing else notices."""

import asyncio

import pytest
from structlog.testing import capture_logs

from tests.wire.resp import RespClient
from tests.wire.workers import LEASE_MS, MakeWorker, TestWorker, push
from worker.streams.connection import Link
from worker.streams.key_check import KeyCheck
from worker.streams.keys import LANES
from worker.streams.overload import OldestWatch
from worker.streams.registry import ControlReader, Registry
from worker.streams.reply_writer import ReplyStatus, ReplyWriter
from worker.streams.scripts import OpenStatus


@pytest.mark.parametrize("lane", LANES)
async def test_a_lane_of_another_type_keeps_no_other_from_being_served(
    make_worker: MakeWorker, raw: RespClient, lane: str
) -> None:
    worker = make_worker("w")
    raw.call("SET", worker.keys.jobs(lane), "something else")
    others = [other for other in LANES if other != lane]
    await worker.source.ensure_groups()
    for _ in range(2):  # a quick read, and then a blocking one
        assert await worker.source.take(4) == []
        reading = asyncio.create_task(worker.take(2))
        for other in others:
            await push(worker, other)
        assert {entry.lane for entry in await reading} == set(others)
    raw.call("DEL", worker.keys.jobs(lane))
    await push(worker, lane)
    assert [entry.lane for entry in await worker.take(1)] == [lane]


async def test_the_dead_of_other_lanes_are_found_beside_a_lane_of_another_type(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    worker, dead = make_worker("w"), make_worker("dead")
    await push(dead, "low")
    (entry,) = await dead.take(1)
    raw.call("SET", worker.keys.jobs("high"), "something else")
    raw.call("XCLAIM", worker.keys.jobs("low"), "workers", "dead", 0, entry.entry_id, "IDLE", 2 * LEASE_MS, "JUSTID")
    assert [found.key for found in await worker.source.reclaim(8)] == [entry.key]
    worker.leases.release(entry.key)
    assert [found.key for found in await worker.source.reconcile(min_idle_ms=0)] == [entry.key]


async def test_no_lane_at_all_is_waited_out(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    for key in worker.keys.lanes:
        raw.call("SET", key, "something else")
    assert [await worker.source.take(4) for _ in range(2)] == [[], []]
    raw.call("DEL", *worker.keys.lanes)
    await push(worker)
    assert len(await worker.take(1)) == 1


async def test_a_worker_without_room_looks_past_a_lane_of_another_type(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    worker = make_worker("w")
    watch = OldestWatch(
        worker.commands,
        worker.scripts,
        worker.keys,
        worker.clock,
        worker.leases,
    )
    raw.call("SET", worker.keys.jobs("high"), "something else")
    await push(worker, "low", id="a", prompt="x", deadline_ms="5")
    assert [entry.lane for entry in await watch.look()] == ["low"]
    assert await worker.scripts.take_waiting("high", "1-1") is None


async def test_every_shared_key_of_another_type_is_named_and_only_now_and_then(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    worker = make_worker("w")
    keys = worker.keys
    shared = [*keys.lanes, keys.control, keys.dead, keys.workers, keys.worker("w"), keys.config]
    raw.call("DEL", *keys.lanes)
    check = KeyCheck(keys, "w")
    with capture_logs() as logs:
        assert await check.look(worker.commands) == []
        for key in shared:
            raw.call("LPUSH", key, "something else")
        assert await check.look(worker.commands) == shared
        assert await check.look(worker.commands) == shared
    assert [event["key"] for event in logs if event["event"] == "key_of_wrong_type"] == shared
    assert all(event["log_level"] == "error" and "DEL" in event["advice"] for event in logs)


@pytest.mark.parametrize("wrong", ["workers", "worker"])
async def test_a_registry_of_another_type_leaves_the_rest_of_the_beat(
    make_worker: MakeWorker, raw: RespClient, wrong: str
) -> None:
    worker = make_worker("w")
    registry = Registry(worker.commands, worker.scripts, worker.keys, "w", worker.clock, 1000)
    names = {"workers": worker.keys.workers, "worker": worker.keys.worker("w")}
    raw.call("SET", names[wrong], "something else", "EX", 600)
    worker.clock._offset_ms += 1e9
    with capture_logs() as logs:
        await registry.beat({"model": "tiny"})
        await registry.sweep()
    assert [event["key"] for event in logs] == [names[wrong]]
    assert abs(int(raw.call("TIME")[0]) * 1000 - worker.clock.now_ms()) < 5000
    other = names["worker" if wrong == "workers" else "workers"]
    assert raw.call("EXISTS", other) == 1


async def test_hints_of_another_type_are_waited_out_in_silence(
    make_worker: MakeWorker, raw: RespClient, redis_url: str
) -> None:
    worker = make_worker("w")
    link = Link(redis_url, "control")
    control = ControlReader(link, worker.keys, block_ms=10)
    raw.call("SET", worker.keys.control, "something else")
    assert [await control.read() for _ in range(2)] == [[], []]
    raw.call("DEL", worker.keys.control)
    assert await control.read() == []
    raw.call("XADD", worker.keys.control, "*", "op", "reclaim")
    assert [hint.op for hint in await control.read()] == ["reclaim"]
    await link.close()


@pytest.mark.parametrize("junk", ["type", "attempt"])
async def test_a_job_that_can_not_be_answered_is_told_with_the_key_that_is_in_the_way(
    make_worker: MakeWorker, raw: RespClient, junk: str
) -> None:
    """An attempt that can't be counted up was typed by somebody; no worker gets there."""
    worker = make_worker("w")
    key = worker.keys.reply("a")
    if junk == "type":
        raw.call("SET", key, "something else")
    else:
        raw.call("XADD", key, "18446744073709551615-5", "e", "token")
    await push(worker, id="a", prompt="x")
    (entry,) = await worker.take(1)
    result, writer = await worker.replies.open(worker.envelope(entry))
    assert (result.status, result.key, writer) == (OpenStatus.BLOCKED, key, None)
    assert raw.pending(worker.keys.jobs("normal"))[entry.entry_id][0] == "w"


async def test_a_reply_whose_last_id_somebody_has_typed_and_removed_costs_that_job_alone(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    worker = make_worker("w")
    key = worker.keys.reply("a")
    raw.call("XADD", key, "99999999999999-7", "e", "token")
    raw.call("XADD", key, "99999999999999-8", "e", "token")
    raw.call("XDEL", key, "99999999999999-7", "99999999999999-8")
    await push(worker, id="a", prompt="x")
    (entry,) = await worker.take(1)
    result, writer = await worker.replies.open(worker.envelope(entry))
    assert (result.status, result.key, writer) == (OpenStatus.BLOCKED, key, None)


@pytest.mark.parametrize("command", [("SET", "KEY", "something else"), ("HSET", "KEY", "attempt", "9" * 300)])
async def test_what_no_worker_wrote_is_no_record_and_is_replaced(
    make_worker: MakeWorker, raw: RespClient, command: tuple[str, ...]
) -> None:
    worker = make_worker("w")
    raw.call(*(worker.keys.state("a") if word == "KEY" else word for word in command))
    await push(worker, id="a", prompt="x")
    (entry,) = await worker.take(1)
    writer = await worker.open(entry)
    record = raw.hash(worker.keys.state("a"))
    assert (record["entry"], record["attempt"]) == (f"normal/{entry.entry_id}", str(writer.attempt))
    assert raw.call("PTTL", worker.keys.state("a")) > 0


async def test_a_record_that_points_into_a_lane_of_another_type_is_stale(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    worker = make_worker("w")
    raw.call("SET", worker.keys.jobs("high"), "something else")
    raw.call("HSET", worker.keys.state("a"), "entry", "high/1-0", "digest", "other", "status", "running")
    await push(worker, id="a", prompt="x")
    (entry,) = await worker.take(1)
    assert (await worker.open(entry)).job_id == "a"


async def test_junk_in_a_reply_and_its_record_ends_no_worker(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    fields = ("e", b"\xff", "n", "many", "code", b"\xff", "usage", b"\xff")
    raw.call("XADD", worker.keys.reply("a"), "5-1", *fields)
    raw.call("HSET", worker.keys.state("a"), "entry", b"\xff", "crashes", "inf", "attempt", "x", "worker", b"\xff")
    await push(worker, id="a", prompt="x")
    (entry,) = await worker.take(1)
    assert (await worker.replies.open(worker.envelope(entry)))[0].covered == 0
    raw.call("XADD", worker.keys.reply("b"), "5-18446744073709551615", *fields)
    await push(worker, id="b", prompt="x")
    (entry,) = await worker.take(1)
    assert (await worker.replies.open(worker.envelope(entry)))[0].status is OpenStatus.ENDED


async def begin(worker: TestWorker, job_id: str) -> ReplyWriter:
    """The reply of a job that has written one token."""
    await push(worker, id=job_id, prompt="x")
    (entry,) = await worker.take(1)
    writer = await worker.open(entry)
    writer.token([1], "x")
    await worker.replies.flush()
    return writer


@pytest.mark.parametrize("junk", ["type", "event"])
async def test_junk_in_one_reply_after_a_lost_connection_holds_up_no_other(
    make_worker: MakeWorker, raw: RespClient, junk: str
) -> None:
    worker = make_worker("w")
    writers = [await begin(worker, job_id) for job_id in ("a", "b")]
    key = worker.keys.reply("a")
    last_id = raw.events(key)[-1][0]
    attempt = last_id.partition("-")[0]
    if junk == "type":
        raw.call("SET", key, "something else")
    else:
        raw.call("XADD", key, f"{attempt}-99", "e", "token", "ids", '["junk"]')
    await worker.reply_link.reset()
    for writer in writers:
        writer.token([2], "y")
    while not all(writer.is_drained for writer in writers):
        await worker.replies.flush()
    statuses = {writer.job_id: writer.status for writer in writers}
    assert statuses == {"a": ReplyStatus.ABANDONED if junk == "type" else ReplyStatus.FENCED, "b": ReplyStatus.LIVE}
    assert raw.events(worker.keys.reply("b"))[-1][1]["text"] == "y"
