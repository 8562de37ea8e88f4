"""The service's side of the engine: the same interface over a process of its own, or over a thread in this one."""

import asyncio
import contextlib
import dataclasses
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from queue import SimpleQueue
from typing import Protocol

import msgpack
import structlog

from worker.engine import EngineRequest
from worker.engine_config import EngineConfig, EngineInfo
from worker.engine_end import EngineEnd, describe_end, num_oom_kills
from worker.engine_messages import (
    Abort,
    Add,
    Begins,
    Close,
    Command,
    Died,
    Event,
    Notice,
    Progress,
    Ready,
    Refused,
    StepReport,
    pack_command,
    unpack_event,
)
from worker.engine_pipe import EnginePipe
from worker.errors import PagemillError, StartupError

log = structlog.get_logger(__name__)

ProgressCallback = Callable[[str, int, int], None]
# What runs an engine process, without its two arguments.
ENGINE_COMMAND = (sys.executable, "-P", "-m", "worker.engine_process")
CLOSE_GRACE_S = 5.0


class EngineDiedError(PagemillError):
    """The engine ended by itself: killed, out of memory, or an error of its own.

    `seq_ids` are the sequences that it last said it takes in or computes.
    """

    def __init__(self, message: str, end: EngineEnd = EngineEnd.ERROR, seq_ids: frozenset[str] = frozenset()) -> None:
        super().__init__(message)
        self.end = end
        self.seq_ids = seq_ids


class EngineClient(Protocol):
    """An engine that computes beside the event loop. One at a time calls `next_report`."""

    async def start(self) -> EngineInfo:
        """Build the engine. Raises StartupError with one line that says what to do; EngineDiedError if it is killed."""
        ...

    def add(self, request: EngineRequest) -> None:
        """Queue a sequence; a refusal comes back as an output with an error."""
        ...

    def abort(self, seq_id: str) -> None:
        """Stop a sequence before the next step."""
        ...

    async def next_report(self) -> StepReport:
        """Wait for the next step. Raises EngineDiedError."""
        ...

    def kill(self) -> bool:
        """End the engine at once, whatever it does: whoever waits for it hears of its death.

        False: it is a thread, which can't be ended, and no successor may be started beside it. Its death is told of all
        the same.
        """
        ...

    async def close(self) -> None:
        """End the engine and wait until it is gone, as far as it can be ended."""
        ...


