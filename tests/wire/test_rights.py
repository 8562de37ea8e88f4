"""The ACL rules of docs/wire.md: a worker can do all its work under its rule, a client can do no more than its part."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.servers.groups import ClusterGroup, SentinelGroup, Served
from tests.servers.process import QUOTED
from tests.wire.resp import Part, RespClient, RespError
from tests.wire.workers import TestWorker, push
from worker.client import AsyncClient
from worker.errors import StartupError
from worker.streams.admission import Admission
from worker.streams.connection import Link
from worker.streams.keys import QueueKeys
from worker.streams.overload import OldestWatch
from worker.streams.queue_config import parse_config
from worker.streams.registry import CancelMarks, ControlReader, Registry, add_dead_letter, read_config
from worker.streams.reply_writer import ReplyStatus
from worker.streams.rights import client_rule, rule_words, worker_rule
from worker.streams.scripts import SettleStatus
from worker.streams.server_check import check_server
from worker.streams.turns import Turns

Make = Callable[[str, str], str]


@pytest.fixture
def as_user(served: Served, raw: RespClient, keys: QueueKeys) -> Iterator[Make]:
    """Makes a user of that name with a rule and answers the URL under which it logs in at the queue's server."""

    def make(name: str, rule: str) -> str:
        raw.call("ACL", "SETUSER", name, "reset", "on", ">secret", *rule_words(rule))
        return f"redis://{name}:secret@{served.direct_url(keys.queue).rpartition('@')[2]}"

    yield make
    raw.call("ACL", "DELUSER", "worker", "client")


def version_of(raw: RespClient) -> str:
    """What INFO calls `redis_version`."""
    return str(raw.call("INFO", "server").decode().partition("redis_version:")[2].split()[0])


async def test_a_worker_does_all_its_work_under_its_rule(as_user: Make, raw: RespClient, keys: QueueKeys) -> None:
    url = as_user("worker", worker_rule(version_of(raw)))
    await check_server(url, keys.queue)
    worker = TestWorker(url, keys, "w")
    for job_id in ("a", "b", "c"):
        await push(worker, id=job_id, prompt="x", deadline_ms="5" if job_id == "c" else "9999999999999")
    first, second = await worker.take(2, room=2)
    writer = await worker.open(first)
    await worker.replies.recover(writer)
    await worker.renew()
    writer.token([1], "a")
    await worker.replies.flush()
    writer.end("stop", usage={}, receipt={})
    await worker.replies.flush()
    assert writer.status is ReplyStatus.ENDED
    assert await worker.outcomes.settle(worker.envelope(first), "done") is SettleStatus.DONE
    assert await worker.outcomes.hand_over(worker.envelope(second))
    (again,) = await worker.source.reclaim(8)
    assert await worker.outcomes.drop(again)
    oldest = OldestWatch(
        worker.commands,
        worker.scripts,
        keys,
        worker.clock,
        worker.leases,
    )
    assert len(await oldest.look()) == 1
    admission = Admission(worker.scripts, lease_ms=1000, run_ttl_ms=60_000)
    limits = {"rate": "1", "token_rate": "1", "concurrency": "1"}
    admission.configure(parse_config({f"tenant:*:{name}": value for name, value in limits.items()}))
    worker.source.picker = Turns(oldest, admission, worker.leases, is_fair=True)
    for job_id in ("d", "e", "f"):
        await push(worker, id=job_id, prompt="x", tenant=job_id)
    for entry in await worker.take(2, room=2):
        assert await admission.admit(worker.envelope(entry)) is None
        await admission.ended(worker.envelope(entry), 10)
        await worker.outcomes.put_aside(worker.envelope(entry))
    assert [entry.fields[b"id"] for entry in await worker.take(1, room=1)] == [b"d"]
    registry = Registry(worker.commands, worker.scripts, keys, "w", worker.clock, 1000)
    await registry.beat({"slots": 1})
    await registry.sweep()
    await worker.scripts.sweep_consumers("high", idle_ms=0)
    await registry.leave()
    assert await CancelMarks(worker.commands, keys).check(["a"]) == {}
    assert await read_config(worker.commands, keys) == {}
    await add_dead_letter(worker.commands, keys, first, error="poison")
    control = ControlReader(Link(url, "control"), keys, block_ms=10)
    await control.read()
    await control._link.close()
    await worker.close()


