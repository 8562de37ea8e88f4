"""A TCP proxy on loopback that carries bytes to the server and back, or fails to.

Each party (a worker, the clients) has a port of its own, so that one of them can be cut off alone.

    cut           both ends are reset
    delay         nothing passes until a moment, then all of it
    half-open     nothing passes any more, and neither end is told
    lose answer   the next command is carried out; its answer is dropped, and both ends are reset
"""

import asyncio
import contextlib
import ssl
from collections.abc import Callable

READ_BYTES = 1 << 16


class Line:
    """One connection of a party through the proxy. Faults are switched on from outside and last until it ends."""

    def __init__(self, party: str) -> None:
        self.party = party
        self.is_half_open = False
        self.held_until = 0.0
        self._on_lost: Callable[[], None] | None = None
        self._is_asked = False
        self._writers: list[asyncio.StreamWriter] = []

    def cut(self) -> None:
        """Reset both ends."""
        for writer in self._writers:
            writer.transport.abort()

    def lose_answer(self, on_lost: Callable[[], None]) -> None:
        """Drop the answer to the next command; `on_lost` is called when that has happened."""
        self._on_lost = on_lost

    async def carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: tuple[str, int] | None
    ) -> None:
        """Carry bytes until either end closes."""
        self._writers = [writer]
        with contextlib.suppress(OSError):
            if server is not None:
                server_reader, server_writer = await asyncio.open_connection(*server)
                self._writers.append(server_writer)
                pumps = [
                    asyncio.create_task(self._pump(reader, server_writer, self._ask)),
                    asyncio.create_task(self._pump(server_reader, writer, self._answer)),
                ]
                try:
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)
        self.cut()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, may_pass: Callable[[], bool]
    ) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(READ_BYTES):
            while (wait_s := self.held_until - loop.time()) > 0:  # noqa: ASYNC110 - it may be put off again
                await asyncio.sleep(wait_s)
            if self.is_half_open:
                continue  # read on, so that the end that loses patience is noticed
            if not may_pass():
                return
            writer.write(data)
            await writer.drain()

    def _ask(self) -> bool:
        self._is_asked = self._on_lost is not None
        return True

    def _answer(self) -> bool:
        if self._on_lost is None or not self._is_asked:
            return True
        self._on_lost()
        return False


class Proxy:
    """Listens for all parties. `server` is where the server is now; None while it is down. `num_accepted` counts the
    connections that were made, those included that led nowhere.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        """With `tls` parties speak TLS, which ends here."""
        self._tls = tls
        self.server: tuple[str, int] | None = None
        self.num_accepted = 0
        self._lines: dict[Line, None] = {}
        self._listeners: dict[str, asyncio.Server] = {}

    async def listen(self, party: str) -> int:
        """A port for this party alone."""

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            line = Line(party)
            self.num_accepted += 1
            self._lines[line] = None
            try:
                await line.carry(reader, writer, self.server)
            finally:
                del self._lines[line]

        listener = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=self._tls)
        self._listeners[party] = listener
        port: int = listener.sockets[0].getsockname()[1]
        return port

    def lines(self, party: str | None = None) -> list[Line]:
        """The connections that are open now, of one party or of all; those that are half-open are left out."""
        return [line for line in self._lines if party in (None, line.party) and not line.is_half_open]

    def hang_up(self, party: str) -> None:
        """Close a party's port and its connections: it has died."""
        self._listeners.pop(party).close()
        for line in list(self._lines):
            if line.party == party:
                line.cut()

    def heal(self) -> None:
        """End what would last: half-open connections are cut, delays are over."""
        for line in list(self._lines):
            line.held_until = 0.0
            if line.is_half_open:
                line.cut()

    async def close(self) -> None:
        """End all connections and give back all ports."""
        for party in list(self._listeners):
            self.hang_up(party)
        while self._lines:  # noqa: ASYNC110 - they end one by one
            await asyncio.sleep(0.01)
