"""Fixtures for the tests of the wire."""

from collections.abc import AsyncIterator

import pytest

from tests.wire.workers import MakeWorker, TestWorker
from worker.streams.keys import QueueKeys


@pytest.fixture
async def make_worker(redis_url: str, keys: QueueKeys) -> AsyncIterator[MakeWorker]:
    """Makes workers of the test's own queue by name; all are closed at the end."""
    workers: list[TestWorker] = []

    def make(name: str) -> TestWorker:
        worker = TestWorker(redis_url, keys, name)
        workers.append(worker)
        return worker

    first = make("setup")
    await first.source.ensure_groups()
    yield make
    for worker in workers:
        await worker.close()
