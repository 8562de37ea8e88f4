"""The client for asyncio: across lost connections and workers, to the end of a reply."""

import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Self

from worker.client_errors import BadJobError, IdConflictError, ReplyLostError
from worker.client_fields import Prompt, body_of, checked_event_id, checked_id, encoded
from worker.protocol_envelope import digest_of, id_of_key
from worker.reply_events import START, Reply, ReplyCursor, ReplyEvent, parse_event
from worker.streams.connection import Backoff, Link
from worker.streams.errors import ConnectionLostError, ServerError
from worker.streams.keys import LANES, QueueKeys

# Milliseconds that a read waits for news; well below the connection's own time limit for an answer.
BLOCK_MS = 4000
# Entries of one read: enough to catch up fast, small enough to show progress.
READ_COUNT = 256
# Seconds that a cancel mark is kept: no shorter than a job may wait in the queue.
CANCEL_TTL_S = 86_400
# Seconds after which a job whose reply had begun, and of which nothing is left, won't come back: a server that forgot
# both may still have its entry, which a worker takes after a lease.
GONE_S = 60.0
# Jobs of a client that it remembers, the latest ones.
MAX_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class _Sent:
    """What is known of a job that this client sent.

    digest: of a job whose id somebody else may use too. deadline: when its own `ttl_ms` is over, by the local
    monotonic clock.
    """

    digest: str | None
    deadline: float | None


