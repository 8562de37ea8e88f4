"""Fixtures for the tests under faults."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.workers import Queue, fresh_keys
from tests.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint; the made-up model uses its tokenizer."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def queue(valkey_url: str) -> Iterator[Queue]:
    """A queue of the test's own."""
    queue = Queue(valkey_url, fresh_keys())
    yield queue
    queue.close()
