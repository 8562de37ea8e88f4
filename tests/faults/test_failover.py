"""Workers and clients go on while Sentinel or a Cluster gives their queue to another server."""

import asyncio
import contextlib
import random
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import server_command
from tests.faults.aftermath import Auditor, read_aftermath, until_settled
from tests.faults.checker import Promise, Violation, check
from tests.faults.clients import Clients
from tests.faults.fleet import Crew, Fleet
from tests.faults.history import History, What
from tests.faults.proxy import Proxy
from tests.faults.workload import ScriptedOracle, make_jobs
from tests.servers.groups import NUM_SLOTS, ClusterGroup, SentinelGroup, Served, slot_of

NUM_JOBS = 40
# Jobs are sent for so long, and the blow falls in the middle.
SECONDS = 2.0
PATIENCE_S = 60.0


class Trial:
    """Two workers, clients, and a queue that is given away meanwhile."""

    def __init__(self, group: Served, queue: str, model: Path, folder: Path) -> None:
        seed = random.randrange(10**6)
        sys.stdout.write(f"seed {seed}\n")
        self.rng = random.Random(seed)
        self.history = History()
        self.queue = queue
        self.clients = Clients(group.url, queue, self.history, self.rng)
        self.fleet = Fleet(Crew(2, step_ms=(10,)), queue, model, group.url, Proxy(), folder, self.rng)
        self._jobs = make_jobs(self.rng, ScriptedOracle(model), NUM_JOBS, "job")
        self.history.expected = {job.job_id: job.expected for job in self._jobs}
        self._auditor = Auditor(group.url, queue)

    async def run(self, strike: Callable[[], Awaitable[None]], promise: Promise) -> list[Violation]:
        """Serve, `strike` half-way, and judge when all has ended."""
        try:
            await self.fleet.start()
            async with asyncio.TaskGroup() as group:
                group.create_task(self.clients.send_all(self._jobs, SECONDS))
                await asyncio.sleep(SECONDS / 2)
                await strike()
            async with asyncio.timeout(PATIENCE_S):
                await self.clients.finish()
                await until_settled(self._auditor, self.queue)
            aftermath = await read_aftermath(self._auditor, [self.queue])
            assert len(self.history.jobs(What.ACKED)) == NUM_JOBS
            return check(self.history, aftermath, promise)
        finally:
            await self.clients.close()
            await self._auditor.close()
            await self.fleet.stop()

    async def crash(self, blow: Callable[[], None]) -> None:
        """`blow` takes a server away. What the next one knows nothing of is sent again, as clients do."""
        self.history.add(What.CRASHED)
        await asyncio.to_thread(blow)
        while True:
            with contextlib.suppress(OSError):
                await self.clients.send_forgotten(self._auditor)
                return


@pytest.fixture(params=["valkey-9.1", pytest.param("redis-6.2", marks=pytest.mark.slow)])
def sentinels(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SentinelGroup]:
    group = SentinelGroup(server_command(request.param), tmp_path / "servers")
    yield group
    group.stop()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterGroup]:
    group = ClusterGroup(server_command("valkey-9.1"), tmp_path / "servers", has_replica=True)
    yield group
    group.stop()


async def test_every_job_ends_once_when_sentinel_promotes_the_replica_of_a_primary_that_died(
    sentinels: SentinelGroup, tiny_model: Path, tmp_path: Path
) -> None:
    trial = Trial(sentinels, "failover", tiny_model, tmp_path)
    violations = await trial.run(lambda: trial.crash(sentinels.fail_over), Promise.BOUNDED)
    assert violations + trial.fleet.failures == []


@pytest.mark.slow
async def test_every_job_ends_once_when_the_primary_is_told_to_step_down(
    sentinels: SentinelGroup, tiny_model: Path, tmp_path: Path
) -> None:
    """It lives on, as a replica that takes no writes."""
    trial = Trial(sentinels, "failover", tiny_model, tmp_path)
    blow = partial(sentinels.fail_over, is_told=True)
    violations = await trial.run(lambda: trial.crash(blow), Promise.BOUNDED)
    assert violations + trial.fleet.failures == []


async def test_every_job_ends_once_when_the_owner_of_the_queues_slot_dies(
    cluster: ClusterGroup, tiny_model: Path, tmp_path: Path
) -> None:
    queue = next(name for name in (f"q{number}" for number in range(100)) if slot_of(name) < NUM_SLOTS // 3)
    assert cluster.owner(queue) is cluster.nodes[0]
    trial = Trial(cluster, queue, tiny_model, tmp_path)
    violations = await trial.run(lambda: trial.crash(lambda: cluster.fail_over(queue)), Promise.BOUNDED)
    assert violations + trial.fleet.failures == []


async def test_nothing_is_lost_or_read_twice_when_the_queues_slot_moves_to_another_node(
    cluster: ClusterGroup, tiny_model: Path, tmp_path: Path
) -> None:
    """For half a second the slot has two nodes, and new keys go to the next one."""
    trial = Trial(cluster, "moving", tiny_model, tmp_path)
    former = cluster.owner("moving")

    async def move() -> None:
        finish = await asyncio.to_thread(cluster.begin_move, "moving")
        await asyncio.sleep(0.5)
        await asyncio.to_thread(finish)

    violations = await trial.run(move, Promise.DURABLE)
    assert violations + trial.fleet.failures == []
    assert cluster.owner("moving") is not former