class AsyncClient:
    """Jobs and replies of one queue, for asyncio. Commands share a connection; each `stream` has one of its own."""

    def __init__(self, url: str, queue: str, *, retry_s: float = 30.0) -> None:
        """`retry_s`: seconds without a connection, or of a server that is full or loading, after which a call gives up
        with ConnectionLostError or ServerError.

        Raises StartupError where the URL or the queue's name can't be used.
        """
        self.keys = QueueKeys(queue)
        self._url = url
        self._retry_s = retry_s
        self._link = Link(url, "client", queue)
        self._sent: dict[str, _Sent] = {}

    async def submit(
        self, prompt: Prompt | None, *, job_id: str | None = None, lane: str = "normal", **fields: Any
    ) -> str:
        """Put a job on the queue and answer its id. Text is completed as it stands; a list of maps is chat messages,
        a list of numbers is token ids. None: `fields` have `prompt_ref` or `payload`.

        `fields` are the job's further fields (`max_tokens`, `temperature`, `n`, `ttl_ms`, …); one that is None is left
        out. Where the answer is lost, the job is sent again under the same id, so it runs once. With an
        `idempotency_key` and no `job_id` the id follows from it. Raises BadJobError for an id, lane or text that can't
        be used, IdConflictError where the id is known for another job. (If that one still waits, `stream` tells.)
        """
        if "id" in fields:
            raise BadJobError("an id of one's own is given as job_id")
        if lane not in LANES:
            raise BadJobError(f"there is no lane {lane!r}: use {', '.join(LANES)}")
        said = {"id": None if job_id is None else checked_id(job_id), **body_of(prompt), **fields}
        job = {name.encode(): encoded(name, value) for name, value in said.items() if value is not None}
        is_own_name = job_id is None and not job.get(b"idempotency_key")
        if is_own_name:
            job_id = secrets.token_hex(12)
            job = {b"id": job_id.encode(), **job}
        elif job_id is None:
            job_id = id_of_key(job.get(b"tenant", b""), job[b"idempotency_key"])
        digest = None if is_own_name else digest_of(job)
        if digest is not None:
            await self._check_own(job_id, digest)
        await self._call("XADD", self.keys.jobs(lane), "*", *(part for pair in job.items() for part in pair))
        ttl_ms = job.get(b"ttl_ms", b"")
        self._remember(job_id, _Sent(digest, time.monotonic() + int(ttl_ms) / 1000 if ttl_ms.isdigit() else None))
        return job_id

    async def status(self, job_id: str) -> str | None:
        """`queued`, `running`, or how the job ended: `done` or an error's code.

        None where no worker has taken such a job yet, or its record has expired. Raises BadJobError for an id that no
        job can have.
        """
        status = (await self._record(checked_id(job_id))).get(b"status")
        return None if status is None else status.decode("utf-8", "replace")

    async def cancel(self, job_id: str, reason: str = "cancelled by the client") -> None:
        """Ask for a job to be stopped, wherever it is. The mark is durable; the hint only makes it fast.

        Raises BadJobError for an id that no job can have.
        """
        await self._call("SET", self.keys.cancel(checked_id(job_id)), reason, "EX", CANCEL_TTL_S)
        await self._call("XADD", self.keys.control, "MAXLEN", "~", 1000, "*", "op", "cancel", "id", job_id)

    async def result(self, job_id: str, *, held: Reply | None = None, limit_s: float | None = None) -> Reply:
        """The whole reply once it has ended, as it should or with an error: `raise_for_error` tells them apart.

        `held`: what was read of it before, here or in another process; it is added to. Raises like `stream`.
        """
        reply = Reply() if held is None else held
        if not reply.is_over:
            events = self.stream(job_id, after=reply.last_id, num_held=reply.num_tokens, limit_s=limit_s)
            async for event in events:
                reply.add(event)
        return reply

    async def stream(
        self, job_id: str, *, after: str = START, num_held: int | None = None, limit_s: float | None = None
    ) -> AsyncGenerator[ReplyEvent, None]:
        """The events of a reply from its start to its terminal event, across lost connections and workers.

        On a `reset` discard all text so far. `after` goes on behind that event, which an earlier reader saw last, maybe
        in another process; `num_held` are the tokens that it held, all choices together, where it knows. What is held
        and doesn't fit the reply any more begins with a `reset`. `limit_s`: the job's own time limit, by default the
        `ttl_ms` that this client sent it with; once it is past, the job's record is looked at instead of waiting on.
        Raises ReplyLostError where nothing is left to wait for, ReplyBrokenError where the reply makes no sense,
        ConnectionLostError or ServerError after an outage of `retry_s`, BadJobError for an id that can't be one, and
        IdConflictError where this client sent a job of this id and the reply turns out to be another's.
        """
        key, cursor = self.keys.reply(checked_id(job_id)), ReplyCursor(checked_event_id(after), num_held)
        sent = self._sent.get(job_id, _Sent(None, None))
        digest = sent.digest
        deadline = sent.deadline if limit_s is None else time.monotonic() + limit_s
        link, patience = Link(self._url, "client-reply", self.keys.queue), _Patience(self._retry_s)
        # Since when there is neither a reply nor a record of a job whose reply has begun.
        gone_since: float | None = None
        # Where the connection is new, so may be the server's memory: it may have forgotten what was read.
        is_in_doubt = has_begun = cursor.has_begun
        try:
            while not cursor.is_done:
                try:
                    if is_in_doubt:
                        if not await self._is_still_there(link, key, cursor):
                            yield cursor.restart()
                        is_in_doubt = False
                        continue
                    words = ("BLOCK", _block_ms(deadline), "COUNT", READ_COUNT, "STREAMS", key, cursor.last_id)
                    answer = await link.call("XREAD", *words)
                    patience.reset()
                    if answer is None:
                        is_there = await self._check_alive(link, job_id, deadline)
                        if is_there or not has_begun:
                            gone_since = None
                        elif gone_since is None:
                            gone_since = time.monotonic()
                        elif time.monotonic() - gone_since > GONE_S:
                            raise _unknown(job_id)
                except (ConnectionLostError, ServerError) as error:
                    is_in_doubt = True
                    await patience.wait(error, link)
                    continue
                if answer and digest is not None:
                    await self._check_own(job_id, digest)
                    digest = None
                for entry in answer[0][1] if answer else ():
                    event = parse_event(*entry)
                    has_begun = True
                    accepted = cursor.accept(event)
                    yield accepted
                    if accepted is not event or event.is_terminal:
                        break
        finally:
            await link.close()

    async def aclose(self) -> None:
        """Close the connection."""
        await self._link.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        await self.aclose()

    async def _record(self, job_id: str) -> dict[bytes, bytes]:
        """What `state:ID` says; nothing where it says something else than a record."""
        try:
            flat = await self._call("HGETALL", self.keys.state(job_id))
        except ServerError as error:
            if not error.is_wrong_type:
                raise
            return {}
        return dict(zip(flat[::2], flat[1::2], strict=True))

    async def _check_own(self, job_id: str, digest: str) -> None:
        """Raise IdConflictError where the id is known for a job that says something else."""
        known = (await self._record(job_id)).get(b"digest")
        if known is not None and known != digest.encode():
            raise IdConflictError(f"the id {job_id} belongs to another job: send this one with another id, or none")

    def _remember(self, job_id: str, sent: _Sent) -> None:
        if sent != _Sent(None, None):
            self._sent[job_id] = sent
        while len(self._sent) > MAX_REMEMBERED:
            self._sent.pop(next(iter(self._sent)))

    async def _call(self, *words: str | bytes | int) -> Any:
        """One command that may be sent twice, again and again until it was answered or `retry_s` is over."""
        patience = _Patience(self._retry_s)
        while True:
            try:
                return await self._link.call(*words)
            except (ConnectionLostError, ServerError) as error:
                await patience.wait(error, self._link)

    async def _is_still_there(self, link: Link, key: str, cursor: ReplyCursor) -> bool:
        """Whether the server has the last event that was read, which a failover may have lost, and it fits."""
        if not cursor.has_begun:
            return True
        found = await link.call("XRANGE", key, cursor.last_id, cursor.last_id, "COUNT", 1)
        return bool(found) and cursor.stands_at(parse_event(*found[0]))

    async def _check_alive(self, link: Link, job_id: str, deadline: float | None) -> bool:
        """Whether the job has a record or a reply. Raises ReplyLostError if that, or its absence, leaves no hope."""
        state = await self._record(job_id)
        status = state.get(b"status", b"").decode("utf-8", "replace")
        # A job without a record may still wait in its lane, but not for longer than it may.
        is_hopeful = status in ("running", "queued") if state else deadline is None or time.monotonic() <= deadline
        has_reply = bool(await link.call("XLEN", self.keys.reply(job_id)))
        if is_hopeful or has_reply:
            return bool(state) or has_reply
        if not state:
            raise _unknown(job_id)
        raise ReplyLostError(
            f"job {job_id} ended ({status}), and its reply is gone: it expired or was deleted; send the job again"
        )


def _unknown(job_id: str) -> ReplyLostError:
    return ReplyLostError(f"job {job_id} is unknown: it was never taken, or its reply has expired; send it again")


class _Patience:
    """Waits out a lost connection or a server that can't answer now, up to `retry_s` seconds."""

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self._backoff = Backoff(1.0)
        self._since: float | None = None

    async def wait(self, error: ConnectionLostError | ServerError, link: Link) -> None:
        """Sleep before the next try. Raises `error` where no further try makes sense."""
        now = time.monotonic()
        self._since = self._since or now
        if not error.is_retryable or now - self._since >= self._retry_s:
            raise error
        await link.reset()
        await self._backoff.wait()

    def reset(self) -> None:
        """A try succeeded."""
        self._since = None
        self._backoff.reset()


def _block_ms(deadline: float | None) -> int:
    """How long the next read may wait: no further than a deadline that is near."""
    if deadline is None:
        return BLOCK_MS
    left_ms = int((deadline - time.monotonic()) * 1000) + 1
    return left_ms if 0 < left_ms < BLOCK_MS else BLOCK_MS
