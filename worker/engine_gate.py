"""What is in the engine: jobs enter and leave it here, by the order of the quarantine, and their records say so.

    Intake ──► wait_turn (suspects) ──► enter ──► in the engine ──► leave
                      ▲                              │ ▲
                      │ a death of the engine,       ▼ │ set aside for a turn, and back
                      └──────────────────────── out of the engine, still held

One for an engine; the jobs may be of several queues. What a job's record says is written one job after the other: that
it isn't alone any more before it is said of the next.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

from worker.engine_client import EngineDiedError
from worker.engine_end import EngineEnd
from worker.engine_supervisor import EngineSupervisor
from worker.job import Job
from worker.metrics import WorkerMetrics
from worker.quarantine import Marks, Quarantine
from worker.streams.reply_writer import ReplyStatus

log = structlog.get_logger(__name__)

# How long the record of a job, whose server may be away, keeps the jobs of others waiting.
RECORD_S = 2.0


class Home(Protocol):
    """Where a job lives: whoever gives its sequences to the engine, and writes its record and its end."""

    def put_in(self, job: Job) -> None:
        """Give the engine what is to be generated of the job."""
        ...

    def take_out(self, job: Job) -> None:
        """Have the engine stop the job; what it still brings of it is not heard."""
        ...

    def left_dead_engine(self, job: Job) -> None:
        """The engine that had the job is gone."""
        ...

    async def record(self, job: Job, marks: Marks) -> bool:
        """Write the job's marks into its record. False: it is somebody else's now."""
        ...

    async def convict(self, job: Job, marks: Marks) -> None:
        """End the job as poison, as soon as its server can be told."""
        ...

    async def let_go(self, job: Job) -> None:
        """Give the job to a peer, as soon as its server can be told."""
        ...


@dataclass(slots=True)
class _Turn:
    """A suspect's turn. It begins once its record says so; `num_counted` token events were in when it did."""

    job: Job
    is_recorded: bool = False
    num_counted: int = 0


@dataclass(slots=True)
class _Stay:
    """What the engine that lives now was given under a name; `is_alone`: for the job's turn."""

    job: Job
    is_alone: bool


