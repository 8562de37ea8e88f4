"""What the supervisor tells of the engine that it follows."""

import asyncio
import contextlib
from collections.abc import MutableMapping
from typing import Any

from structlog.testing import capture_logs

from scheduler.output import SchedulerStats
from worker.engine import EngineRequest, StepTimes
from worker.engine_client import EngineDiedError
from worker.engine_config import EngineInfo
from worker.engine_messages import StepReport
from worker.engine_supervisor import EngineSupervisor

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
        lambda: engines.pop(0), on_report=lambda report: None, on_death=lambda: None, on_restart=restarted
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