JOBS, REPLY = "pagemill:{acl}:jobs:normal", "pagemill:{acl}:reply:a"
# Nobody but an administrator, whatever the key.
ADMINISTRATORS = [
    ("XTRIM", JOBS, "MAXLEN", "0"),
    ("XSETID", JOBS, "99999999999999-0"),
    ("XGROUP", "DESTROY", JOBS, "workers"),
    ("XGROUP", "SETID", JOBS, "workers", "$"),
    ("CONFIG", "SET", "maxmemory", "1"),
    ("CONFIG", "GET", "requirepass"),
    ("ACL", "SETUSER", "worker", "allcommands", "allkeys"),
    ("ACL", "LIST"),
    ("CLIENT", "KILL", "TYPE", "normal"),
    ("CLIENT", "LIST"),
    ("SCRIPT", "FLUSH"),
    ("SCRIPT", "KILL"),
    ("KEYS", "*"),
    ("SCAN", "0"),
    ("DBSIZE",),
    ("RANDOMKEY",),
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("SWAPDB", "0", "1"),
    ("SELECT", "1"),
    ("SHUTDOWN", "NOSAVE"),
    ("REPLICAOF", "NO", "ONE"),
    ("MONITOR",),
    ("BGSAVE",),
    ("BGREWRITEAOF",),
    ("MODULE", "LIST"),
    ("RENAME", JOBS, REPLY),
    ("DUMP", JOBS),
    ("RESTORE", REPLY, "0", "x"),
    ("MIGRATE", "127.0.0.1", "1", JOBS, "0", "1"),
    ("PERSIST", REPLY),
    ("TYPE", JOBS),
    ("OBJECT", "ENCODING", JOBS),
    ("SUBSCRIBE", "news"),
    ("PUBLISH", "news", "x"),
    ("LPUSH", "pagemill:{acl}:config", "x"),
    ("INCR", "pagemill:{acl}:config"),
    ("SADD", "pagemill:{acl}:config", "x"),
]
OTHERS = [
    ("GET", "another:key"),
    ("SET", "another:key", "x"),
    ("DEL", "another:key"),
    ("XADD", "another:key", "*", "prompt", "x"),
    ("HSET", "pagemill:config", "paused", "1"),
    ("XRANGE", "pagemill:m:jobs:normal", "-", "+"),
]
# Before 7.0 a client may read lanes, and write replies: it is trusted.
CLIENTS_BEFORE_7 = [
    ("XADD", "pagemill:{acl}:jobs:other", "*", "prompt", "x"),
    ("XADD", "pagemill:{acl}:dead", "*", "prompt", "x"),
    ("XRANGE", "pagemill:{acl}:dead", "-", "+"),
    ("GET", "pagemill:{acl}:prompt:a"),
    ("GET", "pagemill:{acl}:cancel:a"),
    ("HGETALL", "pagemill:{acl}:config"),
    ("HSET", "pagemill:{acl}:config", "paused", "1"),
    ("HSET", "pagemill:{acl}:state:a", "status", "done"),
    ("ZADD", "pagemill:{acl}:workers", "1", "w"),
    ("DEL", JOBS),
    ("UNLINK", JOBS),
    ("DEL", REPLY),
    ("PEXPIRE", REPLY, "1"),
    ("XDEL", JOBS, "1-1"),
    ("XACK", JOBS, "workers", "1-1"),
    ("XCLAIM", JOBS, "workers", "me", "0", "1-1"),
    ("XAUTOCLAIM", JOBS, "workers", "me", "0", "0-0"),
    ("XREADGROUP", "GROUP", "workers", "me", "STREAMS", JOBS, ">"),
    ("XPENDING", JOBS, "workers"),
    ("XGROUP", "CREATE", JOBS, "workers", "$", "MKSTREAM"),
    ("XGROUP", "DELCONSUMER", JOBS, "workers", "handover"),
    ("XINFO", "STREAM", JOBS),
    ("EVAL", "return 1", "0"),
    ("EVALSHA", "0" * 40, "0"),
    ("SCRIPT", "LOAD", "return 1"),
    ("INFO",),
    ("MULTI",),
]
CLIENTS = [
    ("XADD", REPLY, "*", "e", "token"),
    ("XRANGE", JOBS, "-", "+"),
    ("XREAD", "STREAMS", JOBS, "0-0"),
    ("XRANGE", "pagemill:{acl}:control", "-", "+"),
    ("SET", "pagemill:{acl}:prompt:a", "x", "GET"),
    ("SET", "pagemill:{acl}:state:a", "x"),
    ("SET", REPLY, "x"),
    ("SET", JOBS, "x"),
]
ALLOWED = [
    ("XADD", JOBS, "*", "prompt", "x"),
    ("XADD", "pagemill:{acl}:control", "MAXLEN", "~", 1000, "*", "op", "cancel"),
    ("XREAD", "STREAMS", REPLY, "0-0"),
    ("XRANGE", REPLY, "-", "+"),
    ("XLEN", REPLY),
    ("XLEN", JOBS),
    ("HGETALL", "pagemill:{acl}:state:a"),
    ("SET", "pagemill:{acl}:cancel:a", "x", "EX", 60),
    ("SET", "pagemill:{acl}:prompt:a", "x", "EX", 60),
]


