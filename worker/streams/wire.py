"""One connection of the driver's: RESP2, bytes, no retries, named errors."""

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, BusyLoadingError, RedisError, ResponseError

from worker.streams.address import Address, Node
from worker.streams.errors import ConnectionLostError, LoginRefusedError, ServerError

Argument = bytes | str | int | float
Command = Sequence[Argument]

# Replies are RESP2 as they come: the driver's own parsing of answers differs from release to release.
_OURS = {"protocol": 2, "retry": Retry(NoBackoff(), 0), "socket_timeout": None}


class Wire:
    """A connection to one server. After a ConnectionLostError `close` it; then it may be made anew."""

    def __init__(self, address: Address, node: Node | None) -> None:
        """`node` is None for a Unix socket."""
        place = {} if node is None else {"host": node[0], "port": node[1]}
        self._connection = address.kind(**address.options, **place, **_OURS)
        if address.tls is not None:
            self._connection.ssl_context = address.tls
        self._timeout_s = address.timeout_s
        self._connect_timeout_s = float(address.options["socket_connect_timeout"]) + 1
        self.node = node

    async def connect(self) -> None:
        """Connects and logs in. Raises ConnectionLostError, LoginRefusedError where the server refuses user, password
        or database.
        """
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await self._connection.connect()
        except BusyLoadingError as error:
            raise ConnectionLostError(str(_server_error(error)), is_passing=True) from error
        except (AuthenticationError, ResponseError) as error:
            raise LoginRefusedError(f"Redis refuses the login: {driver_words(error)}") from error
        except (RedisError, OSError, TimeoutError) as error:
            raise _lost("Redis can't be reached", error) from error

    async def ask(self, commands: Sequence[Command]) -> list[Any]:
        """The answers to `commands`, sent at once; error answers stand in the list as ServerError.

        Raises ConnectionLostError if any answer is missing: what was carried out is not known then.
        """
        try:
            # Time is limited here, not by the driver, whose asyncio.wait_for loses a cancellation on Python 3.11.
            async with asyncio.timeout(self._timeout_s):
                packed = self._connection.pack_commands(commands)
                await self._connection.send_packed_command(packed, check_health=False)
            return [await self._read() for _ in commands]
        except AuthenticationError as error:  # some servers say so only now
            raise LoginRefusedError(f"Redis refuses the login: {driver_words(error)}") from error
        except (RedisError, OSError, TimeoutError) as error:
            raise _lost("the connection to Redis was lost", error) from error

    async def close(self) -> None:
        """Closes the connection at once; what was sent and not answered yet is given up."""
        # TLS would wait for the other end to agree, for half a minute where that is gone.
        if self._connection._writer is not None:
            self._connection._writer.transport.abort()
        await self._connection.disconnect(nowait=True)

    async def _read(self) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._connection.read_response(disable_decoding=True, disconnect_on_error=False)
        except (ResponseError, BusyLoadingError) as error:
            return _server_error(error)


def driver_words(error: BaseException) -> str:
    """What an error says, as a part of a sentence: on one line, and without the full stops at its end."""
    text = " ".join(str(error).split())
    told = re.sub(r"[. ]*\.(?=\s|$)", ".", text).rstrip(". ")
    return told or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)


def _lost(what: str, error: Exception) -> ConnectionLostError:
    words = driver_words(error)
    return ConnectionLostError(f"{what}: {words}", is_passing="max number of clients" in words)


def _server_error(error: RedisError) -> ServerError:
    """The server's own words: the driver strips the code of the errors that it has classes for."""
    code = getattr(error, "status_code", None) or ""
    message = str(error)
    return ServerError(message if not code or message.startswith(code) else f"{code} {message}")
