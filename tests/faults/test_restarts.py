"""Workers that are stopped and killed under load: what a client sees of it is nothing."""

import asyncio
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.workers import Queue, eventually
from tests.faults.aftermath import Auditor, read_aftermath, until_settled
from tests.faults.checker import Promise, check
from tests.faults.clients import Clients
from tests.faults.history import History
from tests.faults.scripted import ScriptedWorker
from tests.faults.workload import ScriptedOracle, make_jobs
from worker.streams.keys import LANES

# The longest that a client may have to wait, here: nothing else is broken.
PATIENCE_S = 120.0
SETTINGS: dict[str, Any] = {
    "lease_ms": 1000,
    "heartbeat_ms": 400,
    "max_num_seqs": 8,
    "check_invariants": "idle",
    "shutdown_grace_s": 0.2,
    "result_ttl_ms": 3_600_000,
}


class Crew:
    """The workers of one queue. Leaving `with_crew` stops them."""

    def __init__(self, url: str, queue: Queue, model: Path, logs: Path, step_ms: int) -> None:
        self._url = url
        self._queue = queue
        self._model = model
        self._logs = logs
        self._step_ms = step_ms
        self.started: list[ScriptedWorker] = []

    def start(self, **settings: Any) -> ScriptedWorker:
        """One more worker, which isn't ready yet."""
        name = self._queue.keys.queue
        made = ScriptedWorker(self._model, self._url, name, self._logs, step_ms=self._step_ms, **(SETTINGS | settings))
        self.started.append(made)
        return made

    def is_busy(self, worker: ScriptedWorker) -> bool:
        """Whether some entries are pending under a worker's name."""
        worker_id: str = worker.wait_until_ready()["worker_id"]
        pending = [self._queue.redis.pending(self._queue.keys.jobs(lane)).values() for lane in LANES]
        return [consumer for lane in pending for consumer, _ in lane].count(worker_id) > 2

    def crashes(self) -> dict[str, str]:
        """What each job's record says of workers that died with it; those that saw none are left out."""
        keys = self._queue.redis.call("KEYS", self._queue.keys.state("*"))
        told = {key.decode(): self._queue.redis.hash(key.decode())["crashes"] for key in keys}
        return {key: crashes for key, crashes in told.items() if crashes != "0"}


@asynccontextmanager
async def with_crew(url: str, queue: Queue, model: Path, logs: Path, *, step_ms: int) -> AsyncIterator[Crew]:
    crew = Crew(url, queue, model, logs, step_ms)
    try:
        yield crew
    finally:
        for worker in crew.started:
            worker.process.send_signal(signal.SIGTERM)
        for worker in crew.started:
            await asyncio.to_thread(worker.__exit__, None, None, None)


async def ready(*workers: ScriptedWorker) -> None:
    for worker in workers:
        await asyncio.to_thread(worker.wait_until_ready)


async def until_judged(url: str, queue: Queue, clients: Clients, history: History) -> None:
    """Wait for all clients, then judge what each of them saw, and what is left on the server."""
    async with asyncio.timeout(PATIENCE_S):
        await clients.finish()
        server = Auditor(url)
        await until_settled(server, queue.keys.queue)
    aftermath = await read_aftermath(server, [queue.keys.queue])
    await server.close()
    assert check(history, aftermath, Promise.DURABLE) == []


def harmless(model: Path) -> ScriptedOracle:
    """Knows the replies of jobs of which none is poison."""
    oracle = ScriptedOracle(model)
    oracle.can_kill = False
    return oracle


@pytest.fixture
def rng() -> random.Random:
    """Another seed each time, which follows from the one that pytest-randomly prints."""
    seed = random.randrange(10**6)
    sys.stdout.write(f"seed {seed}\n")
    return random.Random(seed)


