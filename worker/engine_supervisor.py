"""Keeps an engine alive: starts it, follows its steps, starts another where it died, and knows when it hangs."""

import asyncio
import time
from collections.abc import Callable

import structlog

from scheduler.output import SchedulerStats
from worker.engine import EngineRequest
from worker.engine_client import EngineClient, EngineDiedError, ProgressCallback
from worker.engine_config import EngineInfo
from worker.engine_end import EngineEnd
from worker.engine_messages import StepReport
from worker.errors import StartupError
from worker.liveness import look_every_s
from worker.memory import headroom
from worker.startup_memory import left, possible_cause

log = structlog.get_logger(__name__)

# An engine that dies so often before it stands won't stand.
MAX_STARTS = 5
# An engine that starts tells how far it is. So long it may say nothing: a cold disk takes its time to give torch.
START_SILENCE_S = 60.0
# Totals that an engine has told of: damaged blocks, preemptions by swap, by recompute.
NOTHING_TOLD = (0, 0, 0)


class EngineSupervisor:
    """Owner of the engine client.

    `on_report` gets every step. `on_death` is called when an engine died, or was ended since it had work and did no
    step for `watchdog_s`; `on_restart` once its successor stands: it has nothing then, and must be given all that is
    to run, what came meanwhile included.

    A successor that starts is not hung, however long it takes, as long as it says how far it is.
    """

    def __init__(
        self,
        make_engine: Callable[[ProgressCallback], EngineClient],
        *,
        on_report: Callable[[StepReport], None],
        on_death: Callable[[EngineDiedError], None],
        on_restart: Callable[[], None],
        watchdog_s: float,
        progress: ProgressCallback | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make_engine = make_engine
        self._on_report = on_report
        self._on_death = on_death
        self._on_restart = on_restart
        self._watchdog_s = watchdog_s
        self._progress = progress
        self._clock = clock
        self._moved_s = clock()
        self._in_engine: set[str] = set()
        self._hung_for_s = 0.0
        self._was_ended = False
        self._told = NOTHING_TOLD
        self.is_up = False
        self.last_report: StepReport | None = None
        self._engine = make_engine(self._on_progress)

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
        watching = asyncio.create_task(self._watch())
        try:
            while True:
                try:
                    report = await self._engine.next_report()
                except EngineDiedError as error:
                    await self._restart(error)
                    continue
                self._moved_s = self._clock()
                self._in_engine.difference_update(
                    output.seq_id for output in report.outputs if output.finish_reason is not None
                )
                self._tell_losses(report.stats)
                self.last_report = report
                self._on_report(report)
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        """End an engine that stands still, so that whoever follows it hears of its death."""
        look_s = look_every_s(self._watchdog_s)
        looked_s = self._clock()
        while True:
            await asyncio.sleep(look_s)
            now_s = self._clock()
            # Where this process was held up itself, stopped for instance, the engine had no chance to be heard.
            self._moved_s += max(0.0, now_s - looked_s - 2 * look_s)
            looked_s = now_s
            if not self._hung_for_s and self._is_still():
                self._hung_for_s = now_s - self._moved_s
                self._was_ended = self._engine.kill()
                log.error(
                    "engine_hung",
                    seconds=round(self._hung_for_s, 1),
                    is_starting=not self.is_up,
                    was_ended=self._was_ended,
                )

    def _is_still(self) -> bool:
        """Whether it has something to do and does not get on with it."""
        silent_s = self._clock() - self._moved_s
        if self.is_up:
            return bool(self._in_engine) and silent_s > self._watchdog_s
        return silent_s > max(self._watchdog_s, START_SILENCE_S)

    def _on_progress(self, stage: str, done: int, total: int) -> None:
        self._moved_s = self._clock()
        if self._progress is not None:
            self._progress(stage, done, total)

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
        if self._hung_for_s:
            fate = "was ended" if self._was_ended else "can't be ended, being a thread of the service"
            words = f"the engine did no step for {self._hung_for_s:.0f} s while jobs ran, and {fate}"
            error = EngineDiedError(words, EngineEnd.HUNG, error.seq_ids)
        log.error("engine_died", error=str(error), end=error.end, memory=left(headroom()))
        self.is_up = False
        self._on_death(error)
        if self._hung_for_s and not self._was_ended:
            raise StartupError(f"{error}: start the worker again, best with engine_mode process, which replaces it")
        for attempt in range(MAX_STARTS):
            await self._engine.close()
            self._begin_start()
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

    def _begin_start(self) -> None:
        self._engine = self._make_engine(self._on_progress)
        self._moved_s, self._hung_for_s, self._was_ended = self._clock(), 0.0, False
        self._in_engine.clear()

    def _stands(self) -> None:
        self._moved_s = self._clock()
        self._told = NOTHING_TOLD
        self.is_up = True

    def add(self, request: EngineRequest) -> None:
        """Queue a sequence; between two engines nothing is done, since `on_restart` adds all there are."""
        if self.is_up:
            if not self._in_engine:  # an idle engine's last step is no sign of anything
                self._moved_s = self._clock()
            self._in_engine.add(request.seq_id)
            self._engine.add(request)

    def abort(self, seq_id: str) -> None:
        """Stop a sequence before the next step."""
        if self.is_up:
            self._in_engine.discard(seq_id)
            self._engine.abort(seq_id)

    def seconds_since_step(self) -> float:
        """How long the engine has had work without a step; 0 where it has none, and while a successor starts.

        A start has a limit of its own, after which it is begun anew.
        """
        return self._clock() - self._moved_s if self.is_up and self._in_engine else 0.0

    async def close(self) -> None:
        """End the engine."""
        self.is_up = False
        await self._engine.close()
