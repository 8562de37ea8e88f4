"""The registry, wake-ups, cancel marks, settings of operators, dead letters, and the sweeping up."""

import asyncio

import pytest
from structlog.testing import capture_logs

from tests.wire.resp import RespClient
from tests.wire.workers import MakeWorker, TestWorker, eventually, push
from worker.errors import ErrorCode
from worker.streams.connection import Link
from worker.streams.errors import ServerError
from worker.streams.keys import HANDOVER
from worker.streams.leases import Entry
from worker.streams.registry import (
    CancelMarks,
    ControlReader,
    Hint,
    Registry,
    add_dead_letter,
    read_config,
)


def registry(worker: TestWorker, beat_ms: int = 1000) -> Registry:
    return Registry(worker.commands, worker.scripts, worker.keys, worker.name, worker.clock, beat_ms)


async def test_a_beat_shows_a_worker_for_three_beats(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    await registry(worker).beat({"model": "tiny", "slots": 4, "kv_use": 0.5})
    fields = raw.hash(worker.keys.worker("w"))
    assert {name: fields[name] for name in ("model", "slots", "kv_use")} == {
        "model": "tiny",
        "slots": "4",
        "kv_use": "0.5",
    }
    assert 2000 < raw.call("PTTL", worker.keys.worker("w")) <= 3000
    score = raw.call("ZSCORE", worker.keys.workers, "w")
    assert float(score) == float(fields["beat"])
    assert abs(int(raw.call("TIME")[0]) * 1000 - float(score)) < 10_000


async def test_a_worker_that_leaves_is_gone_at_once(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    await registry(worker).beat({})
    await registry(worker).leave()
    assert raw.call("EXISTS", worker.keys.workers, worker.keys.worker("w")) == 0


async def test_a_beat_sets_the_clock_by_the_server(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    worker.clock._offset_ms += 1e9
    await registry(worker).beat({})
    seconds, micros = raw.call("TIME")
    assert abs(int(seconds) * 1000 + int(micros) // 1000 - worker.clock.now_ms()) < 2000


async def test_the_heart_beats_on_over_lost_connections(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    beats = 0

    def collect() -> dict[str, int]:
        nonlocal beats
        beats += 1
        worker.commands.lose_before = beats == 2
        return {"beats": beats}

    beating = asyncio.create_task(registry(worker, beat_ms=10).run(collect))
    await eventually(lambda: beats >= 4)
    beating.cancel()


async def test_sweeping_removes_names_that_nobody_uses_and_never_what_holds_a_job(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    """Deleting a consumer destroys what it holds, so check and deletion are one step."""
    worker = make_worker("w")
    key = worker.keys.jobs("normal")
    await push(worker)
    await push(worker)
    for name, count in (("holds", 1), (HANDOVER, 1), ("idle", 1)):
        raw.call("XREADGROUP", "GROUP", "workers", name, "COUNT", count, "STREAMS", key, ">")
    raw.call("XACK", key, "workers", *[e for e, (owner, _) in raw.pending(key).items() if owner == HANDOVER])
    assert await worker.scripts.sweep_consumers("normal", idle_ms=3_600_000) == []
    # Before Redis 7 a read that delivers nothing makes no consumer, so only those that exist can go.
    swept = await worker.scripts.sweep_consumers("normal", idle_ms=0)
    assert set(swept) <= {"idle", "setup"}
    assert {owner for owner, _ in raw.pending(key).values()} == {"holds"}
    names = {consumer[1] for consumer in raw.call("XINFO", "CONSUMERS", key, "workers")}
    assert {b"holds", HANDOVER.encode()} <= names
    assert b"idle" not in names


async def test_sweeping_a_queue_that_does_not_exist_is_nothing(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    raw.call("DEL", *worker.keys.lanes)
    await registry(worker).sweep()
    assert raw.call("EXISTS", *worker.keys.lanes) == 0


async def test_a_beat_forgets_workers_that_missed_three_and_nobody_who_beats_less_often(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    worker = make_worker("w")
    now_ms = int(raw.call("TIME")[0]) * 1000
    for name, age_ms in (("dead", 400_000), (b"\xff", 400_000), ("slow", 400_000), ("late", 60_000)):
        raw.call("ZADD", worker.keys.workers, now_ms - age_ms, name)
    raw.call("HSET", worker.keys.worker("slow"), "slots", 4)
    await registry(worker, beat_ms=60_000).beat({})
    assert set(raw.call("ZRANGE", worker.keys.workers, 0, -1)) == {b"w", b"slow", b"late"}


async def test_hints_are_heard_from_the_first_read_on_and_each_once(
    make_worker: MakeWorker, raw: RespClient, redis_url: str
) -> None:
    worker = make_worker("w")
    link = Link(redis_url, "control")
    control = ControlReader(link, worker.keys, block_ms=20)
    raw.call("XADD", worker.keys.control, "*", "op", "cancel", "id", "before")
    assert await control.read() == []
    raw.call("XADD", worker.keys.control, "MAXLEN", "~", 1000, "*", "op", "cancel", "id", "a")
    raw.call("XADD", worker.keys.control, "*", "op", "reclaim")
    raw.call("XADD", worker.keys.control, "*", b"\xff", b"\xff")
    assert await control.read() == [Hint("cancel", "a"), Hint("reclaim"), Hint("")]
    assert await control.read() == []
    await link.close()


async def test_cancel_marks_are_found_in_one_look(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    marks = CancelMarks(worker.commands, worker.keys)
    assert await marks.check([]) == {}
    raw.call("SET", worker.keys.cancel("a"), "user left")
    raw.call("SET", worker.keys.cancel("b"), b"\xff")
    raw.call("LPUSH", worker.keys.cancel("c"), "wrong type")
    with capture_logs() as logs:
        assert await marks.check(["a", "b", "c", "d"]) == {"a": "user left", "b": "\ufffd", "c": ""}
    assert [event["key"] for event in logs] == [worker.keys.cancel("c")]


async def test_a_server_that_can_not_answer_cancels_nothing(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    raw.call("ACL", "SETUSER", "blind", "on", ">pw", "~*", "+@all", "-get")
    try:
        await worker.commands.call("AUTH", "blind", "pw")
        with pytest.raises(ServerError):
            await CancelMarks(worker.commands, worker.keys).check(["a"])
        await push(worker, id="a", prompt="x")
        (entry,) = await worker.take(1)
        assert (await worker.replies.open(worker.envelope(entry)))[0].cancel_reason is None
    finally:
        raw.call("ACL", "DELUSER", "blind")


async def test_operators_settings_are_read(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    assert await read_config(worker.commands, worker.keys) == {}
    raw.call("HSET", worker.keys.config, "paused", "1", "max_depth", "50")
    assert await read_config(worker.commands, worker.keys) == {"paused": "1", "max_depth": "50"}


async def test_a_dead_letter_keeps_the_job_and_why(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    entry = Entry("high", "77-0", {b"id": b"\xff", b"prompt": b"x"}, deliveries=3)
    await add_dead_letter(worker.commands, worker.keys, entry, error=ErrorCode.BAD_REQUEST, workers=("w", "v"))
    ((_, flat),) = raw.call("XRANGE", worker.keys.dead, "-", "+")
    assert dict(zip(flat[::2], flat[1::2], strict=True)) == {
        b"id": b"\xff",
        b"prompt": b"x",
        b"error": b"bad_request",
        b"deliveries": b"3",
        b"workers": b"w,v",
        b"source_id": b"high/77-0",
    }


async def test_dead_letters_are_bounded(make_worker: MakeWorker, raw: RespClient) -> None:
    """Whole jobs of a megabyte each would fill the server."""
    worker = make_worker("w")
    large = Entry("low", "1-0", {b"prompt": b"x" * 200_000, b"y" * 300_000: b"", b"seed": b"1"})
    await add_dead_letter(worker.commands, worker.keys, large, error="poison")
    ((_, letter),) = raw.events(worker.keys.dead)
    assert len(letter["prompt"]) == 64 * 1024
    assert letter["cut"] == "prompt," + "y" * 256
    raw.pipeline(*[("XADD", worker.keys.dead, "*", "error", "x")] * 1100)
    await add_dead_letter(worker.commands, worker.keys, Entry("low", "2-0", {}), error="poison")
    assert raw.call("XLEN", worker.keys.dead) == 1000
