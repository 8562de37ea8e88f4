"""Writing replies: opening them, and one pipeline of events for many jobs at a time."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from worker.protocol_envelope import JobEnvelope
from worker.streams.clock import ServerClock
from worker.streams.connection import Backoff, Command, Link
from worker.streams.errors import ConnectionLostError, ServerError, StreamsError
from worker.streams.health import tell
from worker.streams.keys import QueueKeys
from worker.streams.recovery import Recovered, UnreadableReplyError, recover
from worker.streams.reply_writer import ReplyStatus, ReplyWriter
from worker.streams.scripts import OpenResult, OpenStatus, Scripts

log = structlog.get_logger(__name__)

RUN_TTL_MS = 24 * 3600 * 1000
# No connection's number: the reply's last id is not known, though no connection was lost.
IN_DOUBT = 0


@dataclass(slots=True)
class _Registered:
    """What the batcher knows of a live writer. `generation`: the connection over which its last id was last known.

    `is_reopening`: it may be open anew, but the answer, or what is stored, has not come.
    """

    envelope: JobEnvelope
    generation: int
    expiry_due_ms: int
    is_reopening: bool = False


class Replies:
    """Owns the live reply writers and the link over which their events go, one pipeline at a time.

    Tokens that come while a pipeline is under way gather in the writers, so a slow Redis makes longer events, never a
    second one in flight. `scripts` and `reader` use another link.
    """

    def __init__(
        self,
        link: Link,
        scripts: Scripts,
        reader: Link,
        keys: QueueKeys,
        clock: ServerClock,
        *,
        model: str,
        run_ttl_ms: int = RUN_TTL_MS,
        backoff_cap_s: float = 1.0,
    ) -> None:
        self._link = link
        self._scripts = scripts
        self._reader = reader
        self._keys = keys
        self._clock = clock
        self._model = model
        self._run_ttl_ms = run_ttl_ms
        self._backoff = Backoff(backoff_cap_s)
        self._live: dict[ReplyWriter, _Registered] = {}
        self._dirty: dict[ReplyWriter, None] = {}
        self._wakeup = asyncio.Event()
        self._progress = asyncio.Event()

    async def open(
        self, envelope: JobEnvelope, on_closed: Callable[[ReplyWriter], None] = lambda _: None
    ) -> tuple[OpenResult, ReplyWriter | None]:
        """Opens the reply of a job that this worker holds; a writer comes only with OPENED.

        `on_closed` is called once, when the writer's status leaves LIVE. Raises StreamsError; after a lost answer it
        may be called again: the attempt is then one higher.
        """
        generation = await self._link.connect()
        result = await self._run_open(envelope)
        if result.status is not OpenStatus.OPENED:
            return result, None
        writer = ReplyWriter(envelope.id, result.attempt, self._mark_dirty, on_closed)
        expiry_due_ms = self._clock.now_ms() + self._run_ttl_ms // 4
        self._live[writer] = _Registered(envelope, generation, expiry_due_ms)
        return result, writer

    async def recover(self, writer: ReplyWriter) -> Recovered:
        """What earlier attempts stored, which `writer` then continues. Call it where `covered` is above 0.

        A server that doesn't know of this attempt is another than the one that opened it, and lacks writes: there the
        reply is opened anew first. A writer that has no right to that any more is closed. Raises StreamsError.
        """
        while True:
            recovered = await recover(self._reader, self._keys.reply(writer.job_id))
            if not _lacks(recovered, writer.attempt) or writer not in self._live:
                writer.resume(recovered)
                return recovered
            result = await self._run_open(self._live[writer].envelope, own_attempt=writer.attempt)
            if result.status is OpenStatus.OPENED:
                writer.attempt = max(writer.attempt, result.attempt)
            elif writer in self._live:
                self._close(writer, ReplyStatus.FENCED)

    def doubt(self, writer: ReplyWriter) -> None:
        """Somebody else may have written: before the next write, and at once, the reply's last id is compared."""
        if writer in self._live:
            self._live[writer].generation = IN_DOUBT
            self._mark_dirty(writer)

    def discard(self, writer: ReplyWriter) -> None:
        """Forgets a writer whose job was handed over or lost; nothing more is written."""
        self._live.pop(writer, None)
        self._dirty.pop(writer, None)
        self._tell_progress()

    async def abandon(self, writer: ReplyWriter) -> None:
        """The client is gone: takes the reply away that this attempt has begun. Raises StreamsError."""
        await self._reader.call("DEL", self._keys.reply(writer.job_id))
        if writer in self._live:
            self._close(writer, ReplyStatus.ABANDONED)

    async def drained(self, writer: ReplyWriter) -> None:
        """Waits until everything that was given to `writer` is written, or can't be."""
        writer.hurry()
        while writer in self._live and not writer.is_drained:
            await self._progress.wait()

    async def run(self) -> None:
        """Writes until cancelled. Connections that are lost come back after a back-off."""
        while True:
            await self._wait_for_work()
            try:
                is_done = await self.flush()
            except StreamsError as error:
                tell(log, "reply_flush_failed", error, num_waiting=len(self._dirty))
                is_done = False
            if is_done:
                self._backoff.reset()
            else:
                self._wakeup.set()
                await self._backoff.wait()

    async def flush(self) -> bool:
        """One pipeline: the next event of every writer that is due. False: the server couldn't take some; try later.

        Raises StreamsError; events in flight then stay in flight.
        """
        generation = await self._link.connect()
        now_ms = self._clock.now_ms()
        due = [writer for writer in self._dirty if writer.due_ms() <= now_ms]
        await self._compare([writer for writer in due if self._live[writer].generation != generation], generation)
        due = [writer for writer in due if writer in self._live]
        events = [(writer, event) for writer in due if (event := writer.next_event(now_ms)) is not None]
        commands: list[Command] = [event.command(self._keys.reply(writer.job_id)) for writer, event in events]
        expiries = self._expiries([writer for writer, _ in events], now_ms)
        answers = await self._link.batch([*commands, *expiries], generation=generation) if commands else []
        is_done = await self._take_answers([writer for writer, _ in events], answers[: len(events)], generation)
        for writer in due:
            if writer.is_drained:
                self._dirty.pop(writer, None)
        self._tell_progress()
        if self._dirty:
            self._wakeup.set()
        return is_done

    async def _take_answers(self, writers: list[ReplyWriter], answers: list[Any], generation: int) -> bool:
        """Acts on each event's answer. A refused id is our own earlier write or a later attempt: look which."""
        refused: list[ReplyWriter] = []
        is_done = True
        for writer, answer in zip(writers, answers, strict=True):
            if writer not in self._live:  # discarded meanwhile
                continue
            if answer is None:
                self._close(writer, ReplyStatus.ABANDONED)
            elif not isinstance(answer, ServerError):
                self._acknowledge(writer)
            elif answer.is_id_refused:
                refused.append(writer)
            elif answer.is_wrong_type:
                log.error("reply_key_of_wrong_type", key=self._keys.reply(writer.job_id))
                self._close(writer, ReplyStatus.ABANDONED)
            elif answer.is_wrong_server:
                raise ConnectionLostError(f"this server takes no writes: {answer}")
            else:
                tell(log, "reply_write_refused", answer, request_id=writer.job_id)
                is_done = False
        for writer, last_id in zip(refused, await self._last_ids(refused, generation), strict=True):
            if writer.in_flight is not None and last_id == writer.in_flight.entry_id:
                self._acknowledge(writer)
            elif writer in self._live:
                self._close(writer, ReplyStatus.FENCED)
        return is_done

    async def _compare(self, writers: list[ReplyWriter], generation: int) -> None:
        """After a lost connection, before the next write: is the reply's last id what we think it is?"""
        for writer, last_id in zip(writers, await self._last_ids(writers, generation), strict=True):
            if writer not in self._live:  # discarded meanwhile
                continue
            in_doubt = writer.in_flight.entry_id if writer.in_flight is not None else None
            if last_id is not None and last_id == in_doubt:
                self._acknowledge(writer)
            elif last_id is None and self._live[writer].generation == IN_DOUBT:
                self._close(writer, ReplyStatus.ABANDONED)  # no connection was lost, so the client deleted it
            elif last_id != writer.last_id:
                await self._after_lost_writes(writer, last_id)
            if writer in self._live:
                self._live[writer].generation = generation

    async def _after_lost_writes(self, writer: ReplyWriter, last_id: str | None) -> None:
        """A later attempt: fenced. Anything less: the server lost writes; open anew and write what is missing.

        A later attempt may be ours, if we were at that before; then the script knows who has the entry.
        """
        registered = self._live[writer]
        is_later = last_id is not None and int(last_id.partition("-")[0]) > writer.attempt
        if is_later and not registered.is_reopening:
            self._close(writer, ReplyStatus.FENCED)
            return
        registered.is_reopening = True
        result = await self._run_open(registered.envelope, own_attempt=writer.attempt)
        if result.status is not OpenStatus.OPENED:
            # With nothing left to read the job is settled, if that is still ours to do, and nothing is written.
            is_deleted = last_id is None or result.status is OpenStatus.BLOCKED
            self._close(writer, ReplyStatus.ABANDONED if is_deleted else ReplyStatus.FENCED)
            return
        log.warning("reply_reopened", request_id=writer.job_id, attempt=result.attempt, covered=result.covered)
        try:
            stored = await recover(self._reader, self._keys.reply(writer.job_id))
        except UnreadableReplyError as error:
            # It comes back as an entry that nobody holds, and ends with an error.
            log.error("reply_unreadable", request_id=writer.job_id, error=str(error))
            self._close(writer, ReplyStatus.FENCED)
            return
        if _lacks(stored, result.attempt):
            raise ConnectionLostError("this server lost the attempt that was just opened")
        writer.reopen(result.attempt, stored)
        registered.is_reopening = False

    async def _run_open(self, envelope: JobEnvelope, own_attempt: int = 0) -> OpenResult:
        return await self._scripts.open(
            envelope.lane,
            envelope.entry_id,
            envelope.id,
            digest=envelope.digest,
            model=self._model,
            run_ttl_ms=self._run_ttl_ms,
            tenant=envelope.tenant,
            own_attempt=own_attempt,
        )

    async def _last_ids(self, writers: list[ReplyWriter], generation: int) -> list[str | None]:
        if not writers:
            return []
        commands = [("XREVRANGE", self._keys.reply(writer.job_id), "+", "-", "COUNT", 1) for writer in writers]
        answers = await self._link.batch(commands, generation=generation)
        return [None if isinstance(found, ServerError) or not found else found[0][0].decode() for found in answers]

    def _expiries(self, writers: list[ReplyWriter], now_ms: int) -> list[Command]:
        """Renewals of the expiry of replies that run long."""
        commands: list[Command] = []
        for writer in writers:
            registered = self._live[writer]
            if now_ms >= registered.expiry_due_ms:
                registered.expiry_due_ms = now_ms + self._run_ttl_ms // 4
                keys = (self._keys.reply(writer.job_id), self._keys.state(writer.job_id))
                commands.extend(("PEXPIRE", key, self._run_ttl_ms) for key in keys)
        return commands

    def _acknowledge(self, writer: ReplyWriter) -> None:
        writer.acknowledge()
        if writer.status is not ReplyStatus.LIVE:
            self.discard(writer)

    def _close(self, writer: ReplyWriter, status: ReplyStatus) -> None:
        log.warning("reply_closed", request_id=writer.job_id, attempt=writer.attempt, status=status.value)
        self.discard(writer)
        writer.close(status)

    def _tell_progress(self) -> None:
        done, self._progress = self._progress, asyncio.Event()
        done.set()

    def _mark_dirty(self, writer: ReplyWriter) -> None:
        if writer in self._live:
            self._dirty[writer] = None
            self._wakeup.set()

    async def _wait_for_work(self) -> None:
        """Until a writer has something, and until the first of those that gather is due."""
        await self._wakeup.wait()
        self._wakeup.clear()
        if self._dirty:
            wait_ms = min(writer.due_ms() for writer in self._dirty) - self._clock.now_ms()
            if wait_ms > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_ms / 1000):
                        await self._wakeup.wait()


def _lacks(stored: Recovered, attempt: int) -> bool:
    """Whether what was read is of a server that doesn't know of this attempt. (A reply that is gone is its client's
    doing.)"""
    return 0 < stored.last_attempt < attempt
