"""What Redis URLs say, and one clear line for those that say nothing."""

from pathlib import Path

import pytest
from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection

from worker.errors import StartupError
from worker.streams.address import CONNECT_TIMEOUT_S, Topology, parse_address, redacted


def test_one_server_over_tcp_tls_or_a_socket() -> None:
    tcp = parse_address("redis://me:p%40ss@host:7/2")
    assert (tcp.topology, tcp.nodes, tcp.kind) == (Topology.SINGLE, (("host", 7),), Connection)
    assert tcp.options == {
        "username": "me",
        "password": "p@ss",
        "db": 2,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
    }
    tls = parse_address("rediss://host?ssl_cert_reqs=none&socket_timeout=3")
    assert (tls.nodes, tls.kind, tls.timeout_s) == ((("host", 6379),), SSLConnection, 3.0)
    assert tls.options["ssl_cert_reqs"] == "none"
    unix = parse_address("unix://:secret@/run/redis.sock?db=1")
    assert (unix.nodes, unix.kind) == ((), UnixDomainSocketConnection)
    assert (unix.options["path"], unix.options["db"], unix.options["password"]) == ("/run/redis.sock", 1, "secret")


def test_sentinels_have_hosts_a_name_and_a_login_of_their_own() -> None:
    url = "redis+sentinel://me:p%2Fw@h1,[::1]:7,h3:26380/my%20master/3?sentinel_username=s&sentinel_password=q%40&socket_timeout=2"
    address = parse_address(url)
    assert address.topology is Topology.SENTINEL
    assert address.nodes == (("h1", 26379), ("::1", 7), ("h3", 26380))
    assert (address.service, address.timeout_s, address.kind) == ("my master", 2.0, Connection)
    assert (address.options["username"], address.options["password"], address.options["db"]) == ("me", "p/w", 3)
    sentinels = address.of_sentinels().options
    assert sentinels["username"] == "s"
    assert sentinels["password"] == "q@"
    assert "db" not in sentinels
    assert address.plain_url(("10.0.0.7", 6380)) == "redis://me:p%2Fw@10.0.0.7:6380/3?socket_timeout=2"
    # The server's login is nothing that Sentinels know.
    assert "password" not in parse_address("redis+sentinel://:secret@h/m").of_sentinels().options


def test_a_cluster_has_several_hosts_and_one_database() -> None:
    address = parse_address("redis+cluster://:secret@h1:7000,h2,[fe80::1]:7002")
    assert address.topology is Topology.CLUSTER
    assert address.nodes == (("h1", 7000), ("h2", 6379), ("fe80::1", 7002))
    assert address.options["password"] == "secret"
    assert address.plain_url(("fe80::1", 7)) == "redis://:secret@[fe80::1]:7/0"
    assert parse_address("redis+cluster://h/0").topology is Topology.CLUSTER


def test_tls_holds_for_sentinels_and_servers_alike(tmp_path: Path) -> None:
    authority = tmp_path / "ca.pem"
    authority.touch()
    address = parse_address(f"rediss+sentinel://h/m?ssl_ca_certs={authority}")
    assert address.kind is SSLConnection
    assert address.options["ssl_ca_certs"] == address.of_sentinels().options["ssl_ca_certs"] == str(authority)
    assert address.plain_url(("h", 1)).startswith("rediss://h:1/0?ssl_ca_certs=")
    assert parse_address("rediss+cluster://h").kind is SSLConnection


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://h1",
        "redis+sentinel:///mymaster",
        "redis+sentinel://h1,/mymaster",
        "redis+sentinel://h1:port/mymaster",
        "redis+sentinel://h1/mymaster/zero",
        "redis+sentinel://h1/mymaster?colour=blue",
        "redis+cluster://",
        "redis+cluster://h/1",
        "redis+cluster://h?db=1",
        "redis+cluster://h:99999",
        "redis+ring://h",
        "unix+cluster://h",
        "redis://h?sentinel_password=x",
        "rediss://h?ssl_cert_reqs=maybe",
        "redis://h?ssl_cert_reqs=none",
    ],
)
def test_what_can_not_be_understood_is_one_line_that_says_what_can(url: str) -> None:
    with pytest.raises(
        StartupError, match=r"is no Redis URL: use redis://.*redis\+sentinel://.*redis\+cluster://"
    ) as caught:
        parse_address(url)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile"])
def test_a_file_that_is_missing_is_named(option: str) -> None:
    with pytest.raises(StartupError, match=rf"rediss://h:1: {option} names /no/such, which doesn't exist"):
        parse_address(f"rediss://me:hunter2@h:1?{option}=/no/such")


def test_passwords_are_shown_by_nobody() -> None:
    assert redacted("redis+sentinel://me:p@h1,h2/m?sentinel_password=q") == "redis+sentinel://h1,h2/m"
    assert redacted("redis+cluster://:p@h1:1,h2:2?a=b") == "redis+cluster://h1:1,h2:2"
    assert "hunter" not in redacted("redis+sentinel://h/m?sentinel_password=hunter@2")
