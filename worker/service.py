"""The service process of a worker: takes jobs from its queues, feeds the engine, streams what it brings to the replies.

    for each queue   source ──► Intake ──┐              ┌──► JobsInFlight ──► Replies ──► terminal event ──► settle
                                         ├──► engine ──►┤    (one pipeline a step)
    for each queue   source ──► Intake ──┘              └──► JobsInFlight ──► …

What serves one queue is in `ServedQueue`; `JobTaking` shares the room among them. Shutdown, in this order: stop taking
jobs; let running ones finish within the grace period; write what is gathered and hand the rest to a peer; leave the
registry; end the engine; close the connections. A second signal ends the waiting.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import structlog

from worker.engine_client import ProgressCallback
from worker.engine_config import EngineInfo
from worker.engine_side import EngineSide, MakeEngine
from worker.errors import StartupError
from worker.giving_up import unless_stopped
from worker.health import WorkerHealth
from worker.http_status import StatusServer
from worker.job_taking import JobTaking
from worker.logs import LogLevel
from worker.metrics import WorkerMetrics
from worker.parts import Parts
from worker.served_queue import ServedQueue
from worker.settings import Settings, served_name
from worker.shutdown import num_held, shut_down
from worker.signals import signals_call
from worker.streams.errors import StreamsError
from worker.streams.lease_keeper import LeaseKeeper
from worker.streams.server_check import check_server
from worker.trace_recorder import TraceRecorder
from worker.worker_id import new_worker_id

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """What a service that stands tells whoever started it. `metrics_url` is None where no port was asked for."""

    worker_id: str
    queues: tuple[str, ...]
    redis_version: str
    engine: EngineInfo
    metrics_url: str | None


class Service:
    """One worker. `run` builds everything, serves until it is told to stop, and takes everything down again."""

    def __init__(
        self,
        settings: Settings,
        *,
        model_path: Path | None = None,
        progress: ProgressCallback | None = None,
        make_engine: MakeEngine | None = None,
        on_stop: Callable[[int, bool], None] | None = None,
    ) -> None:
        """`settings.redis_url` is the server to work with, `model_path` the checkpoint (`settings.model`).

        `make_engine` is the kind of engine that `settings.engine_mode` names, where it is left out. `on_stop` is called
        with the number of jobs held as soon as the service is told to stop, and with True beside it when it is told not
        to wait for them.
        """
        if settings.redis_url is None:
            raise StartupError("no Redis to work with: set redis_url")
        self._settings = settings
        self._url = settings.redis_url.get_secret_value()
        self._model_path = Path(settings.model) if model_path is None else model_path
        self._model = served_name(settings.model)
        self._worker_id = new_worker_id()
        self._on_stop = on_stop
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        # Set whenever there may be room for a job, or another reason to look anew.
        self._room = asyncio.Event()
        self._parts = Parts(self._stop_now)
        self._metrics = WorkerMetrics(
            worker_id=self._worker_id, queues=settings.queues, model=self._model, version=version("pagemill")
        )
        self._engine = EngineSide(
            settings,
            self._model_path,
            self._metrics,
            make_engine=make_engine,
            progress=progress,
            on_up=self._room.set,
        )
        self._queues = self._make_queues()
        self._engine.work_for(self._queues)
        self._health = WorkerHealth(settings, self._engine, self._queues, is_stopping=self._stop.is_set)

    def _make_queues(self) -> list[ServedQueue]:
        settings = self._settings
        recorder = None if settings.record_trace is None else TraceRecorder(settings.record_trace)
        log_level = LogLevel()
        return [
            ServedQueue(
                queue,
                settings,
                self._url,
                self._worker_id,
                self._parts,
                self._metrics.of_queue(queue),
                self._engine.gate,
                log_level,
                model=self._model,
                recorder=recorder,
                on_change=self._room.set,
                on_drain=self._drain,
            )
            for queue in settings.queues
        ]

    # Life.

    async def run(self, ready: Callable[[ServiceInfo], None] | None = None) -> None:
        """Serve until SIGTERM, SIGINT, SIGHUP or `stop`, also while it starts. `ready` is called once, when jobs are
        being taken.

        Raises StartupError, one line that says what to do, if the worker can't start or its engine can't be restarted.
        """
        structlog.contextvars.bind_contextvars(worker_id=self._worker_id, queue=self._settings.queue)
        with signals_call(self.stop):
            await self._serve(ready)
        if self._parts.failure is not None:
            raise self._parts.failure

    def stop(self) -> None:
        """Stop taking jobs and end once the running ones are done; called again: end now."""
        is_again = self._stop.is_set()
        if self._on_stop is not None and not self._hurry.is_set():
            self._on_stop(num_held(self._queues), is_again)
        if is_again:
            self._hurry.set()
        self._stop.set()
        self._room.set()

    def _drain(self) -> None:
        """An operator's stop, which hurries nothing where another came before."""
        if not self.is_stopping:
            self.stop()

    def _stop_now(self) -> None:
        self.stop()
        self._hurry.set()

    @property
    def is_stopping(self) -> bool:
        """Whether it was told to stop."""
        return self._stop.is_set()

    async def _serve(self, ready: Callable[[ServiceInfo], None] | None) -> None:
        with contextlib.ExitStack() as closing:
            try:
                if await unless_stopped(self._start(ready, closing), self._stop, patience_s=0) is None:
                    log.info("worker_stopped_while_it_started")
                    return
                await self._take_jobs()
                grace_s = self._settings.shutdown_grace_s
                await shut_down(self._queues, self._engine.gate, grace_s=grace_s, room=self._room, hurry=self._hurry)
            except StreamsError as error:
                raise StartupError(f"Redis failed while the worker started: {error}") from error
            finally:
                await self._close()

    async def _take_jobs(self) -> None:
        taking = JobTaking(
            self._queues,
            self._parts,
            self._room,
            # Without an engine there is no room: what waits is as well off in the queue, where a peer may take it.
            num_seats=lambda: self._settings.max_num_seqs if self._engine.supervisor.is_up else 0,
            lease_ms=self._settings.lease_ms,
        )
        await taking.run(self._stop)

    async def _close(self) -> None:
        await self._parts.end()
        await self._engine.supervisor.close()
        for queue in self._queues:
            await queue.close()

    # Start.

    async def _start(self, ready: Callable[[ServiceInfo], None] | None, closing: contextlib.ExitStack) -> EngineInfo:
        """Everything up to where jobs are taken; what `closing` gets is closed last."""
        status = self._start_status_server()  # first, so that whoever asks hears what is waited for
        if status is not None:
            closing.callback(status.close)
        redis_version = ""
        for queue in self._queues:
            redis_version = await check_server(self._url, queue.name, queue.links.health)
        served = await self._engine.start(self._worker_id, self._model)
        for queue in self._queues:
            queue.use_engine(self._engine.supervisor, served)
            await queue.prepare()
        self._health.started_ms = self._queues[0].links.clock.now_ms()
        self._engine.start_parts(self._parts)
        held = [(queue.links.leases, queue.links.leasing) for queue in self._queues]
        self._parts.spawn("leases", LeaseKeeper(held, self._engine.liveness.is_well).run())
        for queue in self._queues:
            queue.start_parts(beat=partial(self._health.beat, queue))
        info = served.info
        url = None if status is None else f"http://{self._settings.metrics_host}:{status.port}"
        log.info(
            "worker_ready",
            device=info.device,
            dtype=info.dtype,
            kv_cache_dtype=info.kv_cache_dtype,
            num_blocks=info.num_blocks,
            max_model_len=info.max_model_len,
            activation_bytes=info.activation_bytes,
            engine_pid=info.pid,
            metrics_url=url,
        )
        if ready is not None:
            ready(ServiceInfo(self._worker_id, self._settings.queues, redis_version, info, url))
        return info

    def _start_status_server(self) -> StatusServer | None:
        settings, health = self._settings, self._health
        if settings.metrics_port is None:
            return None
        return StatusServer(
            settings.metrics_host, settings.metrics_port, self._metrics.registry, health.alive, health.ready
        )
