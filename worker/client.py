"""A small client: put a job on the queue, read its reply, cancel it. Any Redis client can do the same by hand.

with Client("redis://localhost:6379", "smollm2") as client:
    job_id = client.submit("Tell me a joke", max_tokens=64)
    for event in client.stream(job_id):
        print(event.text, end="")

`AsyncClient` is the same for asyncio. What either raises about a job is a ClientError; ConnectionLostError and
ServerError come from the connection. Each has `code`, `message`, `is_retryable` and `details`.
"""

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, Self, TypeVar

from worker.async_client import AsyncClient
from worker.client_errors import (
    BadJobError,
    ClientError,
    IdConflictError,
    JobFailedError,
    ReplyBrokenError,
    ReplyLostError,
)
from worker.client_fields import Prompt
from worker.reply_events import START, Reply, ReplyEvent
from worker.streams.errors import ConnectionLostError, ServerError

__all__ = [
    "AsyncClient",
    "BadJobError",
    "Client",
    "ClientError",
    "ConnectionLostError",
    "IdConflictError",
    "JobFailedError",
    "Prompt",
    "Reply",
    "ReplyBrokenError",
    "ReplyEvent",
    "ReplyLostError",
    "ServerError",
]

Answer = TypeVar("Answer")


class Client:
    """`AsyncClient` for code without an event loop. Not for use inside one, nor by two threads at a time."""

    def __init__(self, url: str, queue: str, *, retry_s: float = 30.0) -> None:
        """Arguments and errors are those of AsyncClient."""
        self._client = AsyncClient(url, queue, retry_s=retry_s)
        self._runner = asyncio.Runner()

    def submit(self, prompt: Prompt | None, *, job_id: str | None = None, lane: str = "normal", **fields: Any) -> str:
        """See AsyncClient.submit."""
        return self._run(self._client.submit(prompt, job_id=job_id, lane=lane, **fields))

    def status(self, job_id: str) -> str | None:
        """See AsyncClient.status."""
        return self._run(self._client.status(job_id))

    def cancel(self, job_id: str, reason: str = "cancelled by the client") -> None:
        """See AsyncClient.cancel."""
        self._run(self._client.cancel(job_id, reason))

    def result(self, job_id: str, *, held: Reply | None = None, limit_s: float | None = None) -> Reply:
        """See AsyncClient.result."""
        return self._run(self._client.result(job_id, held=held, limit_s=limit_s))

    def stream(
        self, job_id: str, *, after: str = START, num_held: int | None = None, limit_s: float | None = None
    ) -> Iterator[ReplyEvent]:
        """See AsyncClient.stream."""
        events = self._client.stream(job_id, after=after, num_held=num_held, limit_s=limit_s)

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
