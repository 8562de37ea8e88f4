"""What a worker finds out about its server before it starts, and what it waits for."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.conftest import server_command
from tests.faults.proxy import Proxy
from tests.servers.groups import PRIMARY_NAME, TLS, ClusterGroup, SentinelGroup, Served, slot_of, tls_context
from tests.servers.process import PASSWORD, QUOTED, ServerProcess, free_port
from tests.wire.resp import RespClient, encode
from worker.errors import StartupError
from worker.streams.connection import Link
from worker.streams.errors import ConnectionLostError, ServerError
from worker.streams.keys import QueueKeys
from worker.streams.rights import _probes, rule_words, worker_rule
from worker.streams.scripts import SCRIPT_NAMES, source_of
from worker.streams.server_check import check_server

QUEUE = "start"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(server_command("valkey-9.1"), tmp_path / "server")
    yield process
    process.stop()


@asynccontextmanager
async def answering(info: str) -> AsyncIterator[str]:
    """A server that answers INFO with `info` and everything else with an error, and its URL."""

    tasks = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())
        while line := await reader.readline():
            words = [
                (await reader.readexactly(int((await reader.readline())[1:]) + 2))[:-2] for _ in range(int(line[1:]))
            ]
            writer.write(encode((info,))[4:] if words[0] == b"INFO" else b"-ERR unknown command\r\n")
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listener:
        yield f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        await asyncio.gather(*filter(None, tasks))


@pytest.mark.parametrize("version", ["6.0.16", "5.0", "2.8.24"])
async def test_a_server_that_is_too_old_is_refused(version: str) -> None:
    async with answering(f"redis_version:{version}\r\n") as url:
        with pytest.raises(StartupError, match=rf"version is {version}: Redis 6.2 or Valkey is needed"):
            await check_server(url)


async def test_a_server_that_does_not_tell_its_policy_is_worth_a_warning() -> None:
    async with answering("redis_version:7.2.0\r\n") as url:
        with capture_logs() as logs:
            assert await check_server(url) == "7.2.0"
    assert [log["event"] for log in logs] == ["redis_policy_unknown"]


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "allkeys-random"])
async def test_a_policy_that_evicts_is_refused_with_or_without_a_limit(policy: str) -> None:
    async with answering(f"redis_version:7.2.0\r\nmaxmemory:0\r\nmaxmemory_policy:{policy}\r\n") as url:
        with pytest.raises(StartupError, match=f"maxmemory-policy is {policy}.* set it to noeviction"):
            await check_server(url)


async def test_a_server_without_a_file_of_its_own_is_worth_a_warning(redis_url: str) -> None:
    with capture_logs() as logs:
        await check_server(redis_url, QUEUE)
    assert [log["event"] for log in logs] == ["redis_forgets"]


async def test_a_read_only_replica_is_refused_by_its_primarys_name(server: ServerProcess) -> None:
    port = free_port()
    server.call("REPLICAOF", "127.0.0.1", port)
    with pytest.raises(StartupError, match=rf"read-only replica of 127.0.0.1:{port}: .*redis\+sentinel://"):
        await check_server(server.url)


async def test_a_server_that_reads_its_data_is_waited_for(tmp_path: Path) -> None:
    server = ServerProcess(
        server_command("valkey-9.1"),
        tmp_path / "server",
        ["appendonly yes", "key-load-delay 100", "loading-process-events-interval-bytes 1024"],
    )
    try:
        with RespClient(server.url) as client:
            client.pipeline(*(("SET", f"key{number}", "x" * 100) for number in range(5_000)))
            client.call("BGREWRITEAOF")
        server.wait("the file", "INFO", "persistence", until=lambda text: b"aof_rewrite_in_progress:0" in text)
        server.stop()
        server.start()
        link = Link(server.url, "test", QUEUE)
        with pytest.raises(ServerError) as caught:
            await link.call("XLEN", QueueKeys(QUEUE).control)
        assert (caught.value.code, caught.value.is_passing, link.is_up) == ("LOADING", True, True)
        with capture_logs() as logs:
            await check_server(server.url, QUEUE)
        assert await link.call("XLEN", QueueKeys(QUEUE).control) == 0
        await link.close()
        assert server.call("DBSIZE") == 5_000
        told = [(log["event"], log.get("reason")) for log in logs]
        reading = ("redis_waited_for", "the server is reading its data from disk (LOADING)")
        assert told == [reading, ("redis_serves_again", None)]
    finally:
        server.stop()


async def test_a_server_without_room_for_another_client_is_waited_for(server: ServerProcess) -> None:
    with ExitStack() as stack:
        admin = stack.enter_context(RespClient(server.url))
        admin.call("CONFIG", "SET", "maxclients", 1)
        checking = asyncio.create_task(check_server(server.url))
        await asyncio.sleep(0.2)
        assert not checking.done()
        admin.call("CONFIG", "SET", "maxclients", 100)
        assert await checking


# Rights.


@pytest.fixture
def as_user(served: Served, redis_url: str, raw: RespClient) -> Iterator[Callable[[str], str]]:
    """Makes a user with a rule and answers the URL under which it logs in."""

    def make(rule: str) -> str:
        raw.call("ACL", "SETUSER", "starter", "reset", "on", ">secret", *rule_words(rule))
        return f"redis://starter:secret@{redis_url.rpartition('@')[2]}"

    yield make
    raw.call("ACL", "DELUSER", "starter")


async def test_a_right_that_is_missing_is_named(
    as_user: Callable[[str], str], raw: RespClient, keys: QueueKeys
) -> None:
    """Each right that a worker's commands need, taken away by itself."""
    version = re.search(r"redis_version:(\S+)", raw.call("INFO", "server").decode())
    assert version is not None
    whole = worker_rule(version[1])
    assert await check_server(as_user(whole), keys.queue)
    rights = [right for right, _ in _probes(keys)]
    assert len(rights) > 25
    for right in rights:
        if version[1].startswith("6.") and "|" in right:
            rule = whole.replace(f"+{right} ", "") if f"+{right} " in whole else None
        else:
            rule = whole.replace(" ~", f" -{right} ~")
        if rule is not None:
            with pytest.raises(StartupError, match=re.escape(f"grant +{right} (`pagemill acl worker`")):
                await check_server(as_user(rule), keys.queue)


