"""What the supervisor tells of the engine that it follows."""

import asyncio
import contextlib

from structlog.testing import capture_logs

from scheduler.output import SchedulerStats
from worker.engine import EngineRequest, StepTimes
from worker.engine_client import EngineDiedError
from worker.engine_config import EngineInfo
from worker.engine_messages import StepReport
from worker.engine_supervisor import EngineSupervisor

INFO = EngineInfo(512, 64, 16, 8, 320, 4096, "cpu", "float32", "print", 1)


class ScriptedEngine:
    """Reports of steps after which so many blocks were damaged; dies where there are no more."""

    def __init__(self, num_damaged: list[int]) -> None:
        self._num_damaged = num_damaged

    async def start(self) -> EngineInfo:
        return INFO

    def add(self, request: EngineRequest) -> None:
        raise NotImplementedError

    def abort(self, seq_id: str) -> None:
        raise NotImplementedError

    async def next_report(self) -> StepReport:
        if not self._num_damaged:
            raise EngineDiedError("the script is over")
        stats = SchedulerStats(0, 0, 0, 8, 8, 0, 0, 0, 0, 0, 0, 0, 0, num_damaged_blocks=self._num_damaged.pop(0))
        return StepReport((), stats, StepTimes())

    async def close(self) -> None:
        return None


async def test_damaged_blocks_are_logged_once_and_anew_after_a_restart() -> None:
    engines = [ScriptedEngine([0, 2, 2, 3]), ScriptedEngine([0, 1]), ScriptedEngine([])]
    over = asyncio.Event()

    def restarted() -> None:
        if not engines:
            over.set()

    supervisor = EngineSupervisor(
        lambda: engines.pop(0), on_report=lambda report: None, on_death=lambda: None, on_restart=restarted
    )
    with capture_logs() as logs:
        await supervisor.start()
        following = asyncio.create_task(supervisor.follow())
        await asyncio.wait([following, asyncio.create_task(over.wait())], return_when=asyncio.FIRST_COMPLETED)
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError, IndexError):
            await following
    told = [(entry["num_blocks"], entry["fate"]) for entry in logs if entry["event"] == "swapped_blocks_damaged"]
    assert told == [(2, "recomputed"), (1, "recomputed"), (1, "recomputed")]
