"""The server's time, kept as an offset from this machine's monotonic clock."""

import time

from worker.streams.connection import Link


class ServerClock:
    """Milliseconds since the epoch by the server's clock, so that workers and entry ids agree.

    Until the first `sync` it is this machine's own time.
    """

    def __init__(self) -> None:
        self._offset_ms = time.time() * 1000 - time.monotonic() * 1000

    async def sync(self, link: Link) -> None:
        """Asks the server for its time. The answer counts for the middle of the round trip."""
        before = time.monotonic() * 1000
        seconds, micros = await link.call("TIME")
        after = time.monotonic() * 1000
        self._offset_ms = int(seconds) * 1000 + int(micros) / 1000 - (before + after) / 2

    def now_ms(self) -> int:
        """The server's time now."""
        return int(time.monotonic() * 1000 + self._offset_ms)