def test_every_command_of_the_scripts_is_tried_at_the_start() -> None:
    """One that isn't is missed only when a job needs it, which then ends the worker."""
    text = "".join(map(source_of, SCRIPT_NAMES))
    called = {word.lower() for word in re.findall(r"(?:call\(|_wrong_type\(|= \{)'([A-Z]+)'", text)}
    tried = {right.partition("|")[0] for right, _ in _probes(QueueKeys("q"))}
    assert len(called) > 15
    assert called - tried == set()


async def test_rights_for_other_keys_are_not_enough(as_user: Callable[[str], str], raw: RespClient) -> None:
    version = raw.call("INFO", "server").decode().partition("redis_version:")[2].split()[0]
    rule = worker_rule(version).replace("~pagemill:{*}:*", "~pagemill:{other}:*")
    with pytest.raises(StartupError, match=re.escape("grant ~pagemill:{*}:* (")):
        await check_server(as_user(rule), QUEUE)


async def test_without_the_right_to_look_the_server_is_refused_in_its_own_words(as_user: Callable[[str], str]) -> None:
    with pytest.raises(StartupError, match=r"NOPERM .*info.*`pagemill acl worker` prints them"):
        await check_server(as_user("-@all +ping"), QUEUE)


# TLS.


@asynccontextmanager
async def tls_port(server: ServerProcess, *, wants_client: bool = False) -> AsyncIterator[int]:
    """A port that speaks TLS in front of the server."""
    proxy = Proxy(tls_context(wants_client=wants_client))
    proxy.server = ("127.0.0.1", server.port)
    yield await proxy.listen("all")
    await proxy.close()


async def test_a_certificate_of_an_unknown_authority_is_refused(server: ServerProcess) -> None:
    async with tls_port(server) as port:
        with pytest.raises(StartupError, match=r"certificate verify failed.*ssl_ca_certs"):
            await check_server(f"rediss://:{QUOTED}@localhost:{port}")
        assert await check_server(f"rediss://:{QUOTED}@localhost:{port}?ssl_cert_reqs=none")
        url = f"rediss://:{QUOTED}@localhost.localdomain:{port}?ssl_ca_certs={TLS / 'ca.pem'}"
        with pytest.raises(StartupError, match="localhost"):
            await check_server(url)


async def test_a_client_shows_its_certificate_where_the_server_wants_one(server: ServerProcess) -> None:
    async with tls_port(server, wants_client=True) as port:
        url = f"rediss://:{QUOTED}@localhost:{port}?ssl_ca_certs={TLS / 'ca.pem'}"
        with pytest.raises(StartupError):
            await check_server(url)
        own = f"ssl_certfile={TLS / 'client.pem'}&ssl_keyfile={TLS / 'client.key'}"
        assert await check_server(f"{url}&{own}")


async def test_tls_to_a_server_without_it_is_one_clear_line(server: ServerProcess) -> None:
    with pytest.raises(StartupError) as caught:
        await check_server(f"rediss://:{QUOTED}@127.0.0.1:{server.port}?socket_connect_timeout=1")
    assert "\n" not in str(caught.value)


# Sentinel.


async def test_a_sentinel_that_can_not_help_is_told_apart(serve: Callable[[str], Served]) -> None:
    group = serve("sentinel")
    assert isinstance(group, SentinelGroup)
    where = f"127.0.0.1:{group.sentinel.port}"
    for url, words in (
        (f"redis+sentinel://:{QUOTED}@{where}/other?sentinel_password={QUOTED}", "watches no 'other'"),
        (
            group.url.replace("sentinel_password=", "sentinel_password=x"),
            "refuses sentinel_username or sentinel_password",
        ),
        (group.url.partition("?")[0], "refuses sentinel_username or sentinel_password"),
        (group.url.replace("default:", "default:x", 1), "Redis refuses the user or password"),
        (f"redis+sentinel://127.0.0.1:{free_port()}/m", "can't be reached.*Check hosts and name"),
    ):
        with pytest.raises(StartupError, match=words) as caught:
            await check_server(url)
        assert PASSWORD not in str(caught.value)


