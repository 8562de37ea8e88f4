"""What enters the engine and when, and in which order the records say so."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import cast

import pytest

from worker.engine_client import EngineDiedError
from worker.engine_end import EngineEnd
from worker.engine_gate import EngineGate
from worker.engine_supervisor import EngineSupervisor
from worker.job import Job, JobTimes
from worker.metrics import WorkerMetrics
from worker.protocol import parse_envelope
from worker.quarantine import Marks
from worker.streams.leases import Entry
from worker.streams.reply_writer import ReplyStatus, ReplyWriter

# How long a record may take.
PATIENCE_S = 0.05


class NamedJob(Job):
    """A job that goes by one name in the engine, another one each time it comes back."""

    @property
    def seq_ids(self) -> tuple[str, ...]:
        return (f"{self.envelope.id}~{self.num_set_aside}",)


def make_job(name: str, crashes: int = 0) -> Job:
    entry = Entry("normal", "1-0", {b"id": name.encode(), b"prompt": b"x"})
    envelope = parse_envelope("normal", "1-0", entry.fields, now_ms=2)
    writer = ReplyWriter(name, 1, lambda _: None, lambda _: None)
    job = NamedJob(entry, envelope, writer, JobTimes(1, 2))
    job.crashes = crashes
    return job


class Engine:
    """All that the gate asks of a supervisor."""

    is_up = True


class RecordingHome:
    """Tells what became of jobs, in order. A record is written once `may_write` is set."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.inside: list[str] = []
        self.lost: set[str] = set()
        self.may_write = asyncio.Event()
        self.may_write.set()

    def put_in(self, job: Job) -> None:
        self.inside.append(job.envelope.id)

    def take_out(self, job: Job) -> None:
        self.inside.remove(job.envelope.id)
        job.num_set_aside += 1

    def left_dead_engine(self, job: Job) -> None:
        self.inside.remove(job.envelope.id)

    async def record(self, job: Job, marks: Marks) -> bool:
        await self.may_write.wait()
        alone = " alone" if marks.is_alone else ""
        self.log.append(f"{job.envelope.id}: {marks.crashes}/{marks.solo}{alone}")
        return job.envelope.id not in self.lost

    async def convict(self, job: Job, marks: Marks) -> None:
        self.log.append(f"{job.envelope.id}: poison")

    async def let_go(self, job: Job) -> None:
        self.log.append(f"{job.envelope.id}: let go")


async def turns_of_the_loop() -> None:
    """As many as all that is to be written takes."""
    for _ in range(20):
        await asyncio.sleep(0)


