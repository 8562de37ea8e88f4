"""Named errors of the Redis edge; the driver's own don't leave `connection.py`."""

import re

from worker.errors import PagemillError


class StreamsError(PagemillError):
    """Root of what talking to Redis raises."""


class ConnectionLostError(StreamsError):
    """No connection, or it was lost: whether the command was carried out is not known."""


class ServerError(StreamsError):
    """The server answered with an error. `code` is its first word: NOGROUP, OOM, WRONGTYPE, ..."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        # Redis 6.2 wraps what a command in a script answered: "ERR Error running script (...): ... -OOM command ..."
        inner = re.search(r"-([A-Z]{2,}) ", message) if message.startswith("ERR Error running script") else None
        self.code = inner[1] if inner else message.split(" ", 1)[0]

    @property
    def is_passing(self) -> bool:
        """The server can't write now but may later: full, loading, without replicas."""
        return self.code in {"OOM", "LOADING", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "NOREPLICAS", "MISCONF"}

    @property
    def is_wrong_server(self) -> bool:
        """This server is a primary no longer: connect anew."""
        return self.code in {"READONLY", "MASTERDOWN", "UNBLOCKED"}

    @property
    def is_wrong_type(self) -> bool:
        """The key holds a value of another type than the protocol says."""
        return self.code == "WRONGTYPE"

    @property
    def is_id_refused(self) -> bool:
        """XADD's id is not larger than the stream's last."""
        return "equal or smaller" in str(self)
