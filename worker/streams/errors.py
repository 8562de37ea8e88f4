"""Named errors of the Redis edge; the driver's own don't leave `wire.py`."""

import re
from typing import Any

from worker.errors import PagemillError

_PASSING = frozenset({"OOM", "LOADING", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "NOREPLICAS", "MISCONF"})
_WRONG_SERVER = frozenset({"READONLY", "MASTERDOWN", "UNBLOCKED", "MOVED", "ASK", "CLUSTERDOWN"})


class StreamsError(PagemillError):
    """Root of what talking to Redis raises. Told like a ClientError: `code`, `message`, `is_retryable`, `details`."""

    code = "connection_lost"

    @property
    def message(self) -> str:
        """What it says."""
        return str(self)

    @property
    def is_retryable(self) -> bool:
        """Whether the same may succeed later."""
        return True

    @property
    def details(self) -> dict[str, Any]:
        """Nothing more is known."""
        return {}


class ConnectionLostError(StreamsError):
    """No connection, or it was lost: whether the command was carried out is not known.

    `is_passing`: somebody answered, so that it is known that waiting helps.
    """

    def __init__(self, message: str, *, is_passing: bool = False) -> None:
        super().__init__(message)
        self.is_passing = is_passing


class LoginRefusedError(ConnectionLostError):
    """The server refuses user, password or database."""

    code = "unauthorized"

    @property
    def is_retryable(self) -> bool:
        """Not with the same URL."""
        return False


class ServerError(StreamsError):
    """The server answered with an error. `code` is its first word: NOGROUP, OOM, WRONGTYPE, ..."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        # Redis 6.2 wraps what a command in a script answered: "ERR Error running script (...): ... -OOM command ..."
        inner = re.search(r"-([A-Z]{2,}) ", message) if message.startswith("ERR Error running script") else None
        self.code = inner[1] if inner else message.split(" ", 1)[0]

    @property
    def is_passing(self) -> bool:
        """The server can't do it now but may later: full, loading, without replicas."""
        return self.code in _PASSING

    @property
    def is_wrong_server(self) -> bool:
        """This server is a primary no longer, or not for this queue: look for the right one and connect anew."""
        return self.code in _WRONG_SERVER

    @property
    def is_temporary(self) -> bool:
        """Worth another try later, here or at another server."""
        return self.is_passing or self.is_wrong_server

    @property
    def is_retryable(self) -> bool:
        """Whether the same may succeed later."""
        return self.is_temporary

    @property
    def target(self) -> tuple[str, int] | None:
        """Host and port that MOVED and ASK name. The host is empty where it is the one that was asked."""
        if self.code not in ("MOVED", "ASK"):
            return None
        host, _, port = str(self).split(" ")[2].rpartition(":")
        return host, int(port)

    @property
    def is_wrong_type(self) -> bool:
        """The key holds a value of another type than the protocol says."""
        return self.code == "WRONGTYPE"

    @property
    def is_id_refused(self) -> bool:
        """XADD's id is not larger than the stream's last."""
        return "equal or smaller" in str(self)
