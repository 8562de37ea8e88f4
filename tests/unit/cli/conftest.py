"""A real server, and `pagemill` run in this process."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from ops import cli
from tests.conftest import server_command
from tests.logging_state import logging_restored
from worker.embedded import EmbeddedServer
from worker.settings import Settings
from worker.settings_words import env_name


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str


Pagemill = Callable[..., Result]
# A redis-py connection, whose types can't say that its answers are bytes.
Server = Any


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of these tests alone: they empty it, and count its connections."""
    with EmbeddedServer(tmp_path_factory.mktemp("valkey"), server_command("valkey-9.1")) as server:
        yield server.url


@pytest.fixture
def server(server_url: str) -> Iterator[Server]:
    """A connection to an empty server."""
    connection = Redis.from_url(server_url, protocol=2)
    connection.flushall()
    yield connection
    connection.close()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of the developer's, and an empty data folder."""
    for name in Settings.model_fields:
        monkeypatch.delenv(env_name(name), raising=False)
    monkeypatch.delenv("PAGEMILL_DEBUG", raising=False)
    monkeypatch.setenv("PAGEMILL_DATA_DIR", str(tmp_path / "data"))


@pytest.fixture
def pagemill(environment: None, capsys: pytest.CaptureFixture[str]) -> Pagemill:
    """Runs a command line and answers its exit code and what it printed."""

    def run(*words: str) -> Result:
        capsys.readouterr()
        with logging_restored():
            code = cli.main(words)
        printed = capsys.readouterr()
        return Result(code, printed.out, printed.err)

    return run


@pytest.fixture
def at_server(monkeypatch: pytest.MonkeyPatch, environment: None, server: object, server_url: str) -> None:
    """The commands find the server of these tests."""
    monkeypatch.setenv("PAGEMILL_REDIS_URL", server_url)
