"""A service that stands still for a while: too short to lose its jobs, too long to keep them, or stopped altogether."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Self

import pytest

from model.tokenizer import Tokenizer
from tests.e2e.workers import Queue, eventually
from tests.faults.fleet import ROOT
from tests.faults.scripted import ScriptedWorker
from tests.faults.scripted_worker import make_engine
from tests.unit.scheduler.fake_runner import generate
from worker.service import Service, ServiceInfo
from worker.settings import load_settings

LEASE_S, WATCHDOG_S = 0.4, 2.0
STEP_MS = 10
# Longer than the longest standstill.
LONG: dict[str, Any] = {"prompt": "a long story", "max_tokens": 500, "temperature": 0, "ignore_eos": 1}


@pytest.fixture
def ids(tiny_model: Path) -> list[int]:
    """What the made-up model says to LONG."""
    prompt_ids = Tokenizer.from_checkpoint(tiny_model).encode(LONG["prompt"])
    return list(generate("", prompt_ids, LONG["max_tokens"]))


@pytest.fixture
def settings(valkey_url: str, queue: Queue, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Those of all workers of that queue."""
    monkeypatch.setenv("PAGEMILL_STEP_MS", str(STEP_MS))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return {
        "model": str(tiny_model),
        "redis_url": valkey_url,
        "queue": queue.keys.queue,
        "lease_ms": int(LEASE_S * 1000),
        "heartbeat_ms": 500,
        "watchdog_s": WATCHDOG_S,
        "num_kv_blocks": 128,
        "log_format": "json",
    }


class Peer(ScriptedWorker):
    """A worker process that takes jobs, until the end of the block."""

    def __init__(self, settings: dict[str, Any], logs: Path) -> None:
        own = dict(settings)
        model, url, queue = (own.pop(name) for name in ("model", "redis_url", "queue"))
        super().__init__(model, url, queue, logs, step_ms=STEP_MS, **own)

    @property
    def worker_id(self) -> str:
        """Its name, once it is ready."""
        return str(self.wait_until_ready()["worker_id"])

    def __enter__(self) -> Self:
        self.wait_until_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGCONT)
        super().__exit__()
        assert self.process.returncode == 0, self.log_path.read_text()


@contextlib.asynccontextmanager
async def own_service(settings: dict[str, Any]) -> AsyncIterator[ServiceInfo]:
    """A service in this very loop, which the test can hold up."""
    service, ready = Service(load_settings(settings), make_engine=make_engine), asyncio.Event()
    told: list[ServiceInfo] = []

    def on_ready(info: ServiceInfo) -> None:
        told.append(info)
        ready.set()

    running = asyncio.create_task(service.run(on_ready))
    async with asyncio.timeout(20):
        await ready.wait()
    yield told[0]
    service.stop()
    async with asyncio.timeout(20):
        await running


async def job_of(queue: Queue, info: ServiceInfo) -> str:
    """A job that this service runs. One of those before may have gone to the peer just before it was stopped."""
    async with asyncio.timeout(30):
        while True:
            job_id = queue.enqueue(**LONG)
            for _ in range(50):
                if opened_by(queue, job_id) == [info.worker_id] and queue.reply(job_id).ids:
                    return job_id
                await asyncio.sleep(0.02)


def opened_by(queue: Queue, job_id: str) -> list[str]:
    """The workers that have opened the reply, in order."""
    return [fields["worker"] for _, fields in queue.reply(job_id).events if fields["e"] == "open"]


def hold_up(until: Callable[[], bool], timeout_s: float = 30.0) -> float:
    """Keeps the loop from turning until something is true; answers for how many seconds."""
    began = time.monotonic()
    while not until():
        assert time.monotonic() < began + timeout_s, f"held up for {timeout_s} s"
    return time.monotonic() - began


async def ended(queue: Queue, job_id: str) -> list[int]:
    """The ids of a whole reply, once all is settled."""
    reply = await asyncio.to_thread(queue.wait, job_id)
    await asyncio.to_thread(queue.assert_settled)
    assert reply.terminal["finish"] == "length"
    return reply.ids


@contextlib.asynccontextmanager
async def held_up(settings: dict[str, Any], queue: Queue, logs: Path) -> AsyncIterator[tuple[str, str, str]]:
    """A service in this loop, its peer, and a job that the service runs: both workers' ids and the job's."""
    with Peer(settings, logs) as peer:
        peer.process.send_signal(signal.SIGSTOP)
        async with own_service(settings) as info:
            job_id = await job_of(queue, info)
            peer.process.send_signal(signal.SIGCONT)
            yield info.worker_id, peer.worker_id, job_id


async def test_a_service_held_up_for_three_leases_keeps_its_job(
    settings: dict[str, Any], queue: Queue, ids: list[int], tmp_path: Path
) -> None:
    async with held_up(settings, queue, tmp_path) as (own_id, _, job_id):
        enough = time.monotonic() + 3 * LEASE_S
        hold_up(lambda: time.monotonic() > enough)
        assert await ended(queue, job_id) == ids
        assert opened_by(queue, job_id) == [own_id]


async def test_a_service_held_up_for_longer_than_the_watchdog_loses_its_job_to_a_peer(
    settings: dict[str, Any], queue: Queue, ids: list[int], tmp_path: Path
) -> None:
    """Its engine goes on all the time, and so does the thread that would renew."""
    async with held_up(settings, queue, tmp_path) as (own_id, peer_id, job_id):
        assert hold_up(lambda: len(opened_by(queue, job_id)) == 2) > WATCHDOG_S
        assert await ended(queue, job_id) == ids
        assert opened_by(queue, job_id) == [own_id, peer_id]


def test_a_worker_stopped_past_its_lease_regains_nothing_writes_nothing_and_settles_nothing(
    settings: dict[str, Any], queue: Queue, ids: list[int], tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        started = [Peer(settings, tmp_path) for _ in "ab"]
        peers = [stack.enter_context(peer) for peer in started]
        job_ids = [queue.enqueue(**LONG) for _ in range(3)]
        eventually(lambda: all(queue.reply(job_id).ids for job_id in job_ids), "tokens to come")
        stopped_id = opened_by(queue, job_ids[0])[0]
        zombie, peer = sorted(peers, key=lambda each: each.worker_id != stopped_id)
        zombie.process.send_signal(signal.SIGSTOP)
        lost = [job_id for job_id in job_ids if opened_by(queue, job_id) == [stopped_id]]
        eventually(lambda: all(len(opened_by(queue, job_id)) == 2 for job_id in lost), "the peer to take over")
        zombie.process.send_signal(signal.SIGCONT)
        replies = [queue.wait(job_id) for job_id in job_ids]
        queue.assert_settled()
        assert [reply.ids for reply in replies] == [ids] * 3
        for job_id in lost:
            assert opened_by(queue, job_id) == [stopped_id, peer.worker_id]
            assert queue.redis.hash(queue.keys.state(job_id))["worker"] == peer.worker_id
    assert not zombie.named("job_settled")
    assert len(zombie.named("lease_lost") + zombie.named("reply_closed")) >= len(lost)
