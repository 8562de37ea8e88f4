"""The service process of a worker: takes jobs from the queue, feeds the engine, streams what it brings to the replies.

    source ──► Intake ──► engine ──► JobsInFlight ──► Replies (one pipeline a step) ──► terminal event ──► settle

Shutdown, in this order: stop taking jobs; let running ones finish within the grace period; write what is gathered
and hand the rest to a peer; leave the registry; end the engine; close the connections. A second signal ends the
waiting.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Any

import structlog

from model.errors import ModelError
from model.loader import load_config
from model.tokenizer import Tokenizer
from worker.engine_client import EngineClient, InProcessEngine, ProcessEngine, ProgressCallback
from worker.engine_config import EngineConfig, EngineInfo
from worker.engine_supervisor import EngineSupervisor
from worker.errors import StartupError
from worker.giving_up import unless_stopped, while_worthwhile
from worker.http_status import Health, StatusServer
from worker.intake import Intake, ServedModel
from worker.job import Job, WorkerNames
from worker.job_table import JobTable
from worker.jobs_in_flight import JobsInFlight
from worker.metrics import WorkerMetrics
from worker.queue_links import QueueLinks
from worker.settings import Settings, served_name
from worker.streams.connection import Backoff
from worker.streams.errors import ServerError, StreamsError
from worker.streams.health import tell
from worker.streams.leases import Entry
from worker.streams.server_check import check_server
from worker.trace_recorder import TraceRecorder
from worker.watch import Watch

log = structlog.get_logger(__name__)

# Longest that a worker without room sleeps before it looks again at what waits in the queue.
NO_ROOM_S = 1.0
# At the end: time to write what is gathered and to give unfinished jobs to a peer.
HAND_OVER_S = 10.0
# At the end: how long each of these is tried where Redis is out of reach.
CUT_OFF_S = 0.5
# How long a read that is under way may take once the worker is told to stop: longer than it blocks.
TAKE_S = 1.5
# At the end: how long a part that was cancelled may take before it is cancelled again.
CANCEL_AGAIN_S = 1.0
# Names of the tasks that take entries in begin with this.
ACCEPT = "accept "
# What a start brings: where jobs are handled, and the parts that run beside it.
Started = tuple[Intake, list["asyncio.Task[None]"]]

MakeEngine = Callable[[EngineConfig, ProgressCallback | None], EngineClient]
"""Makes an engine that isn't started yet: the first one, and each that replaces a dead one."""


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """What a service that stands tells whoever started it. `metrics_url` is None where no port was asked for."""

    worker_id: str
    queue: str
    redis_version: str
    engine: EngineInfo
    metrics_url: str | None


