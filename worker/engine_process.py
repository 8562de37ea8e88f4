"""The engine process: takes commands from a socket, computes, sends back what each step brought. Nothing else.

    python -m worker.engine_process FD CONFIG_JSON

FD is one end of a socket pair. When the other end closes, however the parent died, the reading thread ends this
process at once: no engine outlives its service.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

import msgpack

from scheduler.errors import SchedulerError
from scheduler.output import FinishReason, SequenceOutput
from worker.engine import Engine, EngineRequest
from worker.engine_config import EngineConfig, EngineInfo
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
    pack_event,
    unpack_command,
)
from worker.errors import StartupError
from worker.memory import headroom
from worker.openmp import limit_spinning
from worker.startup_memory import is_memory_failure, left, missing_for_torch

EXIT_REFUSED = 2
READ_BYTES = 1 << 16
IMPORTING = "importing torch"
Builder = Callable[..., tuple[Engine, EngineInfo]]


class EngineLoop:
    """Runs an engine on commands from a queue, in whatever thread calls `run`; shared by both engine modes."""

    def __init__(self, engine: Engine, commands: "SimpleQueue[Command]", emit: Callable[[Event], None]) -> None:
        self._engine = engine
        self._commands = commands
        self._emit = emit
        self._told: frozenset[str] = frozenset()
        engine.on_begin = self._tell

    def run(self) -> None:
        """Serve until a Close command. Blocks on the queue while there is nothing to compute: no polling."""
        while True:
            outputs: list[SequenceOutput] = []
            commands = self._take_commands()
            if any(isinstance(command, Close) for command in commands):
                return
            added_ids = tuple(command.request.seq_id for command in commands if isinstance(command, Add))
            if added_ids:
                self._tell((*self._engine.in_flight_ids, *added_ids))
            for command in commands:
                self._apply(command, outputs)
            if self._engine.has_work:
                outputs.extend(self._engine.step())
            self._emit(StepReport(tuple(outputs), self._engine.stats(), self._engine.times))

    def _take_commands(self) -> list[Command]:
        """All that wait; without work, at least one."""
        commands: list[Command] = []
        with contextlib.suppress(Empty):
            commands.append(self._commands.get(block=not self._engine.has_work))
            while True:
                commands.append(self._commands.get_nowait())
        return commands

    def _tell(self, seq_ids: tuple[str, ...]) -> None:
        """Say whom the engine touches next, where they are others than before: what kills it is one of them."""
        now = frozenset(seq_ids)
        if now and now != self._told:
            self._told = now
            self._emit(Begins(seq_ids))

    def _apply(self, command: Command, outputs: list[SequenceOutput]) -> None:
        if isinstance(command, Abort):
            self._engine.abort(command.seq_id)
        elif isinstance(command, Add):
            refusal = self._try_add(command.request)
            if refusal is not None:
                outputs.append(refusal)

    def _try_add(self, request: EngineRequest) -> SequenceOutput | None:
        try:
            self._engine.add(request)
        except SchedulerError as error:
            return SequenceOutput(request.seq_id, (), FinishReason.ERROR, error=str(error))
        return None


def read_commands(connection: socket.socket, commands: "SimpleQueue[Command]") -> None:
    """Feed the queue from the socket; the end of the stream is the end of this process."""
    unpacker = msgpack.Unpacker()
    with contextlib.suppress(OSError):
        while data := connection.recv(READ_BYTES):
            unpacker.feed(data)
            for message in unpacker:
                commands.put(unpack_command(message))
    os._exit(0)


def serve(connection: socket.socket, config: EngineConfig) -> int:
    """Build the engine and run it; answers the exit code."""

    def emit(event: Event) -> None:
        try:
            connection.sendall(pack_event(event))
        except ConnectionError:  # the service is gone: nobody is left to compute for, or to tell of it
            os._exit(0)

    commands: SimpleQueue[Command] = SimpleQueue()
    threading.Thread(target=read_commands, args=(connection, commands), name="commands", daemon=True).start()
    logging.getLogger().addHandler(NoticeHandler(emit))
    if (lack := missing_for_torch()) is not None:
        emit(Refused(lack))
        return EXIT_REFUSED
    emit(Progress(IMPORTING, 0, 0))
    try:
        build_engine = import_builder()
        emit(Progress(IMPORTING, 1, 1))
        engine, info = build_engine(config, progress=ProgressEvents(emit))
    except StartupError as error:
        emit(Refused(str(error)))
        return EXIT_REFUSED
    emit(Ready(info))
    try:
        EngineLoop(engine, commands, emit).run()
    except Exception as error:
        emit(Died(f"{type(error).__name__}: {error}"))
        raise
    return 0


def import_builder() -> Builder:
    """Import torch: two seconds. Raises StartupError where it, or a kernel that is switched, can't be loaded."""
    try:
        from worker.engine_builder import build_engine
    except Exception as error:
        if is_memory_failure(error):
            raise StartupError(
                f"there is too little memory to load torch ({error}): {left(headroom())}; free some, or raise the limit"
            ) from error
        if os.environ.get("PAGEMILL_DEBUG", "") not in ("", "0"):
            raise
        raise StartupError(f"the engine can't be loaded: {error}") from error
    return build_engine


class NoticeHandler(logging.Handler):
    """Passes what is logged in this process on to the service, whose log it belongs into."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        super().__init__(logging.WARNING)
        self._emit = emit

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        self._emit(Notice(" ".join(record.getMessage().split())))


class ProgressEvents:
    """Passes progress on, but at most twenty times a second for one stage."""

    MIN_INTERVAL_S = 0.05

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self._last = ("", 0.0)

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        last_stage, last_time = self._last
        if stage == last_stage and done < total and now - last_time < self.MIN_INTERVAL_S:
            return
        self._last = (stage, now)
        self._emit(Progress(stage, done, total))


def main() -> int:
    """Entry point of the process."""
    # Ctrl-C goes to the whole foreground group: the service decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    limit_spinning()
    connection = socket.socket(fileno=int(sys.argv[1]))
    return serve(connection, EngineConfig(**json.loads(sys.argv[2])))


if __name__ == "__main__":
    sys.exit(main())
