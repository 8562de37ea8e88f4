"""One connection that knows when it was lost, and one clear line where it can't be made."""

import asyncio
import re
import socket
from pathlib import Path

import pytest

from tests.conftest import server_command
from tests.wire.resp import RespClient
from worker.embedded import EmbeddedServer
from worker.errors import StartupError
from worker.streams import connection
from worker.streams.address import SOCKET_TIMEOUT_S, redacted
from worker.streams.connection import Backoff, Link
from worker.streams.errors import ConnectionLostError, ServerError
from worker.streams.keys import QueueKeys, is_waiting_name
from worker.streams.outcomes import persist
from worker.streams.server_check import check_server
from worker.worker_id import new_worker_id


async def test_answers_come_as_bytes_and_errors_as_errors(redis_url: str, keys: QueueKeys) -> None:
    link = Link(redis_url, "test")
    assert await link.call("SET", keys.config, b"\xff\x00") == b"OK"
    assert await link.call("GET", keys.config) == b"\xff\x00"
    with pytest.raises(ServerError) as caught:
        await link.call("LPUSH", keys.config, "x")
    assert caught.value.code == "WRONGTYPE"
    answers = await link.batch([("GET", keys.config), ("LPUSH", keys.config, 1), ("EXISTS", keys.config)])
    assert [answers[0], type(answers[1]), answers[2]] == [b"\xff\x00", ServerError, 1]
    await link.close()


async def test_the_generation_changes_exactly_with_the_connection(redis_url: str) -> None:
    link = Link(redis_url, "test")
    assert (link.is_up, link.generation) == (False, 0)
    await link.call("PING")
    await link.call("PING")
    assert (link.is_up, link.generation) == (True, 1)
    await link.reset()
    assert await link.connect() == 2
    with pytest.raises(ConnectionLostError):
        await link.batch([("PING",)], generation=1)
    assert await link.batch([("PING",)], generation=2) == [b"PONG"]
    await link.close()


async def test_a_connection_that_the_server_closes_is_lost_once_and_never_retried(
    redis_url: str, raw: RespClient, keys: QueueKeys
) -> None:
    link = Link(redis_url, "test")
    client_id = await link.call("CLIENT", "ID")
    raw.call("CLIENT", "KILL", "ID", client_id)
    with pytest.raises(ConnectionLostError):
        await link.call("INCR", keys.config)
    assert await link.call("INCR", keys.config) == 1
    assert link.generation == 2
    await link.close()


async def test_a_cancelled_call_does_not_leave_its_answer_to_the_next(redis_url: str, keys: QueueKeys) -> None:
    link = Link(redis_url, "test")
    await link.call("PING")
    blocked = asyncio.create_task(link.call("BLPOP", keys.control, 5))
    await asyncio.sleep(0.01)
    blocked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await blocked
    assert await link.call("ECHO", "mine") == b"mine"
    await link.close()


async def test_calls_of_many_tasks_get_their_own_answers(redis_url: str) -> None:
    link = Link(redis_url, "test")
    answers = await asyncio.gather(*(link.call("ECHO", number) for number in range(50)))
    assert answers == [str(number).encode() for number in range(50)]
    await link.close()


def test_blocking_reads_end_well_before_the_sockets_timeout() -> None:
    """Else each idle wait would look like a dead connection."""
    assert connection.BLOCK_MS / 1000 + 2 <= SOCKET_TIMEOUT_S


async def test_a_link_may_wait_less_long_for_an_answer_than_the_others(redis_url: str, keys: QueueKeys) -> None:
    """Leases have to be renewed over another connection before they run out."""
    link = Link(redis_url, "leases", max_answer_s=0.2)
    with pytest.raises(ConnectionLostError):
        await link.call("XREAD", "BLOCK", 5000, "STREAMS", keys.control, "$")
    assert await link.call("PING") == b"PONG"
    await link.close()


async def test_a_silent_server_is_a_lost_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        link = Link(f"redis://127.0.0.1:{port}?socket_timeout=0.05&socket_connect_timeout=0.05", "test")
        with pytest.raises(ConnectionLostError):
            await link.call("PING")
        await link.close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://host", "no Redis URL"),
        ("localhost:6379", "no Redis URL"),
        ("", "no Redis URL"),
        ("redis://host:port", "no Redis URL"),
        ("redis://host:99999", "no Redis URL"),
        ("redis://host/queue", "no Redis URL"),
        ("redis://host/0?colour=blue", "no Redis URL"),
        ("redis://[::1", "no Redis URL"),
        ("unix://", "no Redis URL"),
        ("unix:///no/such/socket", "can't be reached"),
        ("redis://127.0.0.1:1", "can't be reached"),
        ("redis://no-such-host.invalid", "can't be reached"),
    ],
)
async def test_a_wrong_url_is_one_clear_line(url: str, words: str) -> None:
    with pytest.raises(StartupError, match=words) as caught:
        await check_server(url)
    assert "\n" not in str(caught.value)