class EngineGate:
    """Owner of the engine's population. `on_up` is called once a dead engine's successor stands."""

    def __init__(
        self,
        metrics: WorkerMetrics,
        *,
        on_up: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        patience_s: float = RECORD_S,
    ) -> None:
        """`patience_s`: how long one job's record may take before others are written."""
        self._metrics = metrics
        self._on_up = on_up
        self._clock = clock
        self._patience_s = patience_s
        self.engine: EngineSupervisor | None = None
        self._quarantine: Quarantine[Job] = Quarantine()
        self._homes: dict[Job, Home] = {}
        # Suspects that wait for their first turn before anybody looks at what they ask for.
        self._waiters: dict[Job, asyncio.Future[bool]] = {}
        self._ready: set[Job] = set()
        self._running: dict[Job, None] = {}
        # By the engine's names, of jobs that are here: also of those set aside, which it may not have heard of yet.
        self._stays: dict[str, _Stay] = {}
        self._turn: _Turn | None = None
        self._unwritten: dict[Job, Marks] = {}
        self._let_go: set[Job] = set()
        self._has_unwritten = asyncio.Event()
        self._is_stopping = False

    @property
    def num_suspects(self) -> int:
        """Jobs that run alone or wait for it."""
        return self._quarantine.num_suspects

    # What becomes of a job.

    async def wait_turn(self, job: Job, home: Home) -> bool:
        """Wait until a suspect may be looked at and run, alone. False: it ended before that, or the worker stops."""
        if self._is_stopping or job.is_over:
            return False
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiters[job], self._homes[job] = waiter, home
        self._quarantine.add(job, job.crashes, job.solo)
        log.info("job_suspected", **job.log_ids, crashes=job.crashes, solo=job.solo)
        self._advance()
        return await waiter

    def enter(self, job: Job, home: Home) -> None:
        """The job is understood: it runs as soon as it may."""
        if job not in self._homes:
            self._homes[job] = home
            self._quarantine.add(job)
        self._ready.add(job)
        self._advance()

    def leave(self, job: Job) -> None:
        """The job has ended, was lost or goes elsewhere. Nothing happens if it isn't here."""
        home = self._homes.pop(job, None)
        if home is None:
            return
        if job in self._running:
            del self._running[job]
            home.take_out(job)
        for seq_id in [seq_id for seq_id, stay in self._stays.items() if stay.job is job]:
            del self._stays[seq_id]
        self._ready.discard(job)
        self._let_go.discard(job)
        self._unwritten.pop(job, None)
        self._quarantine.remove(job)
        if (waiter := self._waiters.pop(job, None)) is not None and not waiter.done():
            waiter.set_result(False)
        self._advance()

    def stop(self) -> None:
        """No suspect's first turn begins any more; those that wait for it hear so."""
        self._is_stopping = True
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_result(False)

    # What the engine brings.

    def on_tokens(self, job: Job) -> None:
        """A step has brought tokens of the job."""
        turn = self._turn
        if turn is None or turn.job is not job:
            return
        job.writer.hurry()  # only what is written counts, unless there is nothing left to write to
        num_new = job.writer.num_token_events - turn.num_counted
        turn.num_counted += num_new
        if job.writer.status is not ReplyStatus.LIVE:
            num_new = 1
        cleared = self._quarantine.count(num_new)
        if cleared is not None:
            log.info("job_cleared", **job.log_ids, crashes=self._quarantine.marks(job).crashes)
            self._write_later(job, self._quarantine.marks(job))
            self._advance()
            if job in self._running:  # it goes on with the others, or for want of others
                for seq_id in job.seq_ids:
                    self._stays[seq_id].is_alone = False

    def on_step(self) -> None:
        """A step has ended: perhaps the time of the free is over."""
        if self._quarantine.is_due(self._clock()):
            self._advance()

    def on_death(self, error: EngineDiedError) -> None:
        """An engine died, or was ended as it hung: those it computed are to blame, and are suspects now."""
        running, self._running = list(self._running), {}
        turn, self._turn = self._turn, None
        for job in running:
            self._homes[job].left_dead_engine(job)
        stays = [self._stays[seq_id] for seq_id in error.seq_ids if seq_id in self._stays]
        self._stays.clear()
        last_alone = next((stay.job for stay in stays if stay.is_alone), None)
        computed = {stay.job for stay in stays}
        blamed = self._quarantine.blame([job for job in self._homes if job in computed], last_alone)
        self._metrics.engine_died(str(error.end), len(blamed))
        if turn is not None and turn.job not in blamed:
            self._write_later(turn.job, self._quarantine.marks(turn.job))
        for job, marks in blamed.items():
            log.warning(
                "job_blamed",
                **job.log_ids,
                crashes=marks.crashes,
                solo=marks.solo,
                is_poison=marks.is_poison,
            )
            self._write_later(job, marks)
        if error.end is EngineEnd.HUNG:
            self._let_all_go()
        self._metrics.set_suspects(self._quarantine.num_suspects)

    def _let_all_go(self) -> None:
        """A peer goes on with the jobs at once; without one this worker does, when its next engine stands."""
        for job in self._homes:
            self._let_go.add(job)
            self._quarantine.remove(job)
            if job not in self._unwritten:
                self._write_later(job, Marks(job.crashes, job.solo))

    def on_restart(self) -> None:
        """A new engine stands: the jobs go on where they were, and those that came meanwhile begin."""
        self._metrics.engine_restarted()
        self._advance()
        self._on_up()

    # The order of things.

    def _advance(self) -> None:
        """Bring the engine's population in line with the quarantine's word."""
        if self.engine is None or not self.engine.is_up:
            return
        alone = self._quarantine.decide(self._clock())
        self._metrics.set_suspects(self._quarantine.num_suspects)
        if alone is None:
            self._turn = None
            for job in list(self._quarantine.free):
                self._put_in(job)
            return
        for job in [job for job in self._running if job is not alone]:
            del self._running[job]
            self._homes[job].take_out(job)
        if self._turn is None or self._turn.job is not alone:
            self._turn = _Turn(alone)
            self._write_later(alone, self._quarantine.marks(alone))
        elif self._turn.is_recorded:
            self._put_in(alone)

    def _put_in(self, job: Job) -> None:
        if job in self._ready and job not in self._running:
            self._running[job] = None
            self._homes[job].put_in(job)
            is_alone = job is self._quarantine.alone
            self._stays |= {seq_id: _Stay(job, is_alone) for seq_id in job.seq_ids}

    def _begin_turn(self, turn: _Turn) -> None:
        """Its record says that it is alone: it may run, or first be looked at."""
        job = turn.job
        turn.is_recorded, turn.num_counted = True, job.writer.num_token_events
        marks = self._quarantine.marks(job)
        self._metrics.turn_began()
        log.info("job_quarantined", **job.log_ids, crashes=marks.crashes, solo=marks.solo)
        waiter = self._waiters.pop(job, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(True)
        self._put_in(job)

    # What is written.

    def _write_later(self, job: Job, marks: Marks) -> None:
        """In the order of the last changes: of two that are alone, the first has ceased to be."""
        job.crashes, job.solo = marks.crashes, marks.solo
        self._unwritten.pop(job, None)
        self._unwritten[job] = marks
        self._has_unwritten.set()

    async def run(self) -> None:
        """Write the marks of jobs into their records, and do what had to wait for that. Runs until cancelled.

        A job that is convicted or given to a peer takes as long as its server does: the others don't wait for it.
        """
        async with asyncio.TaskGroup() as leaving:
            while True:
                await self._has_unwritten.wait()
                self._has_unwritten.clear()
                while self._unwritten:
                    job = next(iter(self._unwritten))
                    marks = self._unwritten.pop(job)
                    home = self._homes.get(job)
                    if home is not None and not job.is_over:
                        await self._write(job, marks, home, leaving)

    async def _write(self, job: Job, marks: Marks, home: Home, leaving: asyncio.TaskGroup) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                is_ours = await home.record(job, marks)
        except TimeoutError:
            self._put_off(job, marks)
            return
        if job in self._unwritten or job not in self._homes:  # things have changed meanwhile
            return
        turn = self._turn
        if marks.is_poison:
            if is_ours:
                leaving.create_task(home.convict(job, marks))
        elif job in self._let_go:
            leaving.create_task(home.let_go(job))
        elif marks.is_alone and turn is not None and turn.job is job and not turn.is_recorded:
            self._begin_turn(turn)

    def _put_off(self, job: Job, marks: Marks) -> None:
        """The server of the job's queue doesn't answer: those of other queues don't wait for it."""
        log.warning("job_record_put_off", **job.log_ids)
        turn = self._turn
        if turn is not None and turn.job is job and not turn.is_recorded:
            self._turn = None
            marks = self._quarantine.postpone(job)
        if job not in self._unwritten and job in self._homes:
            self._write_later(job, marks)
        self._advance()
