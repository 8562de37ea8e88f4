"""What tests of all folders share."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

# Before anything imports triton, which decides then: its kernels run by its interpreter where no GPU could run them.
os.environ.setdefault("TRITON_INTERPRET", "0" if Path("/dev/nvidiactl").exists() else "1")

import platformdirs
import pytest

from tests.e2e.workers import fresh_keys
from tests.servers.binaries import DEBIAN, SERVER_BINARIES, server_command
from tests.servers.groups import ClusterGroup, OneServer, SentinelGroup, Served, TlsServer, UnixServer, as_worker
from tests.servers.process import ServerProcess
from tests.wire.resp import RespClient
from worker.demo_model import ensure_demo_model
from worker.errors import StartupError
from worker.streams.keys import QueueKeys

__all__ = ["SERVER_BINARIES", "server_command"]

# Every test of `redis_url` runs on these.
SERVERS = (*SERVER_BINARIES, DEBIAN)
# The newest server reached in other ways, and the floor in a Cluster: for tests that are marked `every_topology`.
TOPOLOGIES: dict[str, Callable[[Path], Served]] = {
    "unix": lambda folder: UnixServer(server_command("valkey-9.1"), folder),
    "tls": lambda folder: TlsServer(server_command("valkey-9.1"), folder),
    "least-rights": lambda folder: as_worker(server_command("valkey-9.1"), folder),
    "sentinel": lambda folder: SentinelGroup(server_command("valkey-9.1"), folder),
    "cluster": lambda folder: ClusterGroup(server_command("valkey-9.1"), folder),
    "cluster-6.2": lambda folder: ClusterGroup(server_command("redis-6.2"), folder, num_nodes=1),
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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test that uses `redis_url` runs on every server; marked ones in every topology, too, or on fewer servers."""
    is_by_hand = any("redis_url" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "redis_url" not in metafunc.fixturenames or is_by_hand:
        return
    names = list(SERVERS)
    if metafunc.definition.get_closest_marker("two_servers"):
        names = list(SERVER_BINARIES)
    elif metafunc.definition.get_closest_marker("every_topology"):
        names += TOPOLOGIES
    metafunc.parametrize("redis_url", names, indirect=True)


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Served]]:
    """Starts one of SERVERS or TOPOLOGIES, once in the session."""
    running: dict[str, Served] = {}

    def start(name: str) -> Served:
        if name not in running:
            folder = tmp_path_factory.mktemp(name)
            if name in TOPOLOGIES:
                running[name] = TOPOLOGIES[name](folder)
            else:
                running[name] = OneServer(ServerProcess(server_command(name), folder))
        return running[name]

    yield start
    for served in running.values():
        served.stop()


@pytest.fixture(scope="session")
def start_server(serve: Callable[[str], Served]) -> Callable[[str], str]:
    """Starts one of SERVERS or TOPOLOGIES, once in the session, and returns its URL."""
    return lambda name: serve(name).url


@pytest.fixture
def valkey_url(start_server: Callable[[str], str]) -> str:
    """A Valkey for all tests of the session: give each its own queue."""
    return start_server("valkey-9.1")


@pytest.fixture
def served(request: pytest.FixtureRequest, redis_url: str, serve: Callable[[str], Served]) -> Served:
    """What serves `redis_url`."""
    return serve(request.node.callspec.params["redis_url"])


@pytest.fixture
def redis_url(request: pytest.FixtureRequest, start_server: Callable[[str], str]) -> str:
    """Each server in turn, shared by all tests of the session: give each test its own queue."""
    return start_server(request.param)


@pytest.fixture
def keys() -> QueueKeys:
    """The key names of a queue that no other test uses."""
    return fresh_keys()


@pytest.fixture
def raw(served: Served, keys: QueueKeys) -> Iterator[RespClient]:
    """A client that speaks bare RESP to the server that has the test's queue, as an administrator."""
    with RespClient(served.direct_url(keys.queue)) as client:
        yield client
