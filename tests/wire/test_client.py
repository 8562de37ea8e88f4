"""Our own client against replies written by hand on a real server: the rules for clients, one by one."""

import asyncio
import json
import re
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

import pytest

import worker.async_client
from tests.conftest import server_command
from tests.faults.proxy import Proxy
from worker.client import AsyncClient, BadJobError, Client, JobFailedError, ReplyBrokenError, ReplyLostError
from worker.embedded import EmbeddedServer
from worker.protocol_envelope import parse_envelope
from worker.reply_events import Reply, ReplyEvent
from worker.streams.connection import Link
from worker.streams.errors import ConnectionLostError, LoginRefusedError, ServerError
from worker.streams.keys import TERMINAL_SEQ, QueueKeys

END = {"e": "end", "finish": "stop"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of these tests alone: they cut all its connections."""
    with EmbeddedServer(tmp_path_factory.mktemp("valkey"), server_command("valkey-9.1")) as server:
        yield server.url


@pytest.fixture
async def link(url: str) -> AsyncIterator[Link]:
    link = Link(url, "test")
    yield link
    await link.close()


@pytest.fixture
async def client(url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncClient]:
    monkeypatch.setattr(worker.async_client, "BLOCK_MS", 50)
    client = AsyncClient(url, f"q{uuid.uuid4().hex}", retry_s=10)
    yield client
    await client.aclose()


class HandWriter:
    """Writes the events of one reply, as a worker would."""

    def __init__(self, link: Link, keys: QueueKeys, job_id: str = "job") -> None:
        self.link = link
        self.keys = keys
        self.job_id = job_id

    async def write(self, event_id: str, **fields: Any) -> None:
        """One event; lists are written as JSON."""
        words = [text for pair in fields.items() for text in (pair[0].rstrip("_"), _text(pair[1]))]
        await self.link.call("XADD", self.keys.reply(self.job_id), event_id, *words)

    async def open(self, attempt: int, covered: int = 0) -> None:
        await self.write(f"{attempt}-0", e="open", worker="w", **{"from": covered})

    async def token(self, event_id: str, text: str, ids: list[int], n: int) -> None:
        await self.write(event_id, e="token", text=text, ids=ids, n=n)

    async def end(self, attempt: int, text: str = "") -> None:
        await self.write(f"{attempt}-{TERMINAL_SEQ}", **END, text=text)

    async def forget(self) -> None:
        await self.link.call("DEL", self.keys.reply(self.job_id))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@pytest.fixture
def writer(link: Link, client: AsyncClient) -> HandWriter:
    return HandWriter(link, client.keys)


Action = Callable[[ReplyEvent], Awaitable[None]]


async def read(
    client: AsyncClient, action: Action | None = None, limit_s: float | None = None
) -> tuple[str, list[str]]:
    """The text of the reply, and the kinds of its events; `action` may change the world after each event."""
    reply, kinds = Reply(), []
    async for event in client.stream("job", limit_s=limit_s):
        reply.add(event)
        kinds.append(event.kind)
        if action is not None:
            await action(event)
    return reply.text, kinds


async def test_a_late_reader_gets_everything_from_the_start_and_stops_at_the_terminal_event(
    client: AsyncClient, writer: HandWriter
) -> None:
    await writer.open(7)
    await writer.token("7-1", "Hel", [1], 1)
    await writer.token("7-2", "lo é", [2, 3], 3)
    await writer.end(7, text="!")
    assert await read(client) == ("Hello é!", ["open", "token", "token", "end"])


async def test_a_reader_that_comes_first_waits_through_empty_reads(client: AsyncClient, writer: HandWriter) -> None:
    reading = asyncio.create_task(read(client))
    await _wait_for_reads(writer.link, 3)
    assert not reading.done()
    await writer.open(7)
    await writer.end(7, text="there")
    assert await reading == ("there", ["open", "end"])


async def test_a_new_attempt_that_goes_on_where_the_old_one_stopped_appends(
    client: AsyncClient, writer: HandWriter
) -> None:
    await writer.open(7)
    await writer.token("7-1", "one ", [1], 1)
    await writer.open(9, covered=1)
    await writer.token("9-1", "two", [2], 2)
    await writer.end(9)
    assert await read(client) == ("one two", ["open", "token", "open", "token", "end"])


async def test_a_reset_clears_what_came_before(client: AsyncClient, writer: HandWriter) -> None:
    await writer.open(7)
    await writer.token("7-1", "wrong", [1, 2], 2)
    await writer.open(9, covered=2)
    await writer.write("9-1", e="reset", why="beam", n=0)
    await writer.token("9-2", "right", [3], 1)
    await writer.end(9)
    assert await read(client) == ("right", ["open", "token", "open", "reset", "token", "end"])


async def test_an_open_below_what_is_held_makes_it_read_again_from_the_start(
    client: AsyncClient, writer: HandWriter
) -> None:
    await writer.open(7)
    await writer.token("7-1", "lost", [1, 2], 2)

    async def lose_the_reply(event: ReplyEvent) -> None:
        if event.id == "7-1":
            await writer.forget()
            await writer.open(9)
            await writer.token("9-1", "anew", [3], 1)
            await writer.end(9)

    assert await read(client, lose_the_reply) == ("anew", ["open", "token", "reset", "open", "token", "end"])


async def test_a_gap_makes_it_read_again_from_the_start(client: AsyncClient, writer: HandWriter) -> None:
    await writer.open(7)
    await writer.token("7-1", "a", [1], 1)

    async def repair(event: ReplyEvent) -> None:
        if event.id == "7-1":
            await writer.token("7-3", "c", [3], 3)
        if event.kind == "reset":
            await writer.forget()
            await writer.open(8)
            await writer.token("8-1", "abc", [1, 2, 3], 3)
            await writer.end(8)

    assert await read(client, repair) == ("abc", ["open", "token", "reset", "open", "token", "end"])


async def test_a_gap_that_stays_is_an_error_and_no_endless_loop(client: AsyncClient, writer: HandWriter) -> None:
    await writer.open(7)
    await writer.token("7-1", "a", [1], 1)
    await writer.token("7-3", "c", [3], 3)
    with pytest.raises(ReplyBrokenError, match="7-3"):
        await read(client)


async def test_a_lost_connection_is_no_loss_where_the_last_event_is_still_there(
    client: AsyncClient, writer: HandWriter
) -> None:
    await writer.open(7)
    await writer.token("7-1", "on ", [1], 1)

    async def cut(event: ReplyEvent) -> None:
        if event.id == "7-1":
            await _kill_connections(writer.link)
            await writer.token("7-2", "and on", [2], 2)
            await writer.end(7)

    assert await read(client, cut) == ("on and on", ["open", "token", "token", "end"])


async def test_after_a_lost_connection_a_reply_that_was_cut_back_is_read_again(
    client: AsyncClient, writer: HandWriter
) -> None:
    """A promoted replica lacks the last events: without this a reader at 9-0 waits for ever for more than 7-…."""
    await writer.open(7)
    await writer.token("7-1", "begun", [1], 1)
    await writer.open(9, covered=1)

    async def fail_over(event: ReplyEvent) -> None:
        if event.id == "9-0":
            await writer.forget()
            await writer.open(7)
            await writer.token("7-1", "begun", [1], 1)
            await writer.end(7, text=" and ended")
            await _kill_connections(writer.link)

    text, kinds = await read(client, fail_over)
    assert (text, kinds[3:]) == ("begun and ended", ["reset", "open", "token", "end"])


async def test_past_its_time_limit_a_job_that_nobody_knows_is_given_up(client: AsyncClient) -> None:
    with pytest.raises(ReplyLostError, match="job job is unknown"):
        await read(client, limit_s=0.02)


async def test_past_its_time_limit_a_job_whose_reply_has_expired_is_given_up(client: AsyncClient, link: Link) -> None:
    await link.call("HSET", client.keys.state("job"), "status", "end")
    with pytest.raises(ReplyLostError, match=r"ended \(end\), and its reply is gone"):
        await read(client, limit_s=0.02)


async def test_past_its_time_limit_a_job_that_runs_is_waited_for(client: AsyncClient, writer: HandWriter) -> None:
    await writer.link.call("HSET", client.keys.state("job"), "status", "running")
    reading = asyncio.create_task(read(client, limit_s=0.02))
    await _wait_for_reads(writer.link, 4)
    assert not reading.done()
    await writer.open(7)
    await writer.end(7, text="late")
    assert (await reading)[0] == "late"


async def test_an_error_event_ends_the_reply_with_its_code(client: AsyncClient, writer: HandWriter) -> None:
    await writer.open(7)
    await writer.write(f"7-{TERMINAL_SEQ}", e="error", code="bad_request", message="say what", retryable=0)
    reply = await client.result("job")
    assert (reply.is_ok, reply.error, reply.finish) == (False, ("bad_request", "say what"), None)


async def test_a_failed_jobs_error_can_be_raised_with_all_that_it_says(client: AsyncClient, writer: HandWriter) -> None:
    await writer.open(7)
    await writer.token("7-1", "so far", [1], 1)
    error = {"code": "overloaded", "message": "send it later", "retryable": 1, "details": {"retry_after_ms": 250}}
    await writer.write(f"7-{TERMINAL_SEQ}", e="error", **error)
    reply = await client.result("job")
    with pytest.raises(JobFailedError, match="overloaded: send it later") as raised:
        reply.raise_for_error()
    assert (raised.value.code, raised.value.message) == ("overloaded", "send it later")
    assert (raised.value.is_retryable, raised.value.details) == (True, {"retry_after_ms": 250})
    assert reply.text == "so far"


async def test_an_unstreamed_replys_checkpoints_are_no_part_of_its_ids_twice(
    client: AsyncClient, writer: HandWriter
) -> None:
    await writer.open(7)
    await writer.write("7-1", e="token", ids=[1, 2], n=2)
    await writer.write(f"7-{TERMINAL_SEQ}", **END, text="abc", ids=[1, 2, 3])
    reply = (await client.result("job")).raise_for_error()
    assert (reply.text, reply.ids) == ("abc", [1, 2, 3])


async def half_read(client: AsyncClient, writer: HandWriter) -> Reply:
    """A reply of two choices of which somebody read the first three events."""
    await writer.open(7)
    await writer.write("7-1", e="token", text="He", ids=[1], n=1, index=0)
    await writer.write("7-2", e="token", text="Ho", ids=[2, 3], n=3, index=1)
    reply = Reply()
    async with aclosing(client.stream("job")) as events:
        while reply.last_id != "7-2":
            reply.add(await anext(events))
    return Reply.from_json(reply.to_json())


async def test_another_process_reads_on_from_what_was_kept(client: AsyncClient, writer: HandWriter) -> None:
    kept = await half_read(client, writer)
    assert (kept.last_id, kept.num_tokens, kept.is_over) == ("7-2", 3, False)
    await writer.write("7-3", e="token", text="llo", ids=[4], n=4, index=0)
    choices = [{"index": 0, "finish": "stop"}, {"index": 1, "finish": "length"}]
    await writer.write(f"7-{TERMINAL_SEQ}", **END, text="", choices=choices)
    reply = await client.result("job", held=kept)
    assert [(choice.text, choice.ids, choice.finish) for choice in reply.choices] == [
        ("Hello", [1, 4], "stop"),
        ("Ho", [2, 3], "length"),
    ]
    assert [event.id async for event in client.stream("job", after="7-2")] == ["7-3", f"7-{TERMINAL_SEQ}"]
    assert [event async for event in client.stream("job", after=f"7-{TERMINAL_SEQ}")] == []
    again = await client.result("job", held=Reply.from_json(reply.to_json()))
    assert again == reply


@pytest.mark.parametrize(
    ("after", "num_held"),
    [("7-2", 2), ("7-9", 3), ("6-1", None)],
    ids=["other-tokens-held", "an-event-that-is-gone", "an-attempt-that-is-gone"],
)
async def test_what_was_kept_and_fits_no_more_is_read_again(
    client: AsyncClient, writer: HandWriter, after: str, num_held: int | None
) -> None:
    await half_read(client, writer)
    await writer.end(7)
    kinds = [event.kind async for event in client.stream("job", after=after, num_held=num_held)]
    assert kinds == ["reset", "open", "token", "token", "end"]


@pytest.mark.parametrize("after", ["", "7", "$", "7-x", "0-0 0-0"])
async def test_what_is_no_events_id_is_refused(client: AsyncClient, after: str) -> None:
    with pytest.raises(BadJobError, match="no event's id"):
        await client.result("job", held=Reply(last=ReplyEvent(after, "token")))


@pytest.mark.parametrize(
    "fields",
    [{"ids": "[1"}, {"ids": '["a"]'}, {"ids": "{}", "n": "1"}, {"ids": "[1]", "n": "many"}, {"ids": "[1]", "n": "1.5"}],
)
async def test_junk_in_a_reply_is_an_error_that_names_the_event(
    client: AsyncClient, writer: HandWriter, fields: dict[str, str]
) -> None:
    await writer.open(7)
    await writer.write("7-1", e="token", **fields)
    with pytest.raises(ReplyBrokenError, match="7-1"):
        await client.result("job")


async def test_a_reply_that_was_deleted_under_its_reader_is_given_up_without_a_time_limit(
    client: AsyncClient, writer: HandWriter, link: Link
) -> None:
    await writer.open(7)

    async def delete(_event: ReplyEvent) -> None:
        await writer.forget()
        await link.call("HSET", client.keys.state("job"), "status", "abandoned")

    with pytest.raises(ReplyLostError, match=r"ended \(abandoned\)") as raised:
        await read(client, delete)
    assert (raised.value.code, raised.value.is_retryable) == ("reply_lost", True)


async def test_a_job_that_had_begun_and_of_which_nothing_is_left_is_given_up_after_a_while(
    client: AsyncClient, writer: HandWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can't wait in its lane any more, so there is nothing to wait for without a time limit of its own either."""
    monkeypatch.setattr("worker.async_client.BLOCK_MS", 20)
    monkeypatch.setattr("worker.async_client.GONE_S", 0.1)
    await writer.open(7)

    async def forget(_event: ReplyEvent) -> None:
        await writer.forget()

    with pytest.raises(ReplyLostError, match="unknown"):
        await read(client, forget)
    with pytest.raises(ReplyLostError, match="unknown"):
        _ = [event async for event in client.stream("job", after="7-0")]


async def test_a_jobs_own_time_limit_is_remembered(client: AsyncClient) -> None:
    job_id = await client.submit("hello", ttl_ms=20)
    with pytest.raises(ReplyLostError, match="unknown"):
        await client.result(job_id)


async def test_a_result_has_text_ids_finish_and_usage(client: AsyncClient, writer: HandWriter) -> None:
    await writer.open(7)
    await writer.token("7-1", "42", [4, 2], 2)
    await writer.write(f"7-{TERMINAL_SEQ}", **END, text=".", usage={"prompt": 3, "completion": 2})
    reply = await client.result("job")
    assert (reply.is_ok, reply.text, reply.ids, reply.finish) == (True, "42.", [4, 2], "stop")
    assert reply.usage == {"prompt": 3, "completion": 2}


async def test_a_job_goes_out_as_flat_fields(client: AsyncClient, link: Link) -> None:
    job_id = await client.submit("héllo", lane="low", max_tokens=8, stream=False, stop=["a", "b"], temperature=0.5)
    messages = [{"role": "user", "content": "hi"}]
    await client.submit(messages, job_id="mine", lane="low")
    entries = await link.call("XRANGE", client.keys.jobs("low"), "-", "+")
    first, second = [dict(zip(flat[::2], flat[1::2], strict=True)) for _, flat in entries]
    assert first == {
        b"id": job_id.encode(),
        b"prompt": "héllo".encode(),
        b"max_tokens": b"8",
        b"stream": b"0",
        b"stop": b'["a", "b"]',
        b"temperature": b"0.5",
    }
    assert (second[b"id"], json.loads(second[b"messages"])) == (b"mine", messages)


async def test_token_ids_prompts_by_name_and_fields_that_are_none_go_out_as_they_should(
    client: AsyncClient, link: Link
) -> None:
    await client.submit([1, 2, 3], job_id="a", lane="low", max_tokens=None)
    await client.submit(None, job_id="b", lane="low", prompt_ref="book")
    await client.submit(None, job_id="c", lane="low", encoding="msgpack", payload=b"\x81\xff")
    jobs = [flat for _, flat in await link.call("XRANGE", client.keys.jobs("low"), "-", "+")]
    assert jobs == [
        [b"id", b"a", b"tokens", b"[1, 2, 3]"],
        [b"id", b"b", b"prompt_ref", b"book"],
        [b"id", b"c", b"encoding", b"msgpack", b"payload", b"\x81\xff"],
    ]


async def test_an_idempotency_key_names_the_job_as_a_worker_names_it(client: AsyncClient, link: Link) -> None:
    job_id = await client.submit("hello", tenant="acme", idempotency_key="order-7")
    assert job_id == await client.submit("hello", tenant="acme", idempotency_key="order-7")
    for entry_id, flat in await link.call("XRANGE", client.keys.jobs("normal"), "-", "+"):
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        assert parse_envelope("normal", entry_id.decode(), fields, now_ms=0).id == job_id


async def test_what_can_not_be_sent_is_refused_before_anything_is(client: AsyncClient, link: Link) -> None:
    for refused in (
        {"lane": "middle"},
        {"job_id": "{x}:reply:y"},
        {"id": "mine"},
        {"stop": "\ud800"},
        {"meta": object()},
    ):
        with pytest.raises(BadJobError):
            await client.submit("hello", **refused)
    assert await link.call("EXISTS", *client.keys.lanes) == 0


async def test_a_submit_whose_connection_was_lost_is_sent_again_under_its_id(client: AsyncClient, link: Link) -> None:
    await client.submit("first")
    await _kill_connections(link)
    job_id = await client.submit("second")
    entries = await link.call("XRANGE", client.keys.jobs("normal"), "-", "+")
    assert [flat[1] for _, flat in entries][1:] == [job_id.encode()]


async def test_cancel_leaves_a_mark_that_lasts_and_a_hint(client: AsyncClient, link: Link) -> None:
    await client.cancel("job", "user left")
    assert await link.call("GET", client.keys.cancel("job")) == b"user left"
    assert await link.call("TTL", client.keys.cancel("job")) > 86_000
    ((_, hint),) = await link.call("XRANGE", client.keys.control, "-", "+")
    assert hint == [b"op", b"cancel", b"id", b"job"]


async def test_a_server_that_stays_away_is_an_error_after_the_retry_time() -> None:
    client = AsyncClient("redis://127.0.0.1:1", "q", retry_s=0)
    with pytest.raises(ConnectionLostError) as raised:
        await client.submit("hello")
    assert (raised.value.code, raised.value.is_retryable, raised.value.details) == ("connection_lost", True, {})
    assert raised.value.message == str(raised.value)
    with pytest.raises(ConnectionLostError):
        await client.result("job")


@pytest.fixture
async def proxy(url: str) -> AsyncIterator[Proxy]:
    """On the way to the server."""
    proxy, parts = Proxy(), urlsplit(url)
    proxy.server = (str(parts.hostname), int(parts.port or 0))
    yield proxy
    await proxy.close()


async def through(proxy: Proxy, client: AsyncClient, url: str) -> AsyncClient:
    """A client of the same queue whose connections the proxy carries."""
    port = await proxy.listen("client")
    return AsyncClient(url.replace(f":{urlsplit(url).port}", f":{port}"), client.keys.queue, retry_s=30)


async def test_a_server_that_is_away_for_a_while_is_waited_for(
    client: AsyncClient, writer: HandWriter, url: str, proxy: Proxy
) -> None:
    """Sending, asking, calling off and reading all go on once it is back."""
    async with await through(proxy, client, url) as remote:
        await writer.open(7)
        first = asyncio.Event()
        seen = Reply()

        async def follow() -> None:
            async for event in remote.stream("job"):
                seen.add(event)
                first.set()

        following = asyncio.create_task(follow())
        await first.wait()
        server, proxy.server = proxy.server, None
        for line in proxy.lines():
            line.cut()
        calls = asyncio.gather(remote.submit("hello"), remote.status("job"), remote.cancel("job"))
        await writer.token("7-1", "meanwhile", [1], 1)
        await writer.end(7)
        begun: list[asyncio.Future[Any]] = [following, calls]
        ended, _ = await asyncio.wait(begun, timeout=0.3)
        assert not ended
        proxy.server = server
        await following
        job_id, status, _ = await calls
    assert (seen.text, seen.is_ok, status) == ("meanwhile", True, None)
    ((_, flat),) = await writer.link.call("XRANGE", client.keys.jobs("normal"), "-", "+")
    assert flat[1] == job_id.encode()


async def test_a_submit_whose_answer_was_lost_is_the_same_job_twice(
    client: AsyncClient, link: Link, url: str, proxy: Proxy
) -> None:
    """Of which a worker drops one: same id, same contents."""
    async with await through(proxy, client, url) as remote:
        await remote.status("job")
        lost: list[bool] = []
        for line in proxy.lines():
            line.lose_answer(lambda: lost.append(True))
        job_id = await remote.submit("hello", max_tokens=3)
    entries = [flat for _, flat in await link.call("XRANGE", client.keys.jobs("normal"), "-", "+")]
    assert lost == [True]
    assert entries == [[b"id", job_id.encode(), b"prompt", b"hello", b"max_tokens", b"3"]] * 2


async def test_a_full_server_is_waited_out_and_then_told(url: str, link: Link) -> None:
    queue = f"q{uuid.uuid4().hex}"
    await link.call("CONFIG", "SET", "maxmemory", "1")
    await link.call("CONFIG", "RESETSTAT")
    async with AsyncClient(url, queue, retry_s=0) as hasty, AsyncClient(url, queue, retry_s=30) as patient:
        with pytest.raises(ServerError, match="OOM") as raised:
            await hasty.submit("hello")
        assert (raised.value.code, raised.value.is_retryable) == ("OOM", True)
        submitting = asyncio.create_task(patient.submit("hello"))
        while await _num_refused(link) < 3:  # noqa: ASYNC110 - the server tells only who asks
            await asyncio.sleep(0.01)
        await link.call("CONFIG", "SET", "maxmemory", "0")
        job_id = await submitting
        ((_, flat),) = await link.call("XRANGE", patient.keys.jobs("normal"), "-", "+")
        assert flat[1] == job_id.encode()


async def test_a_login_that_is_refused_is_told_at_once(url: str) -> None:
    wrong = f"redis://default:wrong@{url.rpartition('@')[2]}"
    async with AsyncClient(wrong, "q", retry_s=3600) as client:
        for call in (client.submit("hello"), client.result("job"), client.status("job")):
            with pytest.raises(LoginRefusedError) as raised:
                await call
            assert (raised.value.code, raised.value.is_retryable) == ("unauthorized", False)


def test_the_client_is_imported_without_what_computes() -> None:
    code = "import sys, worker.client; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in ran.stdout.split()}
    assert "redis" in loaded
    assert loaded & {"torch", "numpy", "numba", "transformers", "tokenizers", "model", "scheduler", "kernels"} == set()


def test_the_client_without_an_event_loop_does_the_same(url: str) -> None:
    queue = f"q{uuid.uuid4().hex}"

    async def answer(job_id: str) -> None:
        link = Link(url, "test")
        writer = HandWriter(link, QueueKeys(queue), job_id)
        await writer.open(7)
        await writer.token("7-1", "hel", [1], 1)
        await writer.end(7, text="lo")
        await link.close()

    with Client(url, queue) as client:
        job_id = client.submit("hi", max_tokens=1)
        asyncio.run(answer(job_id))
        assert "".join(event.text for event in client.stream(job_id)) == "hello"
        assert client.result(job_id).text == "hello"
        for event in client.stream(job_id):
            assert event.kind == "open"
            break
        kept = Reply()
        kept.add(event)
        assert client.result(job_id, held=kept).text == "hello"
        assert [event.kind for event in client.stream(job_id, after="7-1")] == ["end"]
        assert client.status(job_id) is None
        client.cancel(job_id)


async def _wait_for_reads(link: Link, count: int) -> None:
    """Until the server has answered `count` more XREADs."""
    target = await _num_reads(link) + count
    deadline = asyncio.get_running_loop().time() + 20
    while await _num_reads(link) < target:
        assert asyncio.get_running_loop().time() < deadline, f"fewer than {count} reads in 20 s"
        await asyncio.sleep(0.01)


async def _num_reads(link: Link) -> int:
    stats = (await link.call("INFO", "commandstats")).decode()
    found = re.search(r"cmdstat_xread:calls=(\d+)", stats)
    return int(found[1]) if found else 0


async def _num_refused(link: Link) -> int:
    """How many commands the server has refused for want of memory."""
    found = re.search(r"errorstat_OOM:count=(\d+)", (await link.call("INFO", "errorstats")).decode())
    return int(found[1]) if found else 0


async def _kill_connections(link: Link) -> None:
    """Cut every connection but `link`'s own."""
    await link.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