class Service:
    """One worker. `run` builds everything, serves until it is told to stop, and takes everything down again."""

    def __init__(
        self,
        settings: Settings,
        *,
        progress: ProgressCallback | None = None,
        make_engine: MakeEngine | None = None,
        on_stop: Callable[[int, bool], None] | None = None,
    ) -> None:
        """`settings.model` is the checkpoint's path and `settings.redis_url` the server to work with.

        `make_engine` is the kind of engine that `settings.engine_mode` names, where it is left out. `on_stop` is called
        with the number of jobs held as soon as the service is told to stop, and with True beside it when it is told not
        to wait for them.
        """
        if settings.redis_url is None:
            raise StartupError("no Redis to work with: set redis_url")
        self._settings = settings
        self._url = settings.redis_url.get_secret_value()
        self._worker_id = f"{safe_name(socket.gethostname())}-{os.getpid()}-{secrets.token_hex(4)}"
        self._version = distribution_version("pagemill")
        self._started_ms = int(time.time() * 1000)
        self._table = JobTable()
        self._metrics = WorkerMetrics(
            worker_id=self._worker_id, queue=settings.queue, model=settings.queue, version=self._version
        )
        self._room = asyncio.Event()
        self._on_stop = on_stop
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._links = QueueLinks.make(settings, self._url, self._worker_id, model=settings.queue)
        recorder = None if settings.record_trace is None else TraceRecorder(settings.record_trace)
        self._jobs = JobsInFlight(self._table, self._links, self._metrics, on_room=self._room.set, recorder=recorder)
        self._links.leases.on_loss = self._jobs.on_loss
        config = engine_config(settings)
        if make_engine is None:
            make_engine = ProcessEngine if settings.engine_mode == "process" else InProcessEngine
        self._engine = EngineSupervisor(
            lambda: make_engine(config, progress),
            on_report=self._jobs.on_report,
            on_death=self._jobs.on_death,
            on_restart=self._jobs.on_restart,
        )
        self._jobs.engine = self._engine
        self._watch = Watch(self._table, self._jobs, self._links, on_config=self._room.set)
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    # Life.

    async def run(self, ready: Callable[[ServiceInfo], None] | None = None) -> None:
        """Serve until SIGTERM, SIGINT, SIGHUP or `stop`, also while it starts. `ready` is called once, when jobs are
        being taken.

        Raises StartupError, one line that says what to do, if the worker can't start or its engine can't be restarted.
        """
        structlog.contextvars.bind_contextvars(worker_id=self._worker_id, queue=self._settings.queue)
        with signals_call(self.stop):
            await self._serve(ready)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Stop taking jobs and end once the running ones are done; called again: end now."""
        is_again = self._stop.is_set()
        if self._on_stop is not None and not self._hurry.is_set():
            self._on_stop(len(self._links.leases), is_again)
        if is_again:
            self._hurry.set()
        self._stop.set()
        self._room.set()

    @property
    def is_stopping(self) -> bool:
        """Whether it was told to stop."""
        return self._stop.is_set()

    async def _serve(self, ready: Callable[[ServiceInfo], None] | None) -> None:
        with contextlib.ExitStack() as closing:
            try:
                started = await self._unless_stopped(self._start(ready, closing))
                if started is None:
                    log.info("worker_stopped_while_it_started")
                    return
                intake, background = started
                await self._take_jobs(intake)
                await self._shut_down(background)
            except StreamsError as error:
                raise StartupError(f"Redis failed while the worker started: {error}") from error
            finally:
                await self._close()

    async def _unless_stopped(self, start: Coroutine[Any, Any, Started]) -> Started | None:
        """What `start` answers; None, and `start` called off, if the worker is told to stop before."""
        starting, stopping = asyncio.create_task(start), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return starting.result() if starting.done() else None
        finally:
            for task in (starting, stopping):
                task.cancel()
            await asyncio.wait({starting, stopping})

    async def _start(self, ready: Callable[[ServiceInfo], None] | None, closing: contextlib.ExitStack) -> Started:
        """Everything up to where jobs are taken; what `closing` gets is closed last."""
        status = self._start_status_server()  # first, so that whoever asks hears what is waited for
        if status is not None:
            closing.callback(status.close)
        redis_version = await check_server(self._url, self._settings.queue, self._links.health)
        info, intake = await self._start_engine()
        await self._links.clock.sync(self._links.commands)
        await self._links.source.ensure_groups()
        background = self._start_background()
        url = None if status is None else f"http://{self._settings.metrics_host}:{status.port}"
        log.info(
            "worker_ready",
            device=info.device,
            dtype=info.dtype,
            num_blocks=info.num_blocks,
            max_model_len=info.max_model_len,
            activation_bytes=info.activation_bytes,
            engine_pid=info.pid,
            metrics_url=url,
        )
        if ready is not None:
            ready(ServiceInfo(self._worker_id, self._settings.queue, redis_version, info, url))
        return intake, background

    async def _start_engine(self) -> tuple[EngineInfo, Intake]:
        """Start the engine, and read the tokenizer meanwhile."""
        path = Path(self._settings.model)
        loading = asyncio.create_task(asyncio.to_thread(load_text_side, path))
        try:
            info = await self._engine.start()
            tokenizer, eos_token_ids = await loading
        except ModelError as error:
            raise StartupError(str(error)) from error
        finally:
            loading.cancel()
        names = WorkerNames(self._worker_id, self._settings.queue, info.fingerprint)
        self._jobs.names = names
        served = ServedModel(
            model_names=frozenset({self._settings.queue, served_name(self._settings.model)}),
            tokenizer=tokenizer,
            info=info,
            eos_token_ids=eos_token_ids,
            names=names,
        )
        intake = Intake(
            self._links,
            self._table,
            served,
            add_to_engine=self._engine.add,
            on_closed=self._jobs.on_closed,
            max_wait_s=self._settings.lease_ms / 6000,
        )
        return info, intake

    def _start_background(self) -> list["asyncio.Task[None]"]:
        parts: dict[str, Coroutine[Any, Any, None]] = {
            "engine": self._engine.follow(),
            "replies": self._links.replies.run(),
            "leases": self._links.leases.run(lambda: not self._is_hung()),
            "settling": self._jobs.settle_closed(),
            "registry": self._links.registry.run(self._beat),
            "control": self._watch.follow_control(),
            "watch": self._watch.watch_jobs(),
        }
        return [self._spawn(name, part) for name, part in parts.items()]

    def _spawn(self, name: str, part: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run a part; if it fails, the whole worker stops and says so."""
        task = asyncio.create_task(part, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("worker_part_failed", part=task.get_name(), exc_info=error)
        self._failure = self._failure or error
        self.stop()
        self._hurry.set()

    # Taking jobs.

    async def _take_jobs(self, intake: Intake) -> None:
        """Read entries while there is room, each handled by a task of its own, until the worker is told to stop."""
        backoff = Backoff(self._settings.lease_ms / 6000)
        while not self._stop.is_set():
            try:
                room = self._settings.max_num_seqs - len(self._links.leases)
                if self._watch.is_paused or room <= 0:
                    entries = await self._without_room()
                else:
                    # Given up only where Redis doesn't answer: what comes is held, and has to be handled.
                    taking = self._links.source.take(room)
                    entries = await unless_stopped(taking, self._stop, TAKE_S) or []
                backoff.reset()
            except StreamsError as error:
                tell(log, "queue_unread", error)
                await unless_stopped(backoff.wait(), self._stop, 0)
                continue
            for entry in entries:
                self._spawn(f"{ACCEPT}{entry.lane}/{entry.entry_id}", intake.accept(entry))
            self._metrics.set_jobs_held(len(self._links.leases))

    async def _without_room(self) -> list[Entry]:
        """Wait for room; once a second, take what needs none: jobs that are overdue or called off."""
        self._room.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NO_ROOM_S):
                await self._room.wait()
            return []
        return await self._links.oldest.look()

    # What others see.

    def _beat(self) -> dict[str, str | int | float]:
        report = self._engine.last_report
        stats = None if report is None else report.stats
        used = 0 if stats is None else stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks
        return {
            "model": self._settings.queue,
            "version": self._version,
            "slots": self._settings.max_num_seqs,
            "held": len(self._links.leases),
            "running": 0 if stats is None else stats.num_running,
            "waiting": 0 if stats is None else stats.num_waiting,
            "kv_use": 0.0 if stats is None else round(used / stats.num_blocks, 4),
            "draining": int(self._stop.is_set()),
            "started": self._started_ms,
        }

    def _is_hung(self) -> bool:
        """Whether the engine has work and has not finished a step for longer than the watchdog allows."""
        return self._table.num_in_engine > 0 and self._engine.seconds_since_step() > self._settings.watchdog_s

    def _start_status_server(self) -> StatusServer | None:
        settings = self._settings
        if settings.metrics_port is None:
            return None
        return StatusServer(
            settings.metrics_host, settings.metrics_port, self._metrics.registry, self._alive, self._ready
        )

    def _alive(self) -> Health:
        if self._is_hung():
            return Health(False, f"no step for {self._engine.seconds_since_step():.0f} s while jobs run")
        return Health(True)

    def _ready(self) -> Health:
        if self._stop.is_set():
            return Health(False, "draining")
        if (trouble := self._links.health.trouble) is not None:
            return Health(False, f"waiting for Redis: {trouble}")
        if not self._engine.is_up:
            return Health(False, "the engine is starting")
        if not self._links.is_connected:
            return Health(False, "no connection to Redis")
        return self._alive()

    # Shutdown.

    async def _shut_down(self, background: list["asyncio.Task[None]"]) -> None:
        """Let jobs finish, then hand over what is left; leases and replies are served until the last of them."""
        grace_s = self._settings.shutdown_grace_s
        log.info("worker_stopping", num_jobs=len(self._links.leases), grace_s=grace_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._until_empty(self._hurry)
        await self._while_redis_answers(self._hand_over_all())
        await self._while_redis_answers(self._links.registry.leave())
        log.info("worker_stopped", num_jobs_left=len(self._links.leases))
        for task in background:
            task.cancel()

    async def _hand_over_all(self) -> None:
        await asyncio.gather(*(task for task in self._tasks if task.get_name().startswith(ACCEPT)))
        for job in self._table:
            await self._hand_over(job)
        await self._until_empty(asyncio.Event())

    async def _while_redis_answers(self, work: Coroutine[Any, Any, None]) -> None:
        """Does `work` within HAND_OVER_S. Without Redis it is soon given up: leases run out by themselves."""
        health = self._links.health
        with contextlib.suppress(StreamsError):
            await while_worthwhile(work, lambda: health.is_cut_off, patience_s=CUT_OFF_S, at_most_s=HAND_OVER_S)

    async def _hand_over(self, job: Job) -> None:
        """Give a job to a peer; where that fails, its lease runs out, and the others are handed over all the same."""
        if job.is_over:
            return
        try:
            await self._jobs.hand_over(job)
        except ServerError as error:
            log.error("hand_over_failed", request_id=job.envelope.id, error=str(error))
            self._links.leases.release(job.entry.key)

    async def _until_empty(self, enough: asyncio.Event) -> None:
        """Wait until no job is held any more, or until `enough` is set."""
        waiting = asyncio.create_task(enough.wait())
        try:
            while len(self._links.leases) and not enough.is_set():
                self._room.clear()
                room = asyncio.create_task(self._room.wait())
                await asyncio.wait({room, waiting}, return_when=asyncio.FIRST_COMPLETED)
                room.cancel()
        finally:
            waiting.cancel()

    async def _close(self) -> None:
        # A library's task may swallow a cancellation (asyncio.wait_for does on Python 3.11): ask again until all ended.
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(tuple(self._tasks), timeout=CANCEL_AGAIN_S)
        await self._engine.close()
        await self._links.close()


def engine_config(settings: Settings) -> EngineConfig:
    """What the settings say of the engine."""
    return EngineConfig(
        model_path=settings.model,
        cache_dir=str(settings.cache_dir),
        device=settings.device,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        block_size=settings.block_size,
        num_kv_blocks=settings.num_kv_blocks,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        enable_prefix_caching=settings.enable_prefix_caching,
        swap_space_gib=settings.swap_space_gib,
        num_swap_blocks=settings.num_swap_blocks,
        preemption_mode=settings.preemption_mode,
        write_behind_mib=settings.write_behind_mib,
        swap_step_mib=settings.swap_step_mib,
        deterministic=settings.deterministic,
        scheduling_policy=settings.scheduling_policy,
        scheduler_delay_factor=settings.scheduler_delay_factor,
        target_itl_ms=settings.target_itl_ms,
        num_threads=settings.num_threads,
        check_invariants=settings.check_invariants,
    )


def load_text_side(path: Path) -> tuple[Tokenizer, frozenset[int]]:
    """Tokenizer and end-of-sequence ids of a checkpoint. Raises ModelError."""
    tokenizer = Tokenizer.from_checkpoint(path)
    return tokenizer, frozenset(load_config(path).eos_token_ids) | frozenset(tokenizer.eos_token_ids)


def safe_name(hostname: str) -> str:
    """A host's name, cut and made to fit a consumer's name."""
    return "".join(char if char.isascii() and (char.isalnum() or char in "_.-") else "-" for char in hostname[:32])


@contextlib.contextmanager
def signals_call(stop: Callable[[], None]) -> Iterator[None]:
    """SIGTERM, SIGINT and SIGHUP call `stop` inside the block; what handled them before does so again after it.

    SIGHUP stays ignored where it was, under nohup for instance. Outside the main thread nothing is changed.
    """
    loop = asyncio.get_running_loop()
    former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    if former[signal.SIGHUP] is signal.SIG_IGN:
        del former[signal.SIGHUP]
    handled = []
    for number in former:
        with contextlib.suppress(ValueError, RuntimeError):
            loop.add_signal_handler(number, stop)
            handled.append(number)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
            signal.signal(number, former[number])