class Bench:
    """A gate at work, and its surroundings."""

    def __init__(self) -> None:
        self.metrics = WorkerMetrics(worker_id="w", queues=("q",), model="m", version="0")
        self.now_s = 0.0
        self.gate = EngineGate(self.metrics, clock=lambda: self.now_s, patience_s=PATIENCE_S)
        self.engine = Engine()
        self.gate.engine = cast(EngineSupervisor, self.engine)
        self.home = RecordingHome()

    def enter(self, *names: str) -> list[Job]:
        jobs = [make_job(name) for name in names]
        for job in jobs:
            self.gate.enter(job, self.home)
        return jobs

    async def die(self, *computing: Job, end: EngineEnd = EngineEnd.SIGNAL) -> None:
        self.engine.is_up = False
        seq_ids = frozenset(seq_id for job in computing for seq_id in job.seq_ids)
        self.gate.on_death(EngineDiedError("it died", end, seq_ids))
        await turns_of_the_loop()

    def restart(self) -> None:
        self.engine.is_up = True
        self.gate.on_restart()

    def tell(self, job: Job, num_events: int = 1) -> None:
        """A step brings a token, and so many token events were written by now."""
        job.writer.num_token_events += num_events
        self.gate.on_tokens(job)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Time goes on, step by step, until something is so."""
        for _ in range(500):
            if condition():
                return
            self.now_s += 1
            self.gate.on_step()
            await asyncio.sleep(PATIENCE_S / 5)
        pytest.fail("it never came to that")

    async def until_logged(self, *lines: str) -> None:
        await turns_of_the_loop()
        assert self.home.log == list(lines)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    writing = asyncio.create_task(bench.gate.run())
    yield bench
    writing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await writing


async def test_innocent_jobs_go_straight_in_and_nothing_is_written(bench: Bench) -> None:
    bench.enter("a", "b")
    assert bench.home.inside == ["a", "b"]
    assert bench.home.log == []


async def test_only_those_that_were_computed_are_blamed_and_each_runs_alone_once_that_is_written(
    bench: Bench,
) -> None:
    a, b, _ = bench.enter("a", "b", "waited")
    await bench.die(a, b)
    assert bench.home.inside == []
    await bench.until_logged("a: 1/0", "b: 1/0")
    bench.home.may_write.clear()
    bench.restart()
    await turns_of_the_loop()
    assert bench.home.inside == [], "it ran before its record said that it is alone"
    bench.home.may_write.set()
    await bench.until_logged("a: 1/0", "b: 1/0", "a: 1/0 alone")
    assert bench.home.inside == ["a"]
    bench.tell(a)
    await bench.until_logged("a: 1/0", "b: 1/0", "a: 1/0 alone", "a: 1/0", "b: 1/0 alone")
    assert bench.home.inside == ["b"]
    bench.tell(b)
    assert sorted(bench.home.inside) == ["a", "b", "waited"]
    assert bench.gate.num_suspects == 0


async def test_a_queue_whose_server_is_away_keeps_no_other_queues_jobs_out_of_the_engine(bench: Bench) -> None:
    """A suspect's turn can't begin before its record says so: it is put off, and the others run meanwhile."""
    a, b = make_job("a"), make_job("b")
    away = RecordingHome()
    bench.gate.enter(a, away)
    bench.gate.enter(b, bench.home)
    away.may_write.clear()
    await bench.die(a)
    bench.restart()
    await bench.until(lambda: bench.home.inside == ["b"])
    assert bench.gate.num_suspects == 1
    away.may_write.set()
    await bench.until(lambda: away.inside == ["a"])
    assert bench.home.inside == [], "it runs alone"
    assert away.log[-1] == "a: 1/0 alone"


async def test_tokens_count_once_their_events_are_written(bench: Bench) -> None:
    (a,) = bench.enter("a")
    await bench.die(a)
    bench.restart()
    await bench.until_logged("a: 1/0", "a: 1/0 alone")
    bench.tell(a, num_events=0)
    assert bench.gate.num_suspects == 1
    bench.tell(a, num_events=1)
    assert bench.gate.num_suspects == 0


async def test_where_nobody_hears_the_tokens_they_count_as_they_come(bench: Bench) -> None:
    """A job that runs to its end though its reply was deleted would be alone for all of it."""
    (a,) = bench.enter("a")
    await bench.die(a)
    bench.restart()
    await bench.until_logged("a: 1/0", "a: 1/0 alone")
    a.writer.close(ReplyStatus.ABANDONED)
    bench.tell(a, num_events=0)
    assert bench.gate.num_suspects == 0


async def test_who_dies_alone_twice_more_is_poison_and_runs_no_more(bench: Bench) -> None:
    a, b = bench.enter("a", "b")
    await bench.die(a, b)
    bench.restart()
    await bench.until_logged("a: 1/0", "b: 1/0", "a: 1/0 alone")
    bench.home.log.clear()
    await bench.die(a)
    bench.restart()
    await bench.until_logged("a: 2/1", "b: 1/0 alone")
    bench.home.log.clear()
    bench.tell(b)
    await bench.until_logged("b: 1/0", "a: 2/1 alone")
    bench.home.log.clear()
    await bench.die(a)
    await bench.until_logged("a: 3/2", "a: poison")
    bench.restart()
    assert bench.home.inside == ["b"]


async def test_a_job_that_is_another_workers_now_is_not_convicted_and_holds_nobody_up(bench: Bench) -> None:
    suspect = make_job("suspect", crashes=2)
    suspect.solo = 1
    waiting = asyncio.create_task(bench.gate.wait_turn(suspect, bench.home))
    bench.home.lost.add("suspect")
    await bench.until_logged("suspect: 2/1 alone")
    assert await waiting
    bench.gate.enter(suspect, bench.home)
    await bench.die(suspect)
    await bench.until_logged("suspect: 2/1 alone", "suspect: 3/2")
    bench.restart()
    bench.enter("new")
    assert bench.home.inside == ["new"]


async def test_a_step_that_was_under_way_when_a_turn_began_is_on_those_that_it_computed(bench: Bench) -> None:
    """They are set aside, but the engine has not heard of it when it dies."""
    a, b = bench.enter("a", "b")
    in_the_step = EngineDiedError("it died", EngineEnd.SIGNAL, frozenset({*a.seq_ids, *b.seq_ids}))
    suspect = make_job("suspect", crashes=1)
    waiting = asyncio.create_task(bench.gate.wait_turn(suspect, bench.home))
    await bench.until_logged("suspect: 1/0 alone")
    assert await waiting
    bench.gate.enter(suspect, bench.home)
    assert bench.home.inside == ["suspect"]
    bench.gate.on_death(in_the_step)
    assert (a.crashes, b.crashes, suspect.crashes) == (1, 1, 1)
    assert (a.solo, b.solo, suspect.solo) == (0, 0, 0)


async def test_the_last_step_of_a_turn_counts_as_alone_though_its_end_was_written_meanwhile(bench: Bench) -> None:
    a, b = bench.enter("a", "b")
    await bench.die(a, b)
    bench.restart()
    await bench.until_logged("a: 1/0", "b: 1/0", "a: 1/0 alone")
    still_computing = EngineDiedError("it died", EngineEnd.SIGNAL, frozenset(a.seq_ids))
    bench.tell(a)
    bench.gate.on_death(still_computing)
    assert (a.crashes, a.solo) == (2, 1)
    assert (b.crashes, b.solo) == (1, 0)


async def test_who_goes_on_after_its_turn_for_want_of_others_is_not_alone_any_more(bench: Bench) -> None:
    (a,) = bench.enter("a")
    await bench.die(a)
    bench.restart()
    await bench.until_logged("a: 1/0", "a: 1/0 alone")
    bench.tell(a)
    assert bench.home.inside == ["a"]
    await bench.die(a)
    assert (a.crashes, a.solo) == (2, 0)


async def test_an_engine_that_hung_loses_all_its_jobs_once_their_records_are_right(bench: Bench) -> None:
    a, _ = bench.enter("a", "waited")
    await bench.die(a, end=EngineEnd.HUNG)
    await bench.until_logged("a: 1/0", "waited: 0/0", "a: let go", "waited: let go")
    bench.restart()
    assert bench.home.inside == []


@pytest.mark.parametrize("what", ["convict", "let_go"])
async def test_who_leaves_while_its_server_is_away_keeps_nobody_waiting(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Neither jobs of other queues nor those of its own."""

    async def wait(*_: object) -> None:
        bench.home.log.append(f"{what} waits")
        await asyncio.Event().wait()

    monkeypatch.setattr(bench.home, what, wait)
    if what == "convict":
        waiting = make_job("a", crashes=2)
        waiting.solo = 1
        bench.enter("b")
        turn = asyncio.create_task(bench.gate.wait_turn(waiting, bench.home))
        await bench.until(turn.done)
        bench.gate.enter(waiting, bench.home)
        await bench.die(waiting)
        bench.restart()
        (c,) = bench.enter("c")
        await bench.die(c)
        await bench.until_logged("a: 2/1 alone", "a: 3/2", "convict waits", "c: 1/0")
    else:
        a, b = bench.enter("a", "b")
        await bench.die(a, b, end=EngineEnd.HUNG)
        await bench.until_logged("a: 1/0", "b: 1/0", "let_go waits", "let_go waits")


async def test_a_suspect_whose_turn_does_not_come_hears_so(bench: Bench) -> None:
    """It was called off, or the worker stops."""
    first, second, third = (make_job(name, crashes=1) for name in ("first", "second", "third"))
    waiting = [asyncio.create_task(bench.gate.wait_turn(job, bench.home)) for job in (first, second)]
    await bench.until_logged("first: 1/0 alone")
    assert await waiting[0]
    bench.gate.leave(second)
    assert not await waiting[1]
    waiting.append(asyncio.create_task(bench.gate.wait_turn(third, bench.home)))
    await asyncio.sleep(0)
    bench.gate.stop()
    assert not await waiting[2]
    assert not await bench.gate.wait_turn(make_job("fourth", crashes=1), bench.home)


async def test_a_suspect_that_ends_before_it_runs_makes_room_for_the_others(bench: Bench) -> None:
    """Its prompt could not be read, for instance."""
    suspect = make_job("suspect", crashes=1)
    waiting = asyncio.create_task(bench.gate.wait_turn(suspect, bench.home))
    await bench.until_logged("suspect: 1/0 alone")
    assert await waiting
    bench.enter("new")
    assert bench.home.inside == []
    bench.gate.leave(suspect)
    assert bench.home.inside == ["new"]
