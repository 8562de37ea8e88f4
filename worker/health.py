"""How a worker is: what `/healthz`, `/readyz` and the registry say of it."""

from collections.abc import Callable, Sequence
from importlib.metadata import version

from worker.engine_side import EngineSide
from worker.http_status import Health
from worker.served_queue import ServedQueue
from worker.settings import Settings, served_name
from worker.streams.registry import Beat


class WorkerHealth:
    """Reads the state of the engine and the queues; changes nothing, so that other threads may ask."""

    def __init__(
        self,
        settings: Settings,
        engine: EngineSide,
        queues: Sequence[ServedQueue],
        *,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._queues = queues
        self._is_stopping = is_stopping
        self._version = version("pagemill")
        # By the server's clock; 0 before it is known.
        self.started_ms = 0

    def alive(self) -> Health:
        """False: restart this worker."""
        if (reason := self._engine.liveness.why_stuck()) is not None:
            return Health(False, reason)
        return Health(True)

    def ready(self) -> Health:
        """False: jobs are not taken now, of some queue at least."""
        if self._is_stopping():
            return Health(False, "draining")
        troubles = {queue.name: queue.links.health.trouble for queue in self._queues}
        if waits := {name: trouble for name, trouble in troubles.items() if trouble is not None}:
            return Health(False, f"waiting for Redis: {next(iter(waits.values()))}", {"queues": list(waits)})
        if not self._engine.supervisor.is_up:
            return Health(False, "the engine is starting")
        lost = [queue.name for queue in self._queues if not queue.links.is_connected]
        if lost:
            return Health(False, "no connection to Redis", {"queues": lost})
        return self.alive()

    def beat(self, queue: ServedQueue) -> Beat:
        """What the registry of `queue` says. The engine's figures are those of the jobs of all queues."""
        report = self._engine.supervisor.last_report
        stats = None if report is None else report.stats
        used = 0 if stats is None else stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks
        beat: dict[str, str | int | float] = {
            "model": served_name(self._settings.model),
            "version": self._version,
            "slots": self._settings.max_num_seqs,
            "held": queue.num_held,
            "running": 0 if stats is None else stats.num_running,
            "waiting": 0 if stats is None else stats.num_waiting,
            "kv_use": 0.0 if stats is None else round(used / stats.num_blocks, 4),
            "suspects": self._engine.gate.num_suspects,
            "draining": int(self._is_stopping()),
            "paused": int(queue.is_paused),
            "started": self.started_ms,
        }
        return beat if len(self._queues) == 1 else beat | {"queues": self._settings.queue}
