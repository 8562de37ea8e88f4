"""What the supervisor tells of the engine that it follows, and what it does with one that dies or stands still."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, MutableMapping
from typing import Any

import pytest
from structlog.testing import capture_logs

from scheduler.output import FinishReason, SchedulerStats, SequenceOutput
from scheduler.sampling_params import SamplingParams
from worker.engine import EngineRequest, StepTimes
from worker.engine_client import EngineDiedError, ProgressCallback
from worker.engine_config import EngineInfo
from worker.engine_end import EngineEnd
from worker.engine_messages import StepReport
from worker.engine_supervisor import EngineSupervisor
from worker.errors import StartupError

INFO = EngineInfo(512, 64, 16, 8, 320, 4096, "cpu", "float32", "print", 1)


class ScriptedEngine:
    """Reports steps, each with what had happened until then: blocks damaged, sequences swapped and recomputed.

    It dies where there are no more.
    """

    def __init__(self, totals: list[tuple[int, int, int]]) -> None:
        self._totals = totals

    async def start(self) -> EngineInfo:
        return INFO

    def add(self, request: EngineRequest) -> None:
        raise NotImplementedError

    def abort(self, seq_id: str) -> None:
        raise NotImplementedError

    async def next_report(self) -> StepReport:
        if not self._totals:
            raise EngineDiedError("the script is over")
        num_damaged, num_swapped, num_recomputed = self._totals.pop(0)
        stats = SchedulerStats(
            0, 0, 0, 8, 8, 0, 0, 0, num_recomputed, num_swapped, 0, 0, 0, num_damaged_blocks=num_damaged
        )
        return StepReport((), stats, StepTimes())

    def kill(self) -> bool:
        raise NotImplementedError

    async def close(self) -> None:
        return None


async def log_of(*scripts: list[tuple[int, int, int]]) -> list[MutableMapping[str, Any]]:
    """What is logged while one engine after the other plays its script."""
    engines = [*(ScriptedEngine(script) for script in scripts), ScriptedEngine([])]
    over = asyncio.Event()

    def restarted() -> None:
        if not engines:
            over.set()

    supervisor = EngineSupervisor(
        lambda told: engines.pop(0),
        on_report=lambda report: None,
        on_death=lambda error: None,
        on_restart=restarted,
        watchdog_s=60,
    )
    with capture_logs() as logs:
        await supervisor.start()
        following = asyncio.create_task(supervisor.follow())
        await asyncio.wait([following, asyncio.create_task(over.wait())], return_when=asyncio.FIRST_COMPLETED)
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError, IndexError):
            await following
    return logs


async def test_damaged_blocks_are_logged_once_and_anew_after_a_restart() -> None:
    logs = await log_of([(0, 0, 0), (2, 0, 0), (2, 0, 0), (3, 0, 0)], [(0, 0, 0), (1, 0, 0)])
    told = [(entry["num_blocks"], entry["fate"]) for entry in logs if entry["event"] == "swapped_blocks_damaged"]
    assert told == [(2, "recomputed"), (1, "recomputed"), (1, "recomputed")]


async def test_preemptions_are_logged_step_by_step_and_by_what_became_of_the_victims() -> None:
    logs = await log_of([(0, 0, 0), (0, 2, 0), (0, 2, 0), (0, 3, 1)], [(0, 0, 1)])
    told = [
        (entry["num_swapped"], entry["num_recomputed"]) for entry in logs if entry["event"] == "sequences_preempted"
    ]
    assert told == [(2, 0), (1, 1), (0, 1)]


WATCHDOG_S = 0.3
STATS = SchedulerStats(0, 0, 0, 8, 8, 0, 0, 0, 0, 0, 0, 0, 0)
REQUEST = EngineRequest("a", (1, 2), SamplingParams(), seed=0)


class QuietEngine(ScriptedEngine):
    """Does a step when it is told to, and dies when it is killed. It starts as slowly as it is told to."""

    def __init__(self, progress: ProgressCallback) -> None:
        super().__init__([])
        self.progress = progress
        self.may_start = asyncio.Event()
        self.reports: asyncio.Queue[StepReport | None] = asyncio.Queue()
        self.was_killed = False
        self.is_thread = False

    async def start(self) -> EngineInfo:
        await self.may_start.wait()
        if self.was_killed:
            raise EngineDiedError("killed while it started", EngineEnd.SIGNAL)
        return INFO

    def add(self, request: EngineRequest) -> None:
        pass

    def abort(self, seq_id: str) -> None:
        pass

    async def next_report(self) -> StepReport:
        report = await self.reports.get()
        if report is None:
            raise EngineDiedError("signal 9", EngineEnd.SIGNAL, frozenset({"a"}))
        return report

    def kill(self) -> bool:
        self.was_killed = True
        self.may_start.set()
        self.reports.put_nowait(None)
        return not self.is_thread


class Followed:
    """A supervisor that follows quiet engines."""

    following: "asyncio.Task[None]"

    def __init__(self) -> None:
        self.engines: list[QuietEngine] = []
        self.deaths: list[EngineDiedError] = []
        self.num_restarts = 0
        self.supervisor = EngineSupervisor(
            self._make,
            on_report=lambda report: None,
            on_death=self.deaths.append,
            on_restart=self._restarted,
            watchdog_s=WATCHDOG_S,
        )

    def _make(self, progress: ProgressCallback) -> QuietEngine:
        self.engines.append(QuietEngine(progress))
        return self.engines[-1]

    def _restarted(self) -> None:
        self.num_restarts += 1

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)


@pytest.fixture
async def followed() -> AsyncIterator[Followed]:
    followed = Followed()
    followed.engines[0].may_start.set()
    await followed.supervisor.start()
    followed.following = asyncio.create_task(followed.supervisor.follow())
    yield followed
    followed.following.cancel()
    await asyncio.wait({followed.following})


async def test_an_engine_that_has_work_and_does_no_step_is_ended_and_replaced(followed: Followed) -> None:
    followed.supervisor.add(REQUEST)
    with capture_logs() as logs:
        await followed.until(lambda: len(followed.engines) == 2)
    assert followed.engines[0].was_killed
    (death,) = followed.deaths
    assert (death.end, death.seq_ids) == (EngineEnd.HUNG, frozenset({"a"}))
    assert [entry["event"] for entry in logs][:2] == ["engine_hung", "engine_died"]
    followed.engines[1].may_start.set()
    await followed.until(lambda: followed.num_restarts == 1)
    assert followed.supervisor.last_report is None


async def test_an_engine_that_hangs_and_can_not_be_ended_ends_its_worker(followed: Followed) -> None:
    """A thread: its jobs go to peers, and no second engine is started beside it."""
    (engine,) = followed.engines
    engine.is_thread = True
    followed.supervisor.add(REQUEST)
    with capture_logs() as logs:
        await followed.until(followed.following.done)
    assert [entry["event"] for entry in logs] == ["engine_hung", "engine_died"]
    assert [death.end for death in followed.deaths] == [EngineEnd.HUNG]
    assert len(followed.engines) == 1
    error = followed.following.exception()
    assert isinstance(error, StartupError)
    assert "engine_mode process" in str(error)


async def test_an_idle_engine_is_never_hung_and_its_first_work_has_the_whole_time(followed: Followed) -> None:
    await asyncio.sleep(2 * WATCHDOG_S)  # longer than the watchdog has patience
    followed.supervisor.add(REQUEST)
    assert followed.supervisor.seconds_since_step() < WATCHDOG_S
    ended = SequenceOutput("a", (), FinishReason.LENGTH)
    followed.engines[0].reports.put_nowait(StepReport((ended,), STATS, StepTimes()))
    await followed.until(lambda: followed.supervisor.last_report is not None)
    await asyncio.sleep(2 * WATCHDOG_S)
    assert followed.deaths == []
    assert followed.supervisor.seconds_since_step() == 0


async def test_a_successor_that_starts_slowly_is_not_hung(followed: Followed) -> None:
    """Its jobs' leases live on, whatever the watchdog's patience with an engine that stands."""
    followed.supervisor.add(REQUEST)
    followed.engines[0].kill()
    await followed.until(lambda: len(followed.engines) == 2)
    await asyncio.sleep(2 * WATCHDOG_S)
    assert followed.supervisor.seconds_since_step() == 0
    assert not followed.engines[1].was_killed
    assert [death.end for death in followed.deaths] == [EngineEnd.SIGNAL]


async def test_a_successor_that_stops_telling_how_far_it_is_is_begun_anew(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.engine_supervisor.START_SILENCE_S", 0.5)
    followed.engines[0].kill()
    await followed.until(lambda: len(followed.engines) == 2)
    began = time.monotonic()
    while time.monotonic() < began + 1.0:  # it tells, and is left alone
        followed.engines[1].progress("loading", 1, 2)
        await asyncio.sleep(0.05)
    assert len(followed.engines) == 2
    await followed.until(lambda: len(followed.engines) == 3)
    assert [engine.was_killed for engine in followed.engines] == [True, True, False]
    followed.engines[2].may_start.set()
    await followed.until(lambda: followed.num_restarts == 1)
    assert len(followed.deaths) == 1


async def test_an_engine_is_not_blamed_for_the_time_in_which_nobody_could_hear_it(followed: Followed) -> None:
    """A service that was stopped, and its engine with it: both go on."""
    followed.supervisor.add(REQUEST)
    time.sleep(3 * WATCHDOG_S)  # noqa: ASYNC251 - the loop is held up
    await asyncio.sleep(0)
    await followed.until(lambda: followed.supervisor.seconds_since_step() < WATCHDOG_S)
    followed.engines[0].reports.put_nowait(StepReport((), STATS, StepTimes()))
    await followed.until(lambda: followed.supervisor.last_report is not None)
    assert followed.deaths == []
