"""Named errors of the worker, and the codes that the wire knows them by."""

from enum import StrEnum
from typing import Any


class ErrorCode(StrEnum):
    """The taxonomy of error events. It only ever grows."""

    BAD_REQUEST = "bad_request"
    UNSUPPORTED_VERSION = "unsupported_version"
    MODEL_NOT_FOUND = "model_not_found"
    CONTEXT_TOO_LONG = "context_too_long"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    ID_CONFLICT = "id_conflict"
    UNAUTHORIZED = "unauthorized"
    RATE_LIMITED = "rate_limited"
    OVERLOADED = "overloaded"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    ABANDONED = "abandoned"
    WORKER_LOST = "worker_lost"
    POISON = "poison"
    OUT_OF_MEMORY = "out_of_memory"
    ENGINE_ERROR = "engine_error"
    INTERNAL = "internal"
    DRAINING = "draining"


RETRYABLE = frozenset(
    {
        ErrorCode.RATE_LIMITED,
        ErrorCode.OVERLOADED,
        ErrorCode.WORKER_LOST,
        ErrorCode.OUT_OF_MEMORY,
        ErrorCode.ENGINE_ERROR,
        ErrorCode.INTERNAL,
        ErrorCode.DRAINING,
    }
)


class PagemillError(Exception):
    """Root of everything the worker raises on purpose."""


class StartupError(PagemillError):
    """The worker can't start; the message is one line that says what to do. The command exits with code 2."""


class SettingsError(StartupError):
    """Settings that can't be; the message names each where it was set and says what is accepted."""


class JobError(PagemillError):
    """A job that ends in an `error` event. `message` says what to do; `details` is JSON-able."""

    def __init__(self, code: ErrorCode, message: str, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details or {}

    @property
    def is_retryable(self) -> bool:
        """Whether the same job may succeed when sent again."""
        return self.code in RETRYABLE


# Of a cancel mark's value, which clients write.
MAX_REASON_CHARS = 256


def cancelled(reason: str, where: str) -> JobError:
    """The error of a job that its client called off; `where` it was is queued or running."""
    shown = "".join(char if char.isprintable() else " " for char in reason[:MAX_REASON_CHARS])
    why = f"called off: {shown}. If" if reason else "called off: if"
    return JobError(
        ErrorCode.CANCELLED, f"{why} it is wanted after all, send it again with another id", {"where": where}
    )


def deadline_exceeded(where: str) -> JobError:
    """The error of a job whose time is up; `where` it was is queued or running."""
    advice = "send it again later" if where == "queued" else "ask for fewer tokens"
    return JobError(
        ErrorCode.DEADLINE_EXCEEDED,
        f"the job's time was up while it was {where}: {advice}, or with a longer ttl_ms, and with another id",
        {"where": where},
    )


def overloaded(depth: int, max_depth: int, retry_after_ms: int) -> JobError:
    """The error of a job that was shed from a lane with `depth` jobs, where `max_depth` are allowed."""
    return JobError(
        ErrorCode.OVERLOADED,
        f"{depth} jobs are in this lane, {max_depth} are allowed: send it again with another id in "
        f"{_seconds(retry_after_ms)}, or to another queue",
        {"retry_after_ms": retry_after_ms, "depth": depth, "max_depth": max_depth},
    )


_LIMITS = {"concurrency": "has as many jobs running", "rate": "sends as many jobs", "tokens": "uses as many tokens"}


def rate_limited(tenant: str, limit: str, retry_after_ms: int) -> JobError:
    """The error of a job whose tenant is beyond a limit: `concurrency`, `rate` or `tokens`."""
    name = f"tenant {tenant}" if tenant else "whoever sends without a tenant"
    return JobError(
        ErrorCode.RATE_LIMITED,
        f"{name} {_LIMITS[limit]} as it may: send it again with another id in {_seconds(retry_after_ms)}",
        {"retry_after_ms": retry_after_ms, "limit": limit, "tenant": tenant},
    )


def _seconds(milliseconds: int) -> str:
    return f"{milliseconds / 1000:g} s" if milliseconds < 10_000 else f"{milliseconds / 1000:.0f} s"


def poison(crashes: int, solo: int) -> JobError:
    """The error of a job that ends whatever computes it."""
    return JobError(
        ErrorCode.POISON,
        f"the engine or its worker died {crashes} times with this job, {solo} times in a row while it ran alone: don't "
        "send it again as it is; `pagemill dead` shows what it asks for, and the worker's log what its end looked like",
        {"crashes": crashes, "solo": solo},
    )
