"""The service's end of the socket pair to an engine process, from which nothing that the engine said is lost.

An engine that dies may leave a command unread: its pipe is then reset, and the next write fails. asyncio's streams
drop what has come and was not read yet in both cases. But what an engine says last tells whom it died with. So each way
has a transport of its own, and the end of the one to be read comes after all that is in it.
"""

import asyncio
import contextlib
import socket
from typing import cast

READ_BYTES = 1 << 18


class _WholeReader(asyncio.StreamReader):
    """A reader for which a connection that was reset ends like any other: after what has come."""

    def set_exception(self, exc: Exception) -> None:
        """Called when the connection is lost."""
        self.feed_eof()


class _WriteOnlyProtocol(asyncio.StreamReaderProtocol):
    """Keeps its transport from reading what is the other's to read."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        cast(asyncio.Transport, transport).pause_reading()


class EnginePipe:
    """Reads and writes bytes over one connected socket, which it owns."""

    def __init__(self, reader: asyncio.StreamReader, incoming: asyncio.Transport, writer: asyncio.StreamWriter):
        self._reader = reader
        self._incoming = incoming
        self._writer = writer

    @classmethod
    async def connect(cls, connection: socket.socket) -> "EnginePipe":
        """Over `connection`, which is closed with the pipe."""
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        reader = _WholeReader()
        incoming, _ = await loop.create_connection(lambda: asyncio.StreamReaderProtocol(reader), sock=connection.dup())
        unread = asyncio.StreamReader()
        outgoing, protocol = await loop.create_connection(lambda: _WriteOnlyProtocol(unread), sock=connection)
        return cls(reader, incoming, asyncio.StreamWriter(outgoing, protocol, unread, loop))

    async def read(self) -> bytes:
        """The next bytes; none at the end, however it came about."""
        return await self._reader.read(READ_BYTES)

    def write(self, data: bytes) -> None:
        """Send `data`, as far as anybody is there to take it."""
        if not self._writer.is_closing():
            self._writer.write(data)

    async def close(self, grace_s: float) -> None:
        """Close it once all is sent, or after the grace."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._writer.drain()
        self._writer.close()
        self._incoming.close()

    def abort(self) -> None:
        """Close it at once; who reads comes to the end."""
        self._writer.transport.abort()
        self._incoming.close()