async def test_a_user_of_the_sentinel_needs_one_right(serve: Callable[[str], Served]) -> None:
    group = serve("sentinel")
    assert isinstance(group, SentinelGroup)
    group.sentinel.call("ACL", "SETUSER", "asker", "on", ">secret", "-@all", "+sentinel|get-master-addr-by-name")
    login = "sentinel_username=asker&sentinel_password=secret"
    assert await check_server(f"{group.url.partition('?')[0]}?{login}", QUEUE)
    group.sentinel.call("ACL", "DELUSER", "asker")


async def test_a_primary_that_is_gone_is_waited_for(tmp_path: Path) -> None:
    """The Sentinel knows its name, so there will be another."""
    group = SentinelGroup(server_command("valkey-9.1"), tmp_path)
    try:
        former = group.primary
        former.kill()
        with capture_logs() as logs:
            await check_server(group.url, QUEUE)
        assert group.primary is not former
        assert "no primary of 'pagemill tests' is found" in logs[0]["reason"]
    finally:
        group.stop()


async def test_a_replica_that_is_taken_for_a_primary_is_waited_for(tmp_path: Path) -> None:
    """A user who may not ask for the role sees it all the same before the worker starts."""
    group = SentinelGroup(server_command("valkey-9.1"), tmp_path)
    try:
        primary, other = group.servers
        group.sentinel.call("SENTINEL", "SET", PRIMARY_NAME, "down-after-milliseconds", 60_000)
        for server in group.servers:
            server.call("ACL", "SETUSER", "worker", "on", ">secret", *rule_words(worker_rule()))
        primary.call("REPLICAOF", "127.0.0.1", free_port())
        checking = asyncio.create_task(check_server(group.url.replace(f"default:{QUOTED}", "worker:secret", 1), QUEUE))
        await asyncio.sleep(0.3)
        assert not checking.done()
        primary.call("REPLICAOF", "NO", "ONE")
        assert await checking
        assert other.call("ROLE")[0] == b"slave"
    finally:
        group.stop()


async def test_a_primary_that_was_replaced_is_left_though_it_lives(tmp_path: Path) -> None:
    """It is told so by the Sentinel ten seconds later, and what is written until then is lost."""
    group = SentinelGroup(server_command("valkey-9.1"), tmp_path)
    link = Link(group.url, "test", QUEUE)
    try:
        await link.call("PING")
        generation = link.generation
        await asyncio.to_thread(group.fail_over, is_told=True)
        async with asyncio.timeout(8):
            while link.generation == generation:
                await link.call("PING")
                await asyncio.sleep(0.05)
        port = re.search(rb"tcp_port:(\d+)", await link.call("INFO", "server"))
        assert port is not None
        assert int(port[1]) == group.primary.port
    finally:
        await link.close()
        group.stop()


# Cluster.


async def test_a_cluster_that_does_not_serve_all_slots_is_waited_for(serve: Callable[[str], Served]) -> None:
    group = serve("cluster")
    assert isinstance(group, ClusterGroup)
    owner, slot = group.owner(QUEUE), slot_of(QUEUE)
    other = 0 if slot else 1
    holder = next(node for node in group.nodes if _has(node, other))
    link = Link(group.url, "test", QUEUE)
    assert await check_server(group.url, QUEUE)
    await link.call("XLEN", QueueKeys(QUEUE).control)
    try:
        holder.call("CLUSTER", "DELSLOTS", other)
        owner.wait("the Cluster to fail", "CLUSTER", "INFO", until=lambda text: b"cluster_state:fail" in text)
        checking = asyncio.create_task(check_server(group.url, QUEUE))
        await asyncio.sleep(0.3)
        assert not checking.done()
        (refused,) = await link.batch([("XLEN", QueueKeys(QUEUE).control)])
        assert refused.code == "CLUSTERDOWN"
        with pytest.raises(ConnectionLostError, match="CLUSTERDOWN"):
            await link.connect()
    finally:
        holder.call("CLUSTER", "ADDSLOTS", other)
        for node in group.nodes:
            node.wait("the Cluster to be whole", "CLUSTER", "INFO", until=lambda text: b"cluster_state:ok" in text)
    assert await checking
    assert await link.call("XLEN", QueueKeys(QUEUE).control) == 0
    await link.close()


def _has(node: ServerProcess, slot: int) -> bool:
    mine = node.call("CLUSTER", "MYID")
    return any(owner[2] == mine and first <= slot <= last for first, last, owner, *_ in node.call("CLUSTER", "SLOTS"))
