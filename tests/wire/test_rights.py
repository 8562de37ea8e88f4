"""The ACL rules of docs/wire.md: a worker can do all its work under its rule, a client can do no more than its part."""

from collections.abc import Callable, Iterator

import pytest

from tests.wire.resp import RespClient, RespError
from tests.wire.workers import TestWorker, push
from worker.streams.admission import Admission
from worker.streams.connection import Link
from worker.streams.keys import QueueKeys
from worker.streams.overload import OldestWatch
from worker.streams.queue_config import parse_config
from worker.streams.registry import CancelMarks, ControlReader, Registry, add_dead_letter, read_config
from worker.streams.reply_writer import ReplyStatus
from worker.streams.scripts import SettleStatus
from worker.streams.server_check import check_server
from worker.streams.turns import Turns

WORKER = (
    "resetchannels -@all +@stream -xsetid -xtrim +eval +evalsha +script|load +get +set +strlen +del +unlink +exists"
    " +pexpire +pttl +hset +hget +hgetall +hmget +hdel +hincrby +zadd +zrange +zrangebyscore +zrem +time +info +wait"
    " +multi +exec +discard +hello +auth +ping ~pagemill:{*}:*"
)
# Subcommands can be taken away since 7.0; before, they can only be granted.
NO_GROUP_CHANGES = {
    "valkey-9.1": "-xgroup|destroy -xgroup|setid",
    "redis-6.2": "-xgroup +xgroup|create +xgroup|delconsumer",
}
CLIENT = (
    "resetchannels -@all +xadd +xread +xrange +xlen +hgetall +hello +auth +ping %W~pagemill:{*}:jobs:high"
    " %W~pagemill:{*}:jobs:normal %W~pagemill:{*}:jobs:low %W~pagemill:{*}:control %R~pagemill:{*}:reply:*"
    " %R~pagemill:{*}:state:* (-@all +set %W~pagemill:{*}:cancel:* %W~pagemill:{*}:prompt:*)"
)


def selectors(rule: str) -> list[str]:
    """The rule as arguments of ACL SETUSER: a selector in brackets is one of them."""
    head, _, selector = rule.partition(" (")
    return [*head.split(), *([f"({selector}"] if selector else [])]


@pytest.fixture
def as_user(redis_url: str, raw: RespClient) -> Iterator[Callable[[str], str]]:
    """Makes a user with a rule and answers the URL under which it logs in."""

    def make(rule: str) -> str:
        raw.call("ACL", "SETUSER", "tester", "reset", "on", ">secret", *selectors(rule))
        return f"redis://tester:secret@{redis_url.rpartition('@')[2]}"

    yield make
    raw.call("ACL", "DELUSER", "tester")


async def test_a_worker_does_all_its_work_under_its_rule(
    as_user: Callable[[str], str], raw: RespClient, keys: QueueKeys, request: pytest.FixtureRequest
) -> None:
    server = request.node.callspec.params["redis_url"]
    url = as_user(f"{WORKER} {NO_GROUP_CHANGES[server]}")
    await check_server(url)
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


@pytest.mark.parametrize(
    "command",
    [
        ("XGROUP", "DESTROY", "pagemill:{m}:jobs:normal", "workers"),
        ("XTRIM", "pagemill:{m}:jobs:normal", "MAXLEN", "0"),
        ("CONFIG", "SET", "maxmemory", "1"),
        ("GET", "another:key"),
        ("KEYS", "*"),
        ("FLUSHALL",),
    ],
)
def test_a_worker_can_do_no_harm_beyond_its_queues(
    as_user: Callable[[str], str], command: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    url = as_user(f"{WORKER} {NO_GROUP_CHANGES[request.node.callspec.params['redis_url']]}")
    with RespClient(url) as worker, pytest.raises(RespError, match="NOPERM"):
        worker.call(*command)


@pytest.mark.parametrize("redis_url", ["valkey-9.1"], indirect=True)
def test_a_client_sends_reads_and_cancels_and_nothing_else(as_user: Callable[[str], str], raw: RespClient) -> None:
    with RespClient(as_user(CLIENT)) as client:
        client.call("XADD", "pagemill:{acl}:jobs:normal", "*", "prompt", "x")
        client.call("XADD", "pagemill:{acl}:control", "MAXLEN", "~", 1000, "*", "op", "cancel")
        client.call("XREAD", "STREAMS", "pagemill:{acl}:reply:a", "0-0")
        client.call("XRANGE", "pagemill:{acl}:reply:a", "-", "+")
        client.call("HGETALL", "pagemill:{acl}:state:a")
        client.call("SET", "pagemill:{acl}:cancel:a", "x", "EX", 60)
        client.call("SET", "pagemill:{acl}:prompt:a", "x", "EX", 60)
        for refused in (
            ("XADD", "pagemill:{acl}:jobs:other", "*", "prompt", "x"),
            ("XADD", "pagemill:{acl}:reply:a", "*", "e", "token"),
            ("XRANGE", "pagemill:{acl}:jobs:normal", "-", "+"),
            ("XRANGE", "pagemill:{acl}:dead", "-", "+"),
            ("GET", "pagemill:{acl}:prompt:a"),
            ("SET", "pagemill:{acl}:prompt:a", "x", "GET"),
            ("HGETALL", "pagemill:{acl}:config"),
            ("HSET", "pagemill:{acl}:config", "paused", "1"),
            ("DEL", "pagemill:{acl}:jobs:normal"),
            ("EVAL", "return 1", 0),
        ):
            with pytest.raises(RespError, match="NOPERM"):
                client.call(*refused)
    raw.call("DEL", "pagemill:{acl}:jobs:normal", "pagemill:{acl}:control", "pagemill:{acl}:cancel:a")
    raw.call("DEL", "pagemill:{acl}:prompt:a")