async def test_a_rolling_restart_shows_clients_nothing(
    valkey_url: str, queue: Queue, tiny_model: Path, tmp_path: Path, rng: random.Random
) -> None:
    """Three workers are replaced one by one, the second with two signals, while a hundred jobs stream."""
    name, history = queue.keys.queue, History()
    jobs = await asyncio.to_thread(make_jobs, rng, harmless(tiny_model), 102, name)
    history.expected |= {job.job_id: job.expected for job in jobs}
    clients = Clients(valkey_url, name, history, rng)
    async with with_crew(valkey_url, queue, tiny_model, tmp_path, step_ms=20) as crew:
        workers = [crew.start(), crew.start(shutdown_grace_s=60), crew.start()]
        await ready(*workers)
        try:
            for number, worker in enumerate(workers):
                sending = asyncio.create_task(clients.send_all(jobs[34 * number : 34 * number + 34], 0.5))
                await asyncio.to_thread(eventually, partial(crew.is_busy, worker), "jobs to be held")
                worker.signal(signal.SIGTERM)
                successor = crew.start()
                if number == 1:
                    await asyncio.to_thread(eventually, lambda: is_told(workers[1], "worker_stopping"), "it to stop")
                    worker.signal(signal.SIGTERM)
                assert await asyncio.to_thread(worker.wait) == 0
                await ready(successor)
                await sending
            await until_judged(valkey_url, queue, clients, history)
        finally:
            await clients.close()
        assert crew.crashes() == {}
        assert any(is_told(worker, "job_handed_over") for worker in workers), "nobody went on with anything"


def is_told(worker: ScriptedWorker, event: str) -> bool:
    return event in [told["event"] for told in worker.events()]


async def test_after_the_first_signal_no_job_is_taken_and_those_that_run_end(
    valkey_url: str, queue: Queue, tiny_model: Path, tmp_path: Path
) -> None:
    async with with_crew(valkey_url, queue, tiny_model, tmp_path, step_ms=10) as crew:
        worker = crew.start(shutdown_grace_s=60)
        await ready(worker)
        runs = queue.enqueue(prompt="runs", max_tokens=150, ignore_eos=1)
        await asyncio.to_thread(eventually, lambda: len(queue.reply(runs).events) > 2, "tokens to come")
        worker.signal(signal.SIGTERM)
        await asyncio.to_thread(eventually, lambda: is_told(worker, "worker_stopping"), "the signal to be seen")
        comes = queue.enqueue(prompt="comes", max_tokens=5, ignore_eos=1)
        assert await asyncio.to_thread(worker.wait) == 0
        assert queue.reply(runs).terminal["finish"] == "length"
        assert queue.reply(comes).events == []
        assert queue.redis.pending(queue.keys.jobs("normal")) == {}
        assert queue.num_queued() == 1


@pytest.mark.parametrize("num_rounds", [2, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
async def test_of_64_jobs_none_is_lost_when_one_of_two_workers_is_killed_at_any_time(
    valkey_url: str, queue: Queue, tiny_model: Path, tmp_path: Path, rng: random.Random, num_rounds: int
) -> None:
    """And whoever was killed is gone from the registry, though it could not say so."""
    name, history = queue.keys.queue, History()
    clients = Clients(valkey_url, name, history, rng)
    async with with_crew(valkey_url, queue, tiny_model, tmp_path, step_ms=5) as crew:
        workers = [crew.start(), crew.start()]
        await ready(*workers)
        try:
            for number in range(num_rounds):
                jobs = await asyncio.to_thread(make_jobs, rng, harmless(tiny_model), 64, f"{name}-{number}")
                history.expected |= {job.job_id: job.expected for job in jobs}
                killing = asyncio.create_task(kill_one(crew, workers, rng))
                await clients.send_all(jobs, 0.2)
                await killing
                async with asyncio.timeout(PATIENCE_S):
                    await clients.finish()
            await until_judged(valkey_url, queue, clients, history)
        finally:
            await clients.close()
        alive = {worker.wait_until_ready()["worker_id"].encode() for worker in workers}
        members = queue.keys.workers
        await asyncio.to_thread(
            eventually, lambda: set(queue.redis.call("ZRANGE", members, 0, -1)) == alive, "the dead to be forgotten"
        )
        assert crew.crashes(), "nobody held anything when it was killed"


async def kill_one(crew: Crew, workers: list[ScriptedWorker], rng: random.Random) -> None:
    """SIGKILL for one of the workers at a random time, and another one in its place."""
    await asyncio.sleep(rng.uniform(0, 1.0))
    victim = rng.randrange(len(workers))
    workers[victim].process.kill()
    workers[victim] = crew.start()
    await ready(workers[victim])
