"""Replies as clients see them: every token once, in order, one terminal event, whatever is lost on the way."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.wire.resp import RespClient
from tests.wire.workers import MakeWorker, TestWorker, eventually, push
from worker.errors import ErrorCode, JobError
from worker.streams.errors import ConnectionLostError, StreamsError
from worker.streams.keys import TERMINAL_SEQ
from worker.streams.leases import Entry
from worker.streams.recovery import recover
from worker.streams.reply_writer import ReplyStatus, ReplyWriter
from worker.streams.scripts import OpenResult

pytestmark = pytest.mark.every_topology


def end(writer: ReplyWriter, finish: str = "stop", meta: str | None = None) -> None:
    """The terminal event."""
    writer.end(finish, usage={"prompt": 1}, receipt={"attempts": 1}, meta=meta)


async def opened(worker: TestWorker, job_id: str = "a") -> tuple[Entry, ReplyWriter]:
    """A job with its reply opened."""
    await push(worker, id=job_id, prompt="x")
    (entry,) = await worker.take(1)
    return entry, await worker.open(entry)


def tokens(raw: RespClient, key: str) -> tuple[list[int], str]:
    """Ids and text as a client puts them together, which also checks the order and `n`."""
    ids: list[int] = []
    text = ""
    is_over = False
    for _, event in raw.events(key):
        assert not is_over, "something stands after the terminal event"
        if event["e"] == "reset":
            ids, text = [], ""
        elif event["e"] == "open":
            assert int(event["from"]) == len(ids)
        elif event["e"] == "token":
            ids += json.loads(event["ids"])
            assert int(event["n"]) == len(ids)
        is_over = event["e"] in ("end", "error")
        text += event.get("text", "")
    return ids, text


async def insist(step: Callable[[], Awaitable[object]]) -> None:
    """Repeats a step over lost connections, as the running batcher does."""
    for _ in range(10):
        try:
            if await step() is not False:
                return
        except ConnectionLostError:
            pass
    pytest.fail("the step never succeeded")


async def test_a_reply_is_open_tokens_end(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    _, writer = await opened(worker)
    writer.token([1, 2], "Hel")
    await worker.replies.flush()
    writer.token([3], "lo")
    await worker.replies.flush()
    end(writer, "stop", meta="m")
    await worker.replies.flush()
    events = raw.events(worker.keys.reply("a"))
    assert [entry_id.partition("-")[2] for entry_id, _ in events] == ["0", "1", "2", str(TERMINAL_SEQ)]
    assert [entry_id.partition("-")[0] for entry_id, _ in events] == [str(writer.attempt)] * 4
    last = events[-1][1]
    assert last == {
        "e": "end",
        "t": last["t"],
        "finish": "stop",
        "text": "",
        "usage": '{"prompt":1}',
        "receipt": '{"attempts":1}',
        "meta": "m",
    }
    assert tokens(raw, worker.keys.reply("a")) == ([1, 2, 3], "Hello")
    assert worker.closed == [writer]
    assert writer.status is ReplyStatus.ENDED


async def test_many_jobs_events_go_out_in_one_pipeline_and_only_their_order_within_a_job_counts(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    worker = make_worker("w")
    writers = [(await opened(worker, f"job{number}"))[1] for number in range(20)]
    for step in range(5):
        for writer in writers:
            writer.token([step], f"{step}")
        assert await worker.replies.flush()
    for writer in writers:
        assert tokens(raw, worker.keys.reply(writer.job_id)) == (list(range(5)), "01234")


async def test_tokens_that_come_while_a_write_is_under_way_gather_for_the_next(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    worker = make_worker("w")
    _, writer = await opened(worker)
    writer.token([0], "0")
    flushing = asyncio.create_task(worker.replies.flush())
    await eventually(lambda: writer.in_flight is not None or flushing.done())
    for number in range(1, 6):
        writer.token([number], str(number))
    await flushing
    await worker.replies.flush()
    assert [event["n"] for _, event in raw.events(worker.keys.reply("a"))[1:]] == ["1", "6"]


async def test_an_event_whose_answer_was_lost_is_in_once(make_worker: MakeWorker, raw: RespClient) -> None:
    """It is never merged with newer tokens: the retry would be a larger event with tokens that are in already."""
    worker = make_worker("w")
    _, writer = await opened(worker)
    writer.token([1], "a")
    worker.reply_link.lose_after = True
    with pytest.raises(ConnectionLostError):
        await worker.replies.flush()
    in_doubt = writer.in_flight
    assert in_doubt is not None
    writer.token([2], "b")
    await worker.replies.flush()
    await worker.replies.flush()
    assert [entry_id for entry_id, _ in raw.events(worker.keys.reply("a"))][1] == in_doubt.entry_id
    assert tokens(raw, worker.keys.reply("a")) == ([1, 2], "ab")


async def test_an_event_that_never_arrived_is_sent_again_byte_for_byte(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    worker = make_worker("w")
    _, writer = await opened(worker)
    writer.token([1], "a")
    event = writer.next_event(worker.clock.now_ms())
    assert event is not None
    writer.token([2], "b")
    worker.reply_link.lose_before = True
    with pytest.raises(ConnectionLostError):
        await worker.replies.flush()
    await worker.replies.flush()
    (_, stored) = raw.call("XREVRANGE", worker.keys.reply("a"), "+", "-")[0]
    assert [part.decode() for part in stored] == list(event.fields)


async def test_a_terminal_event_whose_answer_was_lost_ends_the_reply_once(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    worker = make_worker("w")
    _, writer = await opened(worker)
    end(writer)
    worker.reply_link.lose_after = True
    with pytest.raises(ConnectionLostError):
        await worker.replies.flush()
    await worker.replies.flush()
    assert writer.status is ReplyStatus.ENDED
    assert [event["e"] for _, event in raw.events(worker.keys.reply("a"))] == ["open", "end"]


async def test_a_write_that_is_refused_because_it_is_in_already_is_our_own(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    worker = make_worker("w")
    _, writer = await opened(worker)
    writer.token([1], "a")
    event = writer.next_event(worker.clock.now_ms())
    assert event is not None
    raw.call(*event.command(worker.keys.reply("a")))
    await worker.replies.flush()
    assert writer.status is ReplyStatus.LIVE
    assert tokens(raw, worker.keys.reply("a")) == ([1], "a")


async def test_a_later_attempt_fences_the_earlier_one(make_worker: MakeWorker, raw: RespClient) -> None:
    zombie, owner = make_worker("zombie"), make_worker("owner")
    entry, old = await opened(zombie)
    old.token([1], "a")
    await zombie.replies.flush()
    raw.call("XCLAIM", zombie.keys.jobs("normal"), "workers", "owner", 0, entry.entry_id)
    new = await owner.open(entry)
    recovered = await owner.replies.recover(new)
    assert (recovered.ids, recovered.text) == ((1,), "a")
    old.token([666], "no")
    await zombie.replies.flush()
    assert (old.status, zombie.closed) == (ReplyStatus.FENCED, [old])
    new.token([2], "b")
    await owner.replies.flush()
    assert tokens(raw, owner.keys.reply("a")) == ([1, 2], "ab")


async def test_a_fenced_worker_that_lost_its_connection_writes_nothing(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    zombie, owner = make_worker("zombie"), make_worker("owner")
    entry, old = await opened(zombie)
    raw.call("XCLAIM", zombie.keys.jobs("normal"), "workers", "owner", 0, entry.entry_id)
    await owner.open(entry)
    await zombie.reply_link.reset()
    end(old)
    await zombie.replies.flush()
    assert old.status is ReplyStatus.FENCED
    assert [event["e"] for _, event in raw.events(owner.keys.reply("a"))] == ["open", "open"]


async def test_a_deleted_reply_is_abandoned(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    _, writer = await opened(worker)
    raw.call("DEL", worker.keys.reply("a"))
    writer.token([1], "a")
    await worker.replies.flush()
    assert (writer.status, worker.closed) == (ReplyStatus.ABANDONED, [writer])
    writer.token([2], "b")
    end(writer)
    assert await worker.replies.flush()
    assert raw.call("EXISTS", worker.keys.reply("a")) == 0


@pytest.mark.parametrize("num_lost", [1, 2, 5])
async def test_a_server_that_lost_writes_gets_them_again_from_memory(
    make_worker: MakeWorker, raw: RespClient, num_lost: int
) -> None:
    """A promoted replica holds a prefix of the reply; it would take the next token right after the gap."""
    worker = make_worker("w")
    _, writer = await opened(worker)
    snapshots = []
    for number in range(6):
        snapshots.append(raw.call("DUMP", worker.keys.reply("a")))
        writer.token([number], str(number))
        await worker.replies.flush()
    old_attempt = writer.attempt
    raw.call("RESTORE", worker.keys.reply("a"), 0, snapshots[-num_lost], "REPLACE")
    await worker.reply_link.reset()
    writer.token([6], "6")
    await worker.replies.flush()
    end(writer, "length")
    await worker.replies.flush()
    assert writer.attempt > old_attempt
    assert tokens(raw, worker.keys.reply("a")) == (list(range(7)), "0123456")


@pytest.mark.parametrize("is_owner", [True, False], ids=["owner", "robbed"])
async def test_what_a_server_without_this_attempt_stores_is_not_what_is_stored(
    make_worker: MakeWorker, raw: RespClient, *, is_owner: bool
) -> None:
    """Read from a lagging replica that is promoted after the opening, and gives way to one that knows more."""
    first, second = make_worker("first"), make_worker("second")
    key = first.keys.reply("a")
    entry, old = await opened(first)
    lagging = raw.call("DUMP", key)
    old.token([1, 2], "ab")
    await first.replies.flush()
    raw.call("XCLAIM", first.keys.jobs("normal"), "workers", "second", 0, entry.entry_id)
    new = await second.open(entry)
    whole, opened_first = raw.call("DUMP", key), new.attempt
    raw.call("RESTORE", key, 0, lagging, "REPLACE")
    if not is_owner:
        raw.call("XCLAIM", first.keys.jobs("normal"), "workers", "first", 0, entry.entry_id)
    assert (await second.replies.recover(new)).ids == ()
    if not is_owner:
        assert second.closed == [new]
        assert [event["e"] for _, event in raw.events(key)] == ["open"]
        return
    assert new.attempt > opened_first
    raw.call("RESTORE", key, 0, whole, "REPLACE")
    await second.reply_link.reset()
    new.token([1], "a")
    for _ in range(2):
        await second.replies.flush()
    assert tokens(raw, key) == ([1], "a")


async def lost_writes(worker: TestWorker, raw: RespClient) -> tuple[Entry, ReplyWriter]:
    """A job with two tokens, of which a promoted replica has none."""
    entry, writer = await opened(worker)
    snapshot = raw.call("DUMP", worker.keys.reply("a"))
    writer.token([1, 2], "ab")
    await worker.replies.flush()
    raw.call("RESTORE", worker.keys.reply("a"), 0, snapshot, "REPLACE")
    await worker.reply_link.reset()
    writer.token([3], "c")
    return entry, writer


@pytest.mark.parametrize("what", ["the opening's answer", "what is stored"])
async def test_a_reopening_that_was_lost_half_way_is_not_taken_for_another_workers(
    make_worker: MakeWorker, raw: RespClient, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later attempt is its own: it opens once more, instead of leaving its job to the end of its lease."""
    worker = make_worker("w")
    _, writer = await lost_writes(worker, raw)
    first_attempt, open_reply = writer.attempt, worker.scripts.open

    async def open_and_lose(*arguments: Any, **options: Any) -> OpenResult:
        monkeypatch.undo()
        worker.commands.lose_after = what == "the opening's answer"
        result = await open_reply(*arguments, **options)
        worker.commands.lose_before = True
        return result

    monkeypatch.setattr(worker.scripts, "open", open_and_lose)
    with pytest.raises(ConnectionLostError):
        await worker.replies.flush()
    assert writer.attempt == first_attempt
    await insist(worker.replies.flush)
    end(writer)
    await insist(worker.replies.flush)
    assert writer.status is ReplyStatus.ENDED
    assert tokens(raw, worker.keys.reply("a")) == ([1, 2, 3], "abc")
    assert [event["e"] for _, event in raw.events(worker.keys.reply("a"))] == ["open"] * 3 + ["token", "end"]


