"""Taking entries in, while news of who has them comes late."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.tiny_checkpoint import write_tiny_checkpoint
from tests.wire.resp import RespClient
from tests.wire.workers import eventually
from worker.engine_config import EngineInfo
from worker.engine_gate import EngineGate
from worker.intake import ServedModel
from worker.job import WorkerNames
from worker.logs import LogLevel
from worker.metrics import WorkerMetrics
from worker.parts import Parts
from worker.protocol import JobEnvelope
from worker.served_queue import ServedQueue
from worker.settings import load_settings
from worker.streams.keys import GROUP, QueueKeys
from worker.streams.leases import Entry, Loss
from worker.streams.scripts import OpenResult
from worker.text_side import load_text_side

INFO = EngineInfo(512, 64, 16, 8, 320, 4096, "cpu", "float32", "print", 1)
NAMES = WorkerNames("w", "tiny", "print")
LEASE_MS = 60_000


class Bench:
    """A queue that is served without an engine. Its opens are told late while `may_tell` is not set."""

    def __init__(self, url: str, keys: QueueKeys, checkpoint: Path) -> None:
        settings = load_settings({"redis_url": url, "queue": keys.queue, "lease_ms": str(LEASE_MS)})
        metrics = WorkerMetrics(worker_id="w", queues=[keys.queue], model="tiny", version="0")
        self.parts = Parts(lambda: None)
        self.gate = EngineGate(metrics)
        self.queue = ServedQueue(
            *(keys.queue, settings, url, "w", self.parts, metrics.of_queue(keys.queue), self.gate, LogLevel()),
            model="tiny",
            recorder=None,
            on_change=lambda: None,
            on_drain=lambda: None,
        )
        tokenizer, eos_token_ids = load_text_side(checkpoint)
        self.queue.use_engine(
            None,  # type: ignore[arg-type]  # no job gets so far
            ServedModel(frozenset({"tiny"}), tokenizer, INFO, eos_token_ids, NAMES),
        )
        self.may_tell = asyncio.Event()
        self.may_tell.set()
        self.num_opened = 0
        self._open = self.queue.links.replies.open
        self.queue.links.replies.open = self._open_and_wait  # type: ignore[method-assign, assignment]

    async def _open_and_wait(self, envelope: JobEnvelope, on_closed: object) -> tuple[OpenResult, object]:
        may_tell = self.may_tell
        answer = await self._open(envelope, on_closed)  # type: ignore[arg-type]
        self.num_opened += 1
        await may_tell.wait()
        return answer

    def accept(self, entry: Entry) -> "asyncio.Task[None]":
        before = set(self.queue._accepting)
        self.queue.accept(entry)
        (task,) = set(self.queue._accepting) - before
        return task


@pytest.fixture
async def bench(valkey_url: str, keys: QueueKeys, tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(valkey_url, keys, write_tiny_checkpoint(tmp_path / "model"))
    await bench.queue.prepare()
    yield bench
    await bench.parts.end()
    await bench.queue.close()
    await bench.queue.links.leasing.close()
    assert bench.parts.failure is None


async def take(bench: Bench) -> Entry:
    (entry,) = await bench.queue.links.source.take(8)
    return entry


async def test_a_claim_anew_is_kept_whatever_is_told_of_the_one_before(
    bench: Bench, valkey_url: str, keys: QueueKeys
) -> None:
    """An entry is lost while the answer to its open is under way, and comes back from the peer that had it."""
    queue, lane = bench.queue, keys.jobs("normal")
    with RespClient(valkey_url) as client:
        client.call("XADD", lane, "*", "id", "a", "prompt", "hello", "max_tokens", "4")
        older = await take(bench)
        late = bench.may_tell = asyncio.Event()
        accepting = bench.accept(older)
        await eventually(lambda: bench.num_opened == 1)

        client.call("XCLAIM", lane, GROUP, "peer", 0, older.entry_id, "JUSTID")
        queue.links.leases.tell(await queue.links.leases.renew())
        assert queue.num_held == 0
        client.call("XCLAIM", lane, GROUP, "peer", 0, older.entry_id, "IDLE", 2 * LEASE_MS, "JUSTID")
        (newer,) = await queue.links.source.reclaim(8)
    bench.may_tell = asyncio.Event()
    bench.may_tell.set()
    await bench.accept(newer)
    job = queue.table.by_entry(newer.key)
    assert job is not None

    late.set()
    await accepting
    queue.jobs.on_loss(older, Loss.LOST)
    assert queue.table.by_entry(older.key) is job
    assert list(queue.table) == [job]
    assert list(queue.links.leases.entries()) == [newer]
    assert not job.is_over


async def test_a_job_that_was_lost_before_it_was_known_to_be_open_does_not_begin(
    bench: Bench, valkey_url: str, keys: QueueKeys
) -> None:
    queue, lane = bench.queue, keys.jobs("normal")
    with RespClient(valkey_url) as client:
        client.call("XADD", lane, "*", "id", "a", "prompt", "hello", "max_tokens", "4")
        entry = await take(bench)
        bench.may_tell.clear()
        accepting = bench.accept(entry)
        await eventually(lambda: bench.num_opened == 1)
        client.call("XCLAIM", lane, GROUP, "peer", 0, entry.entry_id, "JUSTID")
        queue.links.leases.tell(await queue.links.leases.renew())
        bench.may_tell.set()
        await accepting
        assert len(queue.table) == 0
        assert queue.num_held == 0


async def test_what_is_let_go_is_left_to_peers_first(bench: Bench, valkey_url: str, keys: QueueKeys) -> None:
    """An engine that hung has cost this worker its jobs: a peer that has room is to have them at once."""
    queue, lane = bench.queue, keys.jobs("normal")
    with RespClient(valkey_url) as client:
        client.call("XADD", lane, "*", "id", "a", "prompt", "hello", "max_tokens", "4")
        entry = await take(bench)
        await bench.accept(entry)
        job = queue.table.by_entry(entry.key)
        assert job is not None
        queue.links.source._timers.quiet_until = 0.0  # that after a connect is over
        await queue.jobs.let_go(job)
        queue.links.source.hint_reclaim()
        assert await queue.links.source.take_at_once(8) == []
        assert queue.num_held == 0
        peer = client.call("XAUTOCLAIM", lane, GROUP, "peer", LEASE_MS, "0-0", "COUNT", 1)
        assert [found[0].decode() for found in peer[1]] == [entry.entry_id]
