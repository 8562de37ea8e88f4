"""The faults of connections and of the server are what they are called."""

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.conftest import SERVER_BINARIES, server_command
from tests.faults.checker import Promise
from tests.faults.proxy import Line, Proxy
from tests.faults.server import FaultyServer
from tests.wire.resp import Part
from worker.streams.connection import Link
from worker.streams.errors import ConnectionLostError
from worker.streams.keys import QueueKeys


@pytest.fixture
async def proxy(valkey_url: str) -> AsyncIterator[Proxy]:
    """A proxy to the session's server."""
    proxy = Proxy()
    proxy.server = ("127.0.0.1", int(valkey_url.rpartition(":")[2].partition("/")[0]))
    yield proxy
    await proxy.close()


@pytest.fixture
async def link(proxy: Proxy, valkey_url: str) -> AsyncIterator[Link]:
    """A connection through the proxy, which waits no longer than half a second for an answer."""
    address = f"127.0.0.1:{await proxy.listen('party')}/0?socket_timeout=0.5"
    link = Link(f"{valkey_url.rpartition('@')[0]}@{address}", "through the proxy")
    await link.call("PING")
    yield link
    await link.close()


@pytest.fixture
async def direct(valkey_url: str) -> AsyncIterator[Link]:
    """A connection that the proxy has no part in."""
    link = Link(valkey_url, "direct")
    yield link
    await link.close()


def only_line(proxy: Proxy) -> Line:
    (line,) = proxy.lines("party")
    return line


async def test_commands_pass(link: Link, direct: Link, keys: QueueKeys) -> None:
    assert await link.call("INCR", keys.config) == 1
    assert await direct.call("GET", keys.config) == b"1"


async def test_a_cut_connection_is_noticed_at_once(link: Link, proxy: Proxy, keys: QueueKeys) -> None:
    only_line(proxy).cut()
    with pytest.raises(ConnectionLostError):
        await link.call("INCR", keys.config)
    assert await link.call("INCR", keys.config) == 1


async def test_a_delayed_command_comes_later_and_is_answered(
    link: Link, direct: Link, proxy: Proxy, keys: QueueKeys
) -> None:
    line = only_line(proxy)
    line.held_until = asyncio.get_running_loop().time() + 0.1
    assert await link.call("INCR", keys.config) == 1
    assert asyncio.get_running_loop().time() >= line.held_until
    assert await direct.call("GET", keys.config) == b"1"


async def test_a_half_open_connection_swallows_and_says_nothing(
    link: Link, direct: Link, proxy: Proxy, keys: QueueKeys
) -> None:
    only_line(proxy).is_half_open = True
    with pytest.raises(ConnectionLostError):
        await link.call("INCR", keys.config)
    assert await direct.call("EXISTS", keys.config) == 0


async def test_a_lost_answer_is_that_of_a_command_which_was_carried_out(
    link: Link, direct: Link, proxy: Proxy, keys: QueueKeys
) -> None:
    lost: list[str] = []
    only_line(proxy).lose_answer(lambda: lost.append("answer"))
    with pytest.raises(ConnectionLostError):
        await link.call("INCR", keys.config)
    assert lost == ["answer"]
    assert await direct.call("GET", keys.config) == b"1"


async def test_a_server_that_is_away_refuses_and_comes_back(link: Link, proxy: Proxy) -> None:
    address, proxy.server = proxy.server, None
    only_line(proxy).cut()
    for _ in range(2):
        with pytest.raises(ConnectionLostError):
            await link.call("PING")
    proxy.server = address
    assert await link.call("PING") == b"PONG"


@pytest.mark.parametrize("name", SERVER_BINARIES)
async def test_a_killed_server_forgets_only_what_a_power_cut_takes(name: str, tmp_path: Path) -> None:
    server = FaultyServer(tmp_path, server_command(name), Promise.BOUNDED)
    await server.start()
    try:
        assert await ask(server, "SET", "a", "1") == b"OK"
        await server.crash()
        await server.start()
        assert await ask(server, "SET", "b", "1") == b"OK"
        assert await ask(server, "EXISTS", "a", "b") == 2
        await server.crash(forget_s=math.inf)  # all since its last start
        await server.start()
        assert await ask(server, "EXISTS", "a") == 1
        assert await ask(server, "EXISTS", "b") == 0
    finally:
        await server.stop()


async def ask(server: FaultyServer, *command: Part) -> object:
    """One command over a connection of its own."""
    link = Link(server.url, "test")
    try:
        return await link.call(*command)
    finally:
        await link.close()
