"""What the engine tells, passed on to the jobs of every queue: each queue knows its own sequences."""

from collections.abc import Sequence

from worker.engine_gate import EngineGate
from worker.engine_messages import StepReport
from worker.metrics import WorkerMetrics
from worker.served_queue import ServedQueue


class EngineFeed:
    """The engine's listener. What belongs to the engine and not to a job is counted here, once."""

    def __init__(self, queues: Sequence[ServedQueue], gate: EngineGate, metrics: WorkerMetrics) -> None:
        self._queues = queues
        self._gate = gate
        self._metrics = metrics

    def on_report(self, report: StepReport) -> None:
        """A step ended."""
        for queue in self._queues:
            queue.jobs.on_report(report)
        self._gate.on_step()
        self._metrics.observe_scheduler(report.stats, report.times.num_steps)
