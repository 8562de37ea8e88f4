"""The engine of a worker with all that looks after it; the queues of the worker share it."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from model.errors import ModelError
from worker.engine_client import EngineClient, InProcessEngine, ProcessEngine, ProgressCallback
from worker.engine_config import EngineConfig
from worker.engine_gate import EngineGate
from worker.engine_messages import StepReport
from worker.engine_settings import engine_config
from worker.engine_supervisor import EngineSupervisor
from worker.errors import StartupError
from worker.intake import ServedModel
from worker.job import WorkerNames
from worker.liveness import Liveness
from worker.metrics import WorkerMetrics
from worker.parts import Parts
from worker.served_queue import ServedQueue
from worker.settings import Settings
from worker.text_side import load_text_side

MakeEngine = Callable[[EngineConfig, ProgressCallback | None], EngineClient]
"""Makes an engine that isn't started yet: the first one, and each that replaces a dead one."""


class EngineSide:
    """The supervisor that keeps an engine alive, the gate to it, and the look at whether it gets on."""

    def __init__(
        self,
        settings: Settings,
        model_path: Path,
        metrics: WorkerMetrics,
        *,
        make_engine: MakeEngine | None,
        progress: ProgressCallback | None,
        on_up: Callable[[], None],
    ) -> None:
        """`make_engine` is the kind that `settings.engine_mode` names, where it is None. `on_up`: jobs may come."""
        self._model_path = model_path
        self._load_format = settings.load_format
        self._metrics = metrics
        self._queues: Sequence[ServedQueue] = ()
        self.gate = EngineGate(metrics, on_up=on_up)
        config = engine_config(settings, model_path)
        make = make_engine or (ProcessEngine if settings.engine_mode == "process" else InProcessEngine)
        self.supervisor = EngineSupervisor(
            lambda told: make(config, told),
            on_report=self._on_report,
            on_death=self.gate.on_death,
            on_restart=self.gate.on_restart,
            watchdog_s=settings.watchdog_s,
            progress=progress,
        )
        self.gate.engine = self.supervisor
        self.liveness = Liveness(settings.watchdog_s, seconds_since_step=self.supervisor.seconds_since_step)

    def work_for(self, queues: Sequence[ServedQueue]) -> None:
        """From now on what the engine brings goes to the jobs of `queues`: each knows its own sequences."""
        self._queues = queues

    async def start(self, worker_id: str, model: str) -> ServedModel:
        """Start the engine, and read the tokenizer meanwhile. `model` is the name that clients know it by.

        Raises StartupError.
        """
        loading = asyncio.create_task(asyncio.to_thread(load_text_side, self._model_path, self._load_format))
        try:
            info = await self.supervisor.start()
            tokenizer, eos_token_ids = await loading
        except ModelError as error:
            raise StartupError(str(error)) from error
        finally:
            loading.cancel()
        return ServedModel(
            model_names=frozenset({model}),
            tokenizer=tokenizer,
            info=info,
            eos_token_ids=eos_token_ids,
            names=WorkerNames(worker_id, model, info.fingerprint),
        )

    def start_parts(self, parts: Parts) -> None:
        """Follow the engine, which is started, until cancelled."""
        parts.spawn("engine", self.supervisor.follow())
        parts.spawn("gate", self.gate.run())
        parts.spawn("liveness", self.liveness.run())

    def _on_report(self, report: StepReport) -> None:
        for queue in self._queues:
            queue.jobs.on_report(report)
        self.gate.on_step()
        self._metrics.observe_scheduler(report.stats, report.times.num_steps)
