"""The commands against Sentinels and Clusters, and the rules that `pagemill acl` prints."""

import shlex
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import server_command
from tests.servers.groups import ClusterGroup, Served
from tests.servers.process import ServerProcess
from tests.unit.cli.conftest import Pagemill
from tests.wire.resp import RespClient
from worker.streams.keys import QueueKeys


@pytest.mark.parametrize("topology", ["sentinel", "cluster", "tls", "unix"])
def test_the_commands_find_the_queues_server(pagemill: Pagemill, serve: Callable[[str], Served], topology: str) -> None:
    served = serve(topology)
    keys = QueueKeys(f"q{uuid.uuid4().hex[:8]}")
    server, queue = ("--redis-url", served.url), ("--queue", keys.queue)
    added = pagemill("redis", *server, "XADD", keys.jobs("normal"), "*", "id", "a", "prompt", "x")
    assert added.code == 0, added.err
    entry_id = added.out.strip()
    with RespClient(served.direct_url(keys.queue)) as raw:
        assert raw.call("XRANGE", keys.jobs("normal"), "-", "+")[0][0].decode() == entry_id
        raw.call("XADD", keys.dead, "*", "error", "poison", "source_id", "normal/1-1")
    assert pagemill("cancel", *server, *queue, "a").code == 0
    assert pagemill("redis", *server, "GET", keys.cancel("a")).out != ""
    for name in ("jobs", "workers", "dead"):
        result = pagemill(name, *server, *queue)
        assert result.code == 0, result.err
    assert "poison" in result.out


def test_a_raw_command_follows_its_key_through_the_cluster(pagemill: Pagemill, serve: Callable[[str], Served]) -> None:
    """Whatever the key: one of each node."""
    served = serve("cluster")
    assert isinstance(served, ClusterGroup)
    names = [uuid.uuid4().hex for _ in range(8)]
    assert len({served.owner(name).port for name in names}) > 1
    for name in names:
        assert pagemill("redis", "--redis-url", served.url, "SET", name, "here").out == "OK\n"
        assert served.owner(name).call("GET", name) == b"here"


@pytest.mark.parametrize("role", ["worker", "client"])
@pytest.mark.parametrize("topology", ["single", "sentinel", "cluster"])
@pytest.mark.parametrize(("name", "version"), [("valkey-9.1", "7.2"), ("redis-6.2", "6.2")])
def test_servers_take_the_rules_as_they_are_printed(
    pagemill: Pagemill, serve: Callable[[str], Served], role: str, topology: str, name: str, version: str
) -> None:
    printed = pagemill("acl", role, "--user", "printed", "--server-version", version, "--topology", topology)
    with RespClient(serve(name).direct_url("q")) as raw:
        assert raw.call(*shlex.split(printed.out)) == b"OK"
        raw.call("ACL", "DELUSER", "printed")


@pytest.mark.parametrize(("name", "version"), [("valkey-9.1", "9.1"), ("redis-6.2", "6.2")])
def test_an_acl_file_can_be_made_of_the_printed_lines(
    pagemill: Pagemill, tmp_path: Path, name: str, version: str
) -> None:
    lines = [pagemill("acl", role, "--server-version", version, "--file").out for role in ("worker", "client")]
    own = 'user default on ">a/b@c" allcommands allkeys allchannels\n'.replace('"', "")
    (tmp_path / "users.acl").write_text("".join([own, *lines]))
    server = ServerProcess(
        server_command(name), tmp_path / "server", [f"aclfile {tmp_path / 'users.acl'}"], login=False
    )
    try:
        assert sorted(user.decode() for user in server.call("ACL", "USERS")) == [
            "default",
            "pagemill-client",
            "pagemill-worker",
        ]
    finally:
        server.stop()


def test_a_version_that_is_none_is_one_line(pagemill: Pagemill) -> None:
    result = pagemill("acl", "worker", "--server-version", "new")
    assert result.code == 2
    assert "redis_version" in result.err