async def test_a_reopening_that_was_lost_is_another_workers_once_that_has_the_entry(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    worker, peer = make_worker("w"), make_worker("peer")
    entry, writer = await lost_writes(worker, raw)
    worker.commands.lose_after = True
    with pytest.raises(ConnectionLostError):
        await worker.replies.flush()
    raw.call("XCLAIM", worker.keys.jobs("normal"), "workers", "peer", 0, entry.entry_id)
    await peer.open(entry)
    before = raw.events(worker.keys.reply("a"))
    await insist(worker.replies.flush)
    assert writer.status is ReplyStatus.FENCED
    assert raw.events(worker.keys.reply("a")) == before


async def test_a_server_that_lost_the_whole_reply_gets_it_again(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    _, writer = await opened(worker)
    writer.token([1], "a")
    await worker.replies.flush()
    raw.call("DEL", worker.keys.reply("a"))
    await worker.reply_link.reset()
    writer.token([2], "b")
    await worker.replies.flush()
    assert tokens(raw, worker.keys.reply("a")) == ([1, 2], "ab")


@pytest.mark.parametrize("is_record_lost", [True, False])
async def test_a_server_that_lost_reply_and_entry_is_written_to_only_where_the_record_says_that_the_job_runs(
    make_worker: MakeWorker, raw: RespClient, is_record_lost: bool
) -> None:
    worker = make_worker("w")
    _, writer = await opened(worker)
    raw.call("DEL", worker.keys.reply("a"), worker.keys.jobs("normal"))
    if is_record_lost:
        raw.call("DEL", worker.keys.state("a"))
    await worker.reply_link.reset()
    writer.token([1], "a")
    await worker.replies.flush()
    await worker.replies.flush()
    assert writer.status is (ReplyStatus.ABANDONED if is_record_lost else ReplyStatus.LIVE)
    assert raw.call("EXISTS", worker.keys.reply("a")) == (0 if is_record_lost else 1)


@pytest.mark.parametrize("fate", ["kept", "deleted", "continued"])
async def test_a_reply_in_doubt_is_compared_at_once(make_worker: MakeWorker, raw: RespClient, fate: str) -> None:
    """Its entry is gone: a peer may have settled it, or the client may have deleted the reply."""
    worker = make_worker("w")
    _, writer = await opened(worker)
    if fate == "deleted":
        raw.call("DEL", worker.keys.reply("a"))
    elif fate == "continued":
        raw.call("XADD", worker.keys.reply("a"), f"{writer.attempt + 1}-0", "e", "open")
    worker.replies.doubt(writer)
    await worker.replies.flush()
    expected = {"kept": ReplyStatus.LIVE, "deleted": ReplyStatus.ABANDONED, "continued": ReplyStatus.FENCED}
    assert writer.status is expected[fate]
    assert raw.call("EXISTS", worker.keys.reply("a")) == (0 if fate == "deleted" else 1)


async def test_a_reset_that_the_server_lost_is_told_again(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    _, writer = await opened(worker)
    writer.token([1], "void")
    await worker.replies.flush()
    before_reset = raw.call("DUMP", worker.keys.reply("a"))
    writer.reset("the seed was lost")
    await worker.replies.flush()
    raw.call("RESTORE", worker.keys.reply("a"), 0, before_reset, "REPLACE")
    await worker.reply_link.reset()
    writer.token([2], "new")
    for _ in range(2):
        await worker.replies.flush()
    assert tokens(raw, worker.keys.reply("a")) == ([2], "new")


async def test_an_open_whose_answer_was_lost_opens_again_one_higher(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    await push(worker, id="a", prompt="x")
    (entry,) = await worker.take(1)
    worker.commands.lose_after = True
    with pytest.raises(ConnectionLostError):
        await worker.replies.open(worker.envelope(entry))
    writer = await worker.open(entry)
    assert [entry_id for entry_id, _ in raw.events(worker.keys.reply("a"))][-1] == writer.last_id
    assert raw.hash(worker.keys.state("a"))["crashes"] == "0"


async def test_an_error_comes_after_the_tokens_that_were_gathered(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    _, writer = await opened(worker)
    writer.token([1], "a")
    writer.error(JobError(ErrorCode.OUT_OF_MEMORY, "too much", {"bytes": 7}))
    for _ in range(2):
        await worker.replies.flush()
    *_, (_, token), (_, error) = raw.events(worker.keys.reply("a"))
    assert token["text"] == "a"
    assert {name: error[name] for name in ("code", "message", "retryable", "details")} == {
        "code": "out_of_memory",
        "message": "too much",
        "retryable": "1",
        "details": '{"bytes":7}',
    }


async def test_a_long_run_renews_the_expiry_of_reply_and_record(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    _, writer = await opened(worker)
    registered = worker.replies._live[writer]
    for key in (worker.keys.reply("a"), worker.keys.state("a")):
        raw.call("PEXPIRE", key, 1000)
    registered.expiry_due_ms = 0
    writer.token([1], "a")
    await worker.replies.flush()
    for key in (worker.keys.reply("a"), worker.keys.state("a")):
        assert raw.call("PTTL", key) > 3600 * 1000


async def test_the_running_batcher_outlives_lost_connections(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    writers = [(await opened(worker, f"job{number}"))[1] for number in range(4)]
    rng = random.Random(11)
    writing = asyncio.create_task(worker.replies.run())
    for number in range(60):
        for writer in writers:
            writer.token([number], f"{number} ")
        if rng.random() < 0.2:
            worker.reply_link.lose_after = True
        elif rng.random() < 0.2:
            worker.reply_link.lose_before = True
        await asyncio.sleep(0)
    for writer in writers:
        await worker.replies.drained(writer)
        end(writer)
        await worker.replies.drained(writer)
    writing.cancel()
    for writer in writers:
        assert writer.status is ReplyStatus.ENDED
        expected = (list(range(60)), "".join(f"{number} " for number in range(60)))
        assert tokens(raw, worker.keys.reply(writer.job_id)) == expected


async def test_a_handed_over_job_is_forgotten_once_it_is_drained(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    entry, writer = await opened(worker)
    writer.configure(chunk_ms=60_000)
    writer.token([1], "a")
    await worker.replies.flush()
    writer.token([2], "b")
    writing = asyncio.create_task(worker.replies.run())
    await worker.replies.drained(writer)
    await worker.outcomes.hand_over(worker.envelope(entry))
    worker.replies.discard(writer)
    writer.token([3], "c")
    await worker.replies.drained(writer)
    writing.cancel()
    assert tokens(raw, worker.keys.reply("a")) == ([1, 2], "ab")


async def test_recovery_reads_long_replies_in_pages_and_only_what_follows_the_last_reset(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    worker = make_worker("w")
    key = worker.keys.reply("long")
    commands: list[tuple[str, ...]] = [("XADD", key, "5-0", "e", "open", "from", "0")]
    commands.append(("XADD", key, "5-1", "e", "token", "ids", "[9]", "n", "1", "text", "void", "seed", "77"))
    commands.append(("XADD", key, "6-1", "e", "reset", "why", "x", "n", "0"))
    commands.extend(
        ("XADD", key, f"7-{number}", "e", "token", "ids", f"[{number}]", "n", str(number + 1), "text", "é")
        for number in range(1200)
    )
    raw.pipeline(*commands)
    recovered = await recover(worker.commands, key)
    assert recovered.ids == tuple(range(1200))
    assert recovered.text == "é" * 1200
    assert recovered.seed == 77


async def test_recovery_names_an_event_that_no_worker_wrote(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    raw.call("XADD", worker.keys.reply("bad"), "5-1", "e", "token", "ids", "{")
    with pytest.raises(StreamsError, match="5-1"):
        await recover(worker.commands, worker.keys.reply("bad"))


@pytest.mark.two_servers
async def test_random_faults_lose_and_double_nothing(make_worker: MakeWorker, raw: RespClient) -> None:
    """Lost answers, lost sends and failovers to a prefix, 12 tokens a job, in any order."""
    for seed in range(25):
        rng = random.Random(seed)
        worker = make_worker(f"w{seed}")
        _, writer = await opened(worker, f"job{seed}")
        key = worker.keys.reply(writer.job_id)
        snapshots = [raw.call("DUMP", key)]
        for number in range(12):
            writer.token([number], f"{number} ")
            worker.reply_link.lose_after = rng.random() < 0.25
            worker.reply_link.lose_before = rng.random() < 0.25
            await insist(worker.replies.flush)
            snapshots.append(raw.call("DUMP", key))
            if rng.random() < 0.2:
                raw.call("RESTORE", key, 0, rng.choice(snapshots), "REPLACE")
                await worker.reply_link.reset()
        end(writer, "length")
        while writer.status is ReplyStatus.LIVE:
            await insist(worker.replies.flush)
        assert writer.status is ReplyStatus.ENDED, f"seed {seed}"
        expected = (list(range(12)), "".join(f"{number} " for number in range(12)))
        assert tokens(raw, key) == expected, f"seed {seed}"
