"""A soak: real workers on a real server, clients, and an adversary; then the history is judged.

    python -m tests.faults.soak --seconds 600 --seed 7

One run has two halves, on a server that fsyncs always and on one that does so every second, since they promise
different things. Everything random follows from the seed, but not what the machine makes of it: a seed that failed
once may need a few runs to fail again.
"""

import asyncio
import contextlib
import random
import shutil
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp

import click
import structlog

from tests.conftest import SERVER_BINARIES, server_command
from tests.faults.adversary import Adversary
from tests.faults.aftermath import Auditor, read_aftermath, until_settled
from tests.faults.checker import Promise, Violation, check
from tests.faults.clients import Clients
from tests.faults.fleet import Crew, Fleet
from tests.faults.history import History, What
from tests.faults.proxy import Proxy
from tests.faults.server import FaultyServer
from tests.faults.workload import Job, RealOracle, ScriptedOracle, make_jobs
from tests.tiny_checkpoint import write_tiny_checkpoint

JOBS_PER_S = 5
# Of a run's time: start, and the end when nothing disturbs any more.
CALM_S = 12.0
# How long nothing may happen, and no longer, before what is still to come is given up.
PATIENCE_S = 120.0
# Longer than a blocking read of a worker, and of a client.
WORKER_TIMEOUT_S, CLIENT_TIMEOUT_S = 3, 6


@dataclass(frozen=True, slots=True)
class Part:
    """One queue of a run: who serves it, and how many jobs are sent to it."""

    crew: Crew
    num_jobs: int


@dataclass(slots=True)
class Outcome:
    """What half a run has shown. `missed` are the faults that never struck."""

    seed: int
    promise: Promise
    server: str
    folder: Path
    seconds: float = 0.0
    strikes: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def missed(self) -> list[str]:
        """Names of faults that never struck, and `resumed` if no reply was ever gone on with."""
        missed = [name for name, count in self.strikes.items() if count == 0]
        return missed + (["resumed"] if self.strikes and not self.counts.get("resumed") else [])

    @property
    def is_ok(self) -> bool:
        """Whether every promise was kept, and put to the test."""
        return not self.violations and not self.missed

    def __str__(self) -> str:
        figures = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        faults = ", ".join(f"{name} {count}" for name, count in sorted(self.strikes.items()))
        lines = [
            f"seed {self.seed}, {self.server}, appendfsync {self.promise.value}, {self.seconds:.0f} s: {figures}",
            f"  faults: {faults}",
        ]
        if not self.is_ok:
            lines.append(f"  history and logs: {self.folder}")
        lines += [f"  never struck: {name}" for name in self.missed]
        lines += [f"  {str(violation)[:600]}" for violation in self.violations[:20]]
        if len(self.violations) > 20:
            lines.append(f"  and {len(self.violations) - 20} more violations")
        return "\n".join(lines)


async def run_half(
    seed: int,
    promise: Promise,
    parts: dict[str, Part],
    model: Path,
    folder: Path,
    harm_s: float,
    *,
    settle_s: float = PATIENCE_S,
) -> Outcome:
    """Serve, disturb for `harm_s` seconds, let everything end, and judge. Queues are named by `parts`.

    Once all replies have ended, entries may take `settle_s` seconds to leave the queue.
    """
    started = time.monotonic()
    rng = random.Random(f"{seed}-{promise}")
    outcome = Outcome(seed, promise, rng.choice(list(SERVER_BINARIES)), folder)
    half = _Half(rng, promise, FaultyServer(folder / "server", server_command(outcome.server), promise), folder)
    try:
        await half.start(parts, model)
        await half.disturb(harm_s, outcome)
        await half.calm_down(settle_s, outcome)
    finally:
        await half.stop(outcome)
    if not outcome.is_ok:
        half.history.write(folder / "history.jsonl")
    outcome.seconds = time.monotonic() - started
    return outcome


