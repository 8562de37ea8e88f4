"""Workers and queues for tests from end to end."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.workers import Queue, WorkerProcess, fresh_keys
from tests.faults.scripted import ScriptedWorker
from tests.tiny_checkpoint import write_tiny_checkpoint

StartWorker = Callable[..., WorkerProcess]
StartScripted = Callable[..., ScriptedWorker]
# Of workers with the made-up model: four places.
SCRIPTED: dict[str, Any] = {"step_ms": 2, "max_num_seqs": 4, "heartbeat_ms": 100, "metrics_port": 0}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def served(
    tiny_model: Path, start_server: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[WorkerProcess, Queue]]:
    """A worker on a queue of its own, and that queue: shared by the tests of a module."""
    url, queue = start_server("valkey-9.1"), Queue(start_server("valkey-9.1"), fresh_keys())
    logs = tmp_path_factory.mktemp("logs")
    with WorkerProcess(tiny_model, url, queue.keys.queue, logs, metrics_port=0) as worker:
        worker.wait_until_ready()
        yield worker, queue
    queue.close()


@pytest.fixture
def queue(served: tuple[WorkerProcess, Queue]) -> Queue:
    """The queue of the module's worker."""
    return served[1]


@pytest.fixture
def own_queue(valkey_url: str) -> Iterator[Queue]:
    """A queue of the test's own, which nobody serves yet."""
    queue = Queue(valkey_url, fresh_keys())
    yield queue
    queue.close()


@pytest.fixture
def start_worker(tiny_model: Path, valkey_url: str, own_queue: Queue, tmp_path: Path) -> Iterator[StartWorker]:
    """Starts workers of the test's own queue; all are stopped at the end."""
    workers: list[WorkerProcess] = []

    def start(**settings: Any) -> WorkerProcess:
        worker = WorkerProcess(tiny_model, valkey_url, own_queue.keys.queue, tmp_path, **settings)
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        worker.__exit__(None, None, None)


@pytest.fixture
def start_scripted(tiny_model: Path, valkey_url: str, own_queue: Queue, tmp_path: Path) -> Iterator[StartScripted]:
    """Starts workers of the test's own queue with a made-up model, and waits until they are ready."""
    workers: list[ScriptedWorker] = []

    def start(**settings: Any) -> ScriptedWorker:
        worker = ScriptedWorker(tiny_model, valkey_url, own_queue.keys.queue, tmp_path, **SCRIPTED | settings)
        workers.append(worker)
        worker.wait_until_ready()
        return worker

    yield start
    for worker in workers:
        worker.__exit__(None, None, None)


@pytest.fixture(scope="module")
def scripted(
    tiny_model: Path, start_server: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ScriptedWorker, Queue]]:
    """A worker with a made-up model and four places, and its queue: shared by the tests of a module."""
    url, queue = start_server("valkey-9.1"), Queue(start_server("valkey-9.1"), fresh_keys())
    logs = tmp_path_factory.mktemp("logs")
    with ScriptedWorker(tiny_model, url, queue.keys.queue, logs, **SCRIPTED) as worker:
        worker.wait_until_ready()
        yield worker, queue
    queue.close()