def not_refused(user: RespClient, commands: Sequence[tuple[Part, ...]]) -> list[tuple[Part, ...]]:
    """Those of `commands` that the user's rights don't forbid."""
    passed = []
    for command in commands:
        try:
            user.call(*command)
        except RespError as error:
            if str(error).startswith("NOPERM"):
                continue
        passed.append(command)
    return passed


def test_a_worker_can_do_no_harm_beyond_its_queues(as_user: Make, raw: RespClient) -> None:
    with RespClient(as_user("worker", worker_rule(version_of(raw)))) as worker:
        assert not_refused(worker, ADMINISTRATORS + OTHERS) == []
        for key in ("another:key", "pagemill:config"):
            with pytest.raises(RespError, match="permissions"):
                worker.call("EVAL", "return redis.call('SET', KEYS[1], 'x')", 1, key)
        assert raw.call("EXISTS", "another:key", "pagemill:config") == 0


def test_a_client_sends_reads_and_cancels_and_nothing_else(as_user: Make, raw: RespClient) -> None:
    version = version_of(raw)
    refused = ADMINISTRATORS + OTHERS + CLIENTS_BEFORE_7 + ([] if version.startswith("6.") else CLIENTS)
    with RespClient(as_user("client", client_rule(version))) as client:
        assert not_refused(client, ALLOWED) == ALLOWED
        assert not_refused(client, refused) == []
    raw.call("DEL", JOBS, "pagemill:{acl}:control", "pagemill:{acl}:cancel:a", "pagemill:{acl}:prompt:a")


@pytest.mark.parametrize("redis_url", ["sentinel", "cluster", "cluster-6.2"], indirect=True)
@pytest.mark.parametrize("has_more", [True, False])
async def test_the_service_works_under_its_rules_wherever_the_server_is(
    served: Served, redis_url: str, keys: QueueKeys, *, has_more: bool
) -> None:
    """Without the rights that save detours it works as well: whoever asks the wrong server is told."""
    assert isinstance(served, SentinelGroup | ClusterGroup)
    topology = ("sentinel" if isinstance(served, SentinelGroup) else "cluster") if has_more else "single"
    servers = served.servers if isinstance(served, SentinelGroup) else served.nodes
    version = servers[0].info("redis_version")
    for server in servers:
        for name, rule in (("worker", worker_rule), ("client", client_rule)):
            words = rule_words(rule(version, topology))
            server.call("ACL", "SETUSER", name, "reset", "on", ">secret", *words)
    as_worker, as_client = (
        redis_url.replace(f"default:{QUOTED}", f"{name}:secret", 1) for name in ("worker", "client")
    )
    assert await check_server(as_worker, keys.queue)
    worker, client = TestWorker(as_worker, keys, "w"), AsyncClient(as_client, keys.queue)
    job_id = await client.submit("hello")
    (entry,) = await worker.take(1)
    writer = await worker.open(entry)
    writer.token([1], "a")
    await worker.replies.flush()
    writer.end("stop", usage={}, receipt={})
    await worker.replies.flush()
    assert await worker.outcomes.settle(worker.envelope(entry), "done") is SettleStatus.DONE
    assert (await client.result(job_id)).ids == [1]
    assert await client.status(job_id) == "done"
    await client.cancel(job_id)
    await client.aclose()
    await worker.close()
    for server in servers:
        server.call("ACL", "DELUSER", "worker", "client")


@pytest.mark.parametrize("redis_url", ["valkey-9.1"], indirect=True)
async def test_a_database_of_its_own_takes_the_right_to_select_it(as_user: Make, raw: RespClient) -> None:
    url = as_user("worker", worker_rule(version_of(raw)))
    with pytest.raises(StartupError, match=r"takes the right \+select"):
        await check_server(url.replace("/0", "/1"))
    url = as_user("worker", worker_rule(version_of(raw)).replace(" ~", " +select ~"))
    assert await check_server(url.replace("/0", "/1"), "q")


def test_the_handbook_shows_the_rules_that_are_shipped() -> None:
    page = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
    assert f"`{worker_rule()}`" in page
    assert f"`{client_rule()}`" in page
