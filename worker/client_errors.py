"""What a client raises about a job. Whatever the connection raises is in `worker.streams.errors`."""

from collections.abc import Mapping
from typing import Any

from worker.errors import PagemillError, StartupError


class ClientError(PagemillError):
    """Root of what a client raises about one job.

    code: one of the wire's error codes, or `reply_lost` or `reply_broken`, which only a client can find.
    is_retryable: whether the same job, sent again, may succeed. details: what else the error event said.
    """

    code = "internal"
    is_retryable = False

    def __init__(self, message: str, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.details = dict(details or {})


class JobFailedError(ClientError):
    """The job ended with an `error` event: code, message, is_retryable and details are that event's."""

    def __init__(
        self, message: str, *, code: str, is_retryable: bool, details: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message, details)
        self.code = code
        self.is_retryable = is_retryable

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class BadJobError(ClientError, StartupError):
    """The job, or an id, can't be sent as it stands; nothing was sent."""

    code = "bad_request"


class IdConflictError(ClientError):
    """The id belongs to another job, whose reply is not this one's."""

    code = "id_conflict"


class ReplyLostError(ClientError):
    """There is no reply to wait for: the job is unknown, or its reply has expired or was deleted."""

    code = "reply_lost"
    is_retryable = True


class ReplyBrokenError(ClientError):
    """The reply doesn't fit together even when it is read from its start: a worker broke the protocol."""

    code = "reply_broken"