class _Half:
    """Everything that runs during half a run."""

    def __init__(self, rng: random.Random, promise: Promise, server: FaultyServer, folder: Path) -> None:
        self.history = History()
        self._rng = rng
        self._promise = promise
        self._server = server
        self._folder = folder
        self._proxy = Proxy()
        self._fleets: list[Fleet] = []
        self._clients: dict[str, Clients] = {}
        self._jobs: dict[str, list[Job]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, parts: dict[str, Part], model: Path) -> None:
        """The server, the workers, and the jobs as they are going to be sent."""
        await self._server.start()
        self._proxy.server = self._server.address
        template = self._server.url.replace(f":{self._server.address[1]}/", ":PORT/")
        client_url = f"{template}?socket_timeout={CLIENT_TIMEOUT_S}".replace(
            "PORT", str(await self._proxy.listen("clients"))
        )
        for queue, part in parts.items():
            oracle = RealOracle(model) if part.crew.step_ms is None else ScriptedOracle(model)
            self._jobs[queue] = await asyncio.to_thread(make_jobs, self._rng, oracle, part.num_jobs, queue)
            self.history.expected |= {job.job_id: job.expected for job in self._jobs[queue]}
            worker_url = f"{template}?socket_timeout={WORKER_TIMEOUT_S}"
            fleet = Fleet(part.crew, queue, model, worker_url, self._proxy, self._folder, self._rng)
            self._fleets.append(fleet)
            self._clients[queue] = Clients(client_url, queue, self.history, self._rng)
        await asyncio.gather(*(fleet.start() for fleet in self._fleets))
        self._tasks = [asyncio.create_task(self._server.watch_file())]
        self._tasks += [asyncio.create_task(fleet.keep_up()) for fleet in self._fleets]

    async def disturb(self, harm_s: float, outcome: Outcome) -> None:
        """Send the jobs while the adversary is at work."""
        adversary = Adversary(
            self._rng, self._fleets, self._proxy, self._server, self.history, self._promise, self._after_crash
        )
        async with asyncio.TaskGroup() as group:
            for queue, jobs in self._jobs.items():
                group.create_task(self._clients[queue].send_all(jobs, 0.9 * harm_s))
            if harm_s:
                group.create_task(adversary.rage(harm_s))
                outcome.strikes = adversary.strikes

    async def calm_down(self, settle_s: float, outcome: Outcome) -> None:
        """Undisturbed, everything ends by itself; what doesn't in time is for the checker to say."""
        server = Auditor(self._server.url)
        await self._until_finished()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settle_s):
                for queue in self._clients:
                    await until_settled(server, queue)
        aftermath = await read_aftermath(server, list(self._clients))
        await server.close()
        outcome.violations = check(self.history, aftermath, self._promise)
        outcome.counts = {
            "jobs": len(self.history.jobs(What.ACKED)),
            "events": sum(len(events) for events in aftermath.replies.values()),
            "resumed": sum(
                sum(event.fields["e"] == "open" for event in events) > 1 for events in aftermath.replies.values()
            ),
            "forgotten": len(self.history.times(What.VANISHED)),
            "read again": len(self.history.times(What.REREAD)),
        }

    async def _until_finished(self) -> None:
        """Wait for all clients as long as any of them sees something new."""
        finishing = asyncio.gather(*(clients.finish() for clients in self._clients.values()))
        num_records = -1
        while num_records < len(self.history.records) and not finishing.done():
            num_records = len(self.history.records)
            await asyncio.wait({finishing}, timeout=PATIENCE_S)
        finishing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await finishing

    async def stop(self, outcome: Outcome) -> None:
        """End everything, and hear what workers have to say."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for clients in self._clients.values():
            await clients.close()
        await asyncio.gather(*(fleet.stop() for fleet in self._fleets))
        failures = [failure for fleet in self._fleets for failure in fleet.failures]
        outcome.violations += [Violation("worker", "", failure) for failure in failures]
        await self._proxy.close()
        await self._server.stop()

    async def _after_crash(self) -> None:
        server = Auditor(self._server.url)
        for clients in self._clients.values():
            await clients.send_forgotten(server)
        await server.close()


async def run_soak(seed: int, seconds: float, model: Path, folder: Path) -> list[Outcome]:
    """Both halves of a run of about `seconds` seconds in all."""
    harm_s = seconds / 2 - CALM_S
    num_jobs = int(JOBS_PER_S * seconds / 2)
    parts = {
        "scripted": Part(Crew(4, step_ms=(20, 40, 80)), num_jobs - num_jobs // 10),
        "real": Part(Crew(1, step_ms=None), num_jobs // 10),
    }
    outcomes = []
    for promise in Promise:
        half_folder = folder / promise.value
        half_folder.mkdir()
        outcomes.append(await run_half(seed, promise, parts, model, half_folder, harm_s))
    return outcomes


@click.command()
@click.option("--seconds", default=600.0, show_default=True, help="Length of a run.")
@click.option("--seed", type=int, help="Of the first run; random where left out.")
@click.option("--runs", default=1, show_default=True, help="How many runs, with seeds from --seed on.")
def main(seconds: float, seed: int | None, runs: int) -> None:
    """Disturb workers for a while, and check that every client got exactly the reply that it was promised."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end the workers first, as on Ctrl-C
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("error"))
    first = random.randrange(10**6) if seed is None else seed
    has_failed = False
    for number in range(first, first + runs):
        folder = Path(mkdtemp(prefix=f"soak-{number}-"))
        click.echo(f"seed {number}, in {folder}", err=True)
        model = write_tiny_checkpoint(folder / "tiny")
        outcomes = asyncio.run(run_soak(number, seconds, model, folder))
        click.echo("\n".join(map(str, outcomes)))
        if all(outcome.is_ok for outcome in outcomes):
            shutil.rmtree(folder)
        else:
            has_failed = True
    if has_failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
