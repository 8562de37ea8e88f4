"""A small client: put a job on the queue, read its reply, cancel it. Any Redis client can do the same by hand.

client = Client("redis://localhost:6379", "smollm2")
job_id = client.submit("Tell me a joke", max_tokens=64)
for event in client.stream(job_id):
    print(event.text, end="")
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

from worker.errors import PagemillError, StartupError
from worker.protocol_envelope import NAME, digest_of
from worker.reply_events import Reply, ReplyCursor, ReplyEvent, parse_event
from worker.streams.connection import Backoff, Link
from worker.streams.errors import ConnectionLostError, ServerError
from worker.streams.keys import LANES, QueueKeys

# Milliseconds that a read waits for news; well below the connection's own time limit for an answer.
BLOCK_MS = 4000
# Entries of one read: enough to catch up fast, small enough to show progress.
READ_COUNT = 256
# Seconds that a cancel mark is kept: no shorter than a job may wait in the queue.
CANCEL_TTL_S = 86_400
# Jobs under ids of the caller's own whose contents are remembered until their replies are read.
MAX_REMEMBERED = 10_000

Prompt = str | Sequence[Mapping[str, Any]]
Answer = TypeVar("Answer")


class ReplyLostError(PagemillError):
    """There is no reply to wait for: the job is unknown, or its reply has expired or was deleted."""


class IdConflictError(PagemillError):
    """The id belongs to another job, whose reply is not this one's."""


class AsyncClient:
    """Jobs and replies of one queue, for asyncio."""

    def __init__(self, url: str, queue: str, *, retry_s: float = 30.0) -> None:
        """`retry_s`: seconds of a lost connection after which a call gives up with ConnectionLostError.

        Raises StartupError where the URL or the queue's name can't be used.
        """
        self.keys = QueueKeys(queue)
        self._url = url
        self._retry_s = retry_s
        self._link = Link(url, "client", queue)
        self._digests: dict[str, str] = {}

    async def submit(self, prompt: Prompt, *, job_id: str | None = None, lane: str = "normal", **fields: Any) -> str:
        """Put a job on the queue and answer its id. Text is completed as it stands; a list is chat messages.

        `fields` are the job's further fields (`max_tokens`, `temperature`, `ttl_ms`, …). Where the answer is lost, the
        job is sent again under the same id, so it runs once. Raises StartupError for an id, lane or text that can't be
        used, IdConflictError where the id is known for another job. (If that one still waits, `stream` tells.)
        """
        if lane not in LANES:
            raise StartupError(f"there is no lane {lane!r}: use {', '.join(LANES)}")
        sent_id = secrets.token_hex(12) if job_id is None else checked_id(job_id)
        body = {"prompt": prompt} if isinstance(prompt, str) else {"messages": list(prompt)}
        job = {name.encode(): _encoded(name, value) for name, value in {"id": sent_id, **body, **fields}.items()}
        if job_id is not None:
            await self._check_own(job_id, digest_of(job))
            self._remember(job_id, digest_of(job))
        await self._call("XADD", self.keys.jobs(lane), "*", *(part for pair in job.items() for part in pair))
        return sent_id

    async def status(self, job_id: str) -> str | None:
        """`queued`, `running`, or how the job ended; None where no worker has taken such a job, or long ago."""
        status = (await self._record(checked_id(job_id))).get(b"status")
        return None if status is None else status.decode("utf-8", "replace")

    async def cancel(self, job_id: str, reason: str = "cancelled by the client") -> None:
        """Ask for a job to be stopped. The mark is durable; the hint only makes it fast.

        Raises StartupError for an id that no job can have.
        """
        checked_id(job_id)
        await self._call("SET", self.keys.cancel(job_id), reason, "EX", CANCEL_TTL_S)
        await self._call("XADD", self.keys.control, "MAXLEN", "~", 1000, "*", "op", "cancel", "id", job_id)

    async def result(self, job_id: str, *, limit_s: float | None = None) -> Reply:
        """The whole reply, once it has ended, as it should or with an error. Raises like `stream`."""
        reply = Reply()
        async for event in self.stream(job_id, limit_s=limit_s):
            reply.add(event)
        return reply

    async def stream(self, job_id: str, *, limit_s: float | None = None) -> AsyncGenerator[ReplyEvent, None]:
        """The events of a reply from its start to its terminal event, across lost connections and workers.

        On a `reset` discard all text so far. `limit_s`: the job's own time limit; once it is past, the job's record is
        looked at instead of waiting on. Raises ReplyLostError where nothing is left to wait for, ConnectionLostError
        after an outage of `retry_s`, StartupError for an id that no job can have, and IdConflictError where this
        client sent a job of this id and the reply turns out to be another's.
        """
        key, cursor, patience = self.keys.reply(checked_id(job_id)), ReplyCursor(), _Patience(self._retry_s)
        digest = self._digests.pop(job_id, None)
        deadline = None if limit_s is None else time.monotonic() + limit_s
        link = Link(self._url, "client-reply", self.keys.queue)
        try:
            while not cursor.is_done:
                try:
                    if patience.is_tried and await self._is_cut_back(link, key, cursor):
                        yield cursor.restart()
                    words = ("BLOCK", _block_ms(deadline), "COUNT", READ_COUNT, "STREAMS", key, cursor.last_id)
                    answer = await link.call("XREAD", *words)
                    if answer is None and deadline is not None and time.monotonic() > deadline:
                        await self._check_alive(link, job_id)
                except (ConnectionLostError, ServerError) as error:
                    await patience.wait(error, link)
                    continue
                patience.reset()
                if answer and digest is not None:
                    await self._check_own(job_id, digest)
                    digest = None
                for entry in answer[0][1] if answer else ():
                    event = parse_event(*entry)
                    accepted = cursor.accept(event)
                    yield accepted
                    if accepted is not event or event.is_terminal:
                        break
        finally:
            await link.close()

    async def aclose(self) -> None:
        """Close the connection."""
        await self._link.close()

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

    def _remember(self, job_id: str, digest: str) -> None:
        self._digests[job_id] = digest
        while len(self._digests) > MAX_REMEMBERED:
            self._digests.pop(next(iter(self._digests)))

    async def _call(self, *words: str | bytes | int) -> Any:
        """One command that may be sent twice, again and again until it was answered or `retry_s` is over."""
        patience = _Patience(self._retry_s)
        while True:
            try:
                return await self._link.call(*words)
            except (ConnectionLostError, ServerError) as error:
                await patience.wait(error, self._link)

    async def _is_cut_back(self, link: Link, key: str, cursor: ReplyCursor) -> bool:
        """Whether the server lost the last event that was read, as it can in a failover."""
        if not cursor.has_begun:
            return False
        return not await link.call("XRANGE", key, cursor.last_id, cursor.last_id, "COUNT", 1)

    async def _check_alive(self, link: Link, job_id: str) -> None:
        """Raise ReplyLostError if neither the job's record nor its reply gives hope."""
        if await link.call("XLEN", self.keys.reply(job_id)):
            return
        state = await self._record(job_id)
        status = state.get(b"status", b"").decode("utf-8", "replace")
        if not state:
            raise ReplyLostError(
                f"job {job_id} is unknown: it was never taken, or its reply has expired; send it again"
            )
        if status not in ("running", "queued"):
            raise ReplyLostError(
                f"job {job_id} ended ({status}), and its reply is gone: it expired or was deleted; send the job again"
            )


