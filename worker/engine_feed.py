"""What the engine tells, passed on to the jobs of every queue: each queue knows its own sequences."""

from collections.abc import Callable, Sequence

from worker.engine_messages import StepReport
from worker.metrics import WorkerMetrics
from worker.served_queue import ServedQueue


class EngineFeed:
    """The engine's listener. What belongs to the engine and not to a job is counted here, once.

    `on_up` is called when a new engine has its jobs.
    """

    def __init__(self, queues: Sequence[ServedQueue], metrics: WorkerMetrics, on_up: Callable[[], None]) -> None:
        self._queues = queues
        self._metrics = metrics
        self._on_up = on_up

    def on_report(self, report: StepReport) -> None:
        """A step ended."""
        for queue in self._queues:
            queue.jobs.on_report(report)
        self._metrics.observe_scheduler(report.stats, report.times.num_steps)

    def on_death(self) -> None:
        """The engine died."""
        for queue in self._queues:
            queue.jobs.on_death()

    def on_restart(self) -> None:
        """Another engine stands, which has nothing yet."""
        self._metrics.engine_restarted()
        for queue in self._queues:
            queue.jobs.on_restart()
        self._on_up()