async def test_a_wrong_password_is_one_clear_line_without_the_password(redis_url: str) -> None:
    host = redis_url.rpartition("@")[2]
    for wrong in (f"redis://:hunter2@{host}", f"redis://{host}"):
        with pytest.raises(StartupError, match="user or password") as caught:
            await check_server(wrong)
        assert "hunter2" not in str(caught.value)


def test_a_password_is_not_shown() -> None:
    assert redacted("redis://user:p@ss@host:1/0?password=p") == "redis://host:1/0"
    assert redacted("redis://[") == "redis://["
    for password in ("a/b", "a#b", "a?b", "a@b"):
        assert redacted(f"redis://user:{password}@host:1/0") == "redis://host:1/0"
    assert redacted("unix:///run/redis.sock?password=p") == "unix:///run/redis.sock"
    for password in ("a@b", "a?b@c"):
        for url in (f"unix:///s?password={password}", f"redis://h?db=1&password={password}"):
            assert not set("abc") & set(redacted(url).partition("://")[2].removeprefix("h"))


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1", "unix:///no/such/socket", "redis://no-such-host.invalid"])
async def test_a_message_has_no_full_stop_twice(url: str) -> None:
    """The driver's own words end with one, and some with two."""
    with pytest.raises(StartupError) as caught:
        await check_server(url)
    assert not re.search(r"\.\s*\.", str(caught.value)), str(caught.value)
    link = Link(url, "test")
    with pytest.raises(ConnectionLostError) as lost:
        await link.call("PING")
    assert not str(lost.value).endswith("."), "whoever quotes it ends the sentence"


async def test_a_fit_server_tells_its_version(redis_url: str) -> None:
    assert (await check_server(redis_url)).split(".")[0] in ("6", "7", "9")


async def test_a_server_that_evicts_is_refused(redis_url: str, raw: RespClient) -> None:
    try:
        raw.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        with pytest.raises(StartupError, match=r"allkeys-lru.*as soon as maxmemory is set: set it to noeviction"):
            await check_server(redis_url)
        raw.call("CONFIG", "SET", "maxmemory", 2**40)
        with pytest.raises(StartupError, match="allkeys-lru, which evicts jobs and replies: set it to noeviction"):
            await check_server(redis_url)
    finally:
        raw.call("CONFIG", "SET", "maxmemory", 0)
        raw.call("CONFIG", "SET", "maxmemory-policy", "noeviction")


async def test_a_unix_socket_works(tmp_path: Path) -> None:
    path = tmp_path / "s"
    extra = {"unixsocket": str(path), "appendonly": "no"}
    with EmbeddedServer(tmp_path / "data", server_command("valkey-9.1"), extra) as server:
        password = server.url.split("@")[0].rpartition(":")[2]
        link = Link(f"unix://:{password}@{path}", "test")
        assert await link.call("PING") == b"PONG"
        await link.close()


@pytest.mark.parametrize("name", ["", "a b", "a:b", "{a}", "x" * 65, "ü", "a\n"])
def test_a_queue_name_that_can_not_be_part_of_a_key_is_refused(name: str) -> None:
    with pytest.raises(StartupError):
        QueueKeys(name)


@pytest.mark.parametrize("host", ["", "host-17.a_b", "a:b", "{a}", "x" * 300, "ü\n", "STREAMS", "handover", "tenant.0"])
def test_a_workers_name_is_a_consumers_whatever_its_host_is_called(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No word of Redis, and nothing that entries wait under: it ends with the process and something random."""
    monkeypatch.setattr("socket.gethostname", lambda: host)
    name = new_worker_id()
    assert re.fullmatch(r"[A-Za-z0-9_.-]{0,32}-[0-9]+-[0-9a-f]{8}", name)
    assert len(name) <= 64
    assert not is_waiting_name(name)


def test_all_keys_of_a_queue_share_a_slot() -> None:
    keys = QueueKeys("smollm2")
    everything = [*keys.lanes, keys.reply("a"), keys.state("a"), keys.cancel("a"), keys.prompt("a"), keys.control]
    everything += [keys.dead, keys.workers, keys.worker("w"), keys.config]
    assert all(key.startswith("pagemill:{smollm2}:") for key in everything)
    assert len(set(everything)) == len(everything)


async def test_calls_that_may_be_repeated_are_until_they_are_answered() -> None:
    errors: list[Exception] = [ConnectionLostError("x"), ServerError("OOM full"), ServerError("READONLY x")]

    async def call() -> str:
        if errors:
            raise errors.pop(0)
        return "done"

    assert await persist(call, cap_s=0.01) == "done"
    errors.append(ServerError("WRONGTYPE x"))
    with pytest.raises(ServerError):
        await persist(call, cap_s=0.01)


async def test_back_off_stays_below_its_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def note(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", note)
    backoff = Backoff(0.5)
    for _ in range(20):
        await backoff.wait()
    assert max(waits) <= 0.5
    assert waits[0] <= 0.05
    backoff.reset()
    await backoff.wait()
    assert waits[-1] <= 0.05