class ProcessEngine:
    """An engine in a process of its own. Its memory, its crashes and its interpreter are not the service's.

    `command` starts it: a program that takes a socket and the config as two more arguments and serves an engine there,
    as `worker.engine_process` does.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: ProgressCallback | None = None,
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        self._config = config
        self._progress = progress
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: EnginePipe | None = None
        self._unpacker = msgpack.Unpacker()
        self._computing: frozenset[str] = frozenset()
        self._num_oom_kills = 0

    @property
    def pid(self) -> int | None:
        """Process id, once started."""
        return None if self._process is None else self._process.pid

    async def start(self) -> EngineInfo:
        """Start the process and wait until its engine stands. Raises StartupError; EngineDiedError if it is killed."""
        ours, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), json.dumps(dataclasses.asdict(self._config))]
        self._num_oom_kills = num_oom_kills()
        self._process = await asyncio.to_thread(
            subprocess.Popen, [*self._command, *arguments], pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL
        )
        theirs.close()
        self._pipe = await EnginePipe.connect(ours)
        try:
            return await _until_ready(self._next_event, self._progress)
        except BaseException:
            await self.close()
            raise

    def add(self, request: EngineRequest) -> None:
        """Queue a sequence; a refusal comes back as an output with an error."""
        self._send(Add(request))

    def abort(self, seq_id: str) -> None:
        """Stop a sequence before the next step."""
        self._send(Abort(seq_id))

    def _send(self, command: Command) -> None:
        # A dead engine is told by `next_report`; what was sent to it is queued again for its successor.
        if self._pipe is not None:
            self._pipe.write(pack_command(command))

    async def next_report(self) -> StepReport:
        """Wait for the next step. Raises EngineDiedError."""
        while True:
            event = await self._next_event()
            if isinstance(event, StepReport):
                return event
            if isinstance(event, Begins):
                self._computing = frozenset(event.seq_ids)
            if isinstance(event, Notice):
                log.warning("engine_notice", message=event.message)
            if isinstance(event, Died):
                raise EngineDiedError(event.message, seq_ids=self._computing)

    async def _next_event(self) -> Event:
        if self._pipe is None:
            raise EngineDiedError("the engine process isn't running", EngineEnd.CLOSED)
        while True:
            for message in self._unpacker:
                return unpack_event(message)
            data = await self._pipe.read()
            if not data:
                raise await self._death()
            self._unpacker.feed(data)

    async def _death(self) -> EngineDiedError:
        code = await self._wait(CLOSE_GRACE_S)
        end, words = describe_end(code, has_oom_kill=num_oom_kills() > self._num_oom_kills)
        return EngineDiedError(words, end, self._computing)

    def kill(self) -> bool:
        """SIGKILL. Its pipe is closed too, since a process that the kernel holds does not end by it."""
        if self._process is None or self._pipe is None:
            return False
        self._process.kill()
        self._pipe.abort()
        return True

    async def close(self) -> None:
        """End the process: ask, then wait, then kill."""
        if self._process is None:
            return
        self._send(Close())
        if self._pipe is not None:
            await self._pipe.close(CLOSE_GRACE_S)  # its end ends the process even in the middle of a step
        if await self._wait(CLOSE_GRACE_S) is None:
            self._process.kill()
            await self._wait(CLOSE_GRACE_S)
        self._process = self._pipe = None

    async def _wait(self, timeout_s: float) -> int | None:
        process = self._process
        if process is None:
            return None
        try:
            return await asyncio.to_thread(process.wait, timeout_s)
        except subprocess.TimeoutExpired:
            return None


class InProcessEngine:
    """The same engine in a thread of this process: for tests, debugging, and where one process is wanted."""

    def __init__(self, config: EngineConfig, progress: ProgressCallback | None = None) -> None:
        self._config = config
        self._progress = progress
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._computing: frozenset[str] = frozenset()
        self._thread: threading.Thread | None = None

    async def start(self) -> EngineInfo:
        """Build the engine in its thread. Raises StartupError."""
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(loop,), name="engine", daemon=True)
        self._thread.start()
        return await _until_ready(self._events.get, self._progress)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        from worker.engine_process import EngineLoop, import_builder

        def emit(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody listens any more
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        try:
            engine, info = import_builder()(self._config, progress=lambda *at: emit(Progress(*at)))
            emit(Ready(info))
            EngineLoop(engine, self._commands, emit).run()
        except StartupError as error:
            emit(Refused(str(error)))
        except Exception as error:
            log.exception("engine_died")
            emit(Died(f"{type(error).__name__}: {error}"))

    def add(self, request: EngineRequest) -> None:
        """Queue a sequence; a refusal comes back as an output with an error."""
        self._commands.put(Add(request))

    def abort(self, seq_id: str) -> None:
        """Stop a sequence before the next step."""
        self._commands.put(Abort(seq_id))

    async def next_report(self) -> StepReport:
        """Wait for the next step. Raises EngineDiedError."""
        while True:
            event = await self._events.get()
            if isinstance(event, StepReport):
                return event
            if isinstance(event, Begins):
                self._computing = frozenset(event.seq_ids)
            if isinstance(event, Died):
                raise EngineDiedError(event.message, seq_ids=self._computing)

    def kill(self) -> bool:
        """A thread can't be ended; what it still brings is not heard."""
        self._events.put_nowait(Died("the engine hangs"))
        return False

    async def close(self) -> None:
        """Stop the thread after the step that runs. One that hangs is left behind: it ends with the process."""
        if self._thread is not None:
            self._commands.put(Close())
            await asyncio.to_thread(self._thread.join, CLOSE_GRACE_S)
            self._thread = None


async def _until_ready(next_event: Callable[[], Awaitable[Event]], progress: ProgressCallback | None) -> EngineInfo:
    while True:
        match await next_event():
            case Ready(info):
                return info
            case Progress(stage, done, total):
                if progress is not None:
                    progress(stage, done, total)
            case Notice(message):
                log.warning("engine_notice", message=message)
            case Refused(message) | Died(message):
                raise StartupError(message)