class Client:
    """The same for code without an event loop. Not for use inside one, nor by two threads at a time."""

    def __init__(self, url: str, queue: str, *, retry_s: float = 30.0) -> None:
        """Arguments and errors are those of AsyncClient."""
        self._client = AsyncClient(url, queue, retry_s=retry_s)
        self._runner = asyncio.Runner()

    def submit(self, prompt: Prompt, *, job_id: str | None = None, lane: str = "normal", **fields: Any) -> str:
        """See AsyncClient.submit."""
        return self._run(self._client.submit(prompt, job_id=job_id, lane=lane, **fields))

    def status(self, job_id: str) -> str | None:
        """See AsyncClient.status."""
        return self._run(self._client.status(job_id))

    def cancel(self, job_id: str, reason: str = "cancelled by the client") -> None:
        """See AsyncClient.cancel."""
        self._run(self._client.cancel(job_id, reason))

    def result(self, job_id: str, *, limit_s: float | None = None) -> Reply:
        """See AsyncClient.result."""
        return self._run(self._client.result(job_id, limit_s=limit_s))

    def stream(self, job_id: str, *, limit_s: float | None = None) -> Iterator[ReplyEvent]:
        """See AsyncClient.stream."""
        events = self._client.stream(job_id, limit_s=limit_s)

        async def next_event() -> ReplyEvent | None:
            return await anext(events, None)

        try:
            while (event := self._run(next_event())) is not None:
                yield event
        finally:
            self._run(events.aclose())

    def close(self) -> None:
        """Close the connection."""
        self._run(self._client.aclose())
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        return self._runner.run(work)


class _Patience:
    """Waits out a lost connection or a server that can't answer now, up to `retry_s` seconds."""

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self._backoff = Backoff(1.0)
        self._since: float | None = None

    @property
    def is_tried(self) -> bool:
        """Whether the last try failed."""
        return self._since is not None

    async def wait(self, error: ConnectionLostError | ServerError, link: Link) -> None:
        """Sleep before the next try. Raises `error` where no further try makes sense."""
        now = time.monotonic()
        self._since = self._since or now
        is_final = isinstance(error, ServerError) and not error.is_temporary
        if is_final or now - self._since >= self._retry_s:
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


def checked_id(job_id: str) -> str:
    """`job_id` if a job can have it. Raises StartupError."""
    if not NAME.fullmatch(job_id.encode("utf-8", "replace")):
        raise StartupError(f"the id {job_id[:80]!r} can't be used: use 1 to 64 of A-Z a-z 0-9 _ -")
    return job_id


def _encoded(name: str, value: Any) -> bytes:
    try:
        return as_field(value).encode()
    except UnicodeEncodeError as error:
        raise StartupError(f"{name} holds half a surrogate pair at character {error.start}: send whole text") from None


def as_field(value: Any) -> str:
    """A job's field as the wire's flat text: text as it is, true as 1, lists and maps as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(int(value))
    return json.dumps(value, ensure_ascii=False)
