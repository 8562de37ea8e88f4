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


def cancelled(reason: str, where: str) -> JobError:
    """The error of a job that its client called off; `where` it was is queued or running."""
    return JobError(ErrorCode.CANCELLED, f"cancelled: {reason}" if reason else "cancelled", {"where": where})


def deadline_exceeded(where: str) -> JobError:
    """The error of a job whose time is up; `where` it was is queued or running."""
    return JobError(ErrorCode.DEADLINE_EXCEEDED, f"the job's time was up while it was {where}", {"where": where})


def poison(crashes: int, solo: int) -> JobError:
    """The error of a job that ends whatever computes it."""
    return JobError(
        ErrorCode.POISON,
        f"the engine or its worker died {crashes} times with this job, {solo} times in a row while it ran alone: don't "
        "send it again as it is; `pagemill dead` shows what it asks for, and the worker's log what its end looked like",
        {"crashes": crashes, "solo": solo},
    )
