"""Keeps an engine alive: starts it, follows its steps, starts another where it died, and knows when it hangs."""

import asyncio
import time
from collections.abc import Callable

import structlog

from scheduler.output import SchedulerStats
from worker.engine import EngineRequest
from worker.engine_client import EngineClient, EngineDiedError
from worker.engine_config import EngineInfo
from worker.engine_messages import StepReport
from worker.errors import StartupError
from worker.startup_memory import possible_cause

log = structlog.get_logger(__name__)

# An engine that dies so often before it stands won't stand.
MAX_STARTS = 5
# Totals that an engine has told of: damaged blocks, preemptions by swap, by recompute.
NOTHING_TOLD = (0, 0, 0)


class EngineSupervisor:
    """Owner of the engine client.

    `on_report` gets every step, `on_death` is called when an engine died, `on_restart` once its successor stands: it
    has nothing then, and must be given all that is to run, what came meanwhile included.
    """

    def __init__(
        self,
        make_engine: Callable[[], EngineClient],
        *,
        on_report: Callable[[StepReport], None],
        on_death: Callable[[], None],
        on_restart: Callable[[], None],
    ) -> None:
        self._make_engine = make_engine
        self._on_report = on_report
        self._on_death = on_death
        self._on_restart = on_restart
        self._engine = make_engine()
        self._last_step_s = time.monotonic()
        self._told = NOTHING_TOLD
        self.is_up = False
        self.last_report: StepReport | None = None

    async def start(self) -> EngineInfo:
        """Start the engine. Raises StartupError."""
        try:
            info = await self._engine.start()
        except EngineDiedError as error:
            raise StartupError(f"the engine could not start: {error}, {possible_cause()}") from error
        self._stands()
        return info

    async def follow(self) -> None:
        """Pass every report on, until cancelled. Raises StartupError if a dead engine can't be started again."""
        while True:
            try:
                report = await self._engine.next_report()
            except EngineDiedError as error:
                await self._restart(error)
                continue
            self._last_step_s = time.monotonic()
            self._tell_losses(report.stats)
            self.last_report = report
            self._on_report(report)

    def _tell_losses(self, stats: SchedulerStats) -> None:
        """Log what the last step has cost those that run: blocks that came back damaged, and who gave way."""
        totals = (stats.num_damaged_blocks, stats.num_preemptions_swap, stats.num_preemptions_recompute)
        num_damaged, num_swapped, num_recomputed = (now - told for now, told in zip(totals, self._told, strict=True))
        self._told = totals
        if num_damaged > 0:
            log.error("swapped_blocks_damaged", num_blocks=num_damaged, fate="recomputed")
        if num_swapped + num_recomputed > 0:
            log.info("sequences_preempted", num_swapped=num_swapped, num_recomputed=num_recomputed)

    async def _restart(self, error: EngineDiedError) -> None:
        log.error("engine_died", error=str(error))
        self.is_up = False
        self._on_death()
        for attempt in range(MAX_STARTS):
            await self._engine.close()
            self._engine = self._make_engine()
            try:
                await self._engine.start()
                break
            except EngineDiedError as again:
                log.error("engine_died_at_start", error=str(again), attempt=attempt + 1)
                await asyncio.sleep(min(1.0, 0.1 * 2**attempt))
        else:
            raise StartupError(f"the engine died {MAX_STARTS} times in a row while it started: {error}")
        self._stands()
        self._on_restart()
        log.info("engine_restarted")

    def _stands(self) -> None:
        self._last_step_s = time.monotonic()
        self._told = NOTHING_TOLD
        self.is_up = True

    def add(self, request: EngineRequest) -> None:
        """Queue a sequence; between two engines nothing is done, since `on_restart` adds all there are."""
        if self.is_up:
            self._engine.add(request)

    def abort(self, seq_id: str) -> None:
        """Stop a sequence before the next step."""
        if self.is_up:
            self._engine.abort(seq_id)

    def seconds_since_step(self) -> float:
        """How long ago the last step ended. Means something only while the engine has work."""
        return time.monotonic() - self._last_step_s

    async def close(self) -> None:
        """End the engine."""
        self.is_up = False
        await self._engine.close()
