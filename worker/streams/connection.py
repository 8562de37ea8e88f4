"""One connection to Redis that knows when it was lost.

A pool reconnects silently, but here it matters: after a failover the next token write would be accepted by a server
that lost the tokens before it. So each Link is one connection with one counter of connects; whoever writes replies
compares that counter. Replies are RESP2 as they come, in bytes; the driver's own parsing of answers, which differs
from release to release, is not used. Nothing is ever retried here.
"""

import asyncio
import random
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import structlog
from redis.asyncio.connection import Connection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from worker.errors import StartupError
from worker.streams.errors import ConnectionLostError, ServerError

# A blocking read waits this long on the server; short, so that hints and a stop are met soon.
BLOCK_MS = 500
# No answer for this long means that the connection is dead. BLOCK_MS lies well below.
SOCKET_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0
MIN_VERSION = (6, 2)

Argument = bytes | str | int | float
Command = Sequence[Argument]

log = structlog.get_logger(__name__)


class Link:
    """A connection that is made when it is first needed and made anew after it was lost.

    Commands of several tasks are sent one after the other. `generation` counts the connects: it changes exactly when
    what was sent before may have been lost.
    """

    def __init__(self, url: str, name: str) -> None:
        """`name` only labels log events. Raises StartupError where the URL can't be understood."""
        self._connection, self._timeout_s = _make_connection(url)
        self._name = name
        self._lock = asyncio.Lock()
        self._is_up = False
        self.generation = 0

    @property
    def is_up(self) -> bool:
        """Whether the next command goes over the connection that the last one used."""
        return self._is_up

    async def call(self, *command: Argument) -> Any:
        """The answer to one command. Raises ServerError for an error answer, ConnectionLostError for none."""
        (answer,) = await self.batch([command])
        if isinstance(answer, ServerError):
            raise answer
        return answer

    async def batch(self, commands: Sequence[Command], *, generation: int | None = None) -> list[Any]:
        """The answers to `commands`, sent at once; error answers stand in the list as ServerError.

        With `generation`, only over that connection. Raises ConnectionLostError if any answer is missing: what was
        carried out is not known then.
        """
        async with self._lock:
            if generation is not None and not (self._is_up and generation == self.generation):
                raise ConnectionLostError("the connection to Redis was lost before the write")
            await self._connect()
            try:
                await self._send(commands)
                answers = [await self._read() for _ in commands]
                if any(isinstance(answer, ServerError) and answer.is_wrong_server for answer in answers):
                    await self._drop()
                return answers
            except (RedisError, OSError, TimeoutError) as error:
                await self._drop()
                raise ConnectionLostError(f"the connection to Redis was lost: {_driver_words(error)}") from error
            except BaseException:
                # Cancelled half-way: the answers still to come would be taken for those of the next command.
                await self._drop()
                raise

    async def connect(self) -> int:
        """Connects where that is needed; answers the generation. Raises ConnectionLostError."""
        async with self._lock:
            await self._connect()
            return self.generation

    async def reset(self) -> None:
        """Closes the connection; the next command makes a new one."""
        async with self._lock:
            await self._drop()

    async def close(self) -> None:
        """Closes the connection for good."""
        await self.reset()

    async def _connect(self) -> None:
        if self._is_up:
            return
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S + 1):
                await self._connection.connect()
        except (RedisError, OSError, TimeoutError) as error:
            await self._drop()
            raise ConnectionLostError(f"Redis can't be reached: {_driver_words(error)}") from error
        except BaseException:
            await self._drop()
            raise
        self._is_up = True
        self.generation += 1
        if self.generation > 1:
            log.info("redis_reconnected", link=self._name, generation=self.generation)

    async def _send(self, commands: Sequence[Command]) -> None:
        # The time is limited here, not by the driver, whose asyncio.wait_for loses a cancellation on Python 3.11.
        async with asyncio.timeout(self._timeout_s):
            await self._connection.send_packed_command(self._connection.pack_commands(commands), check_health=False)

    async def _read(self) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._connection.read_response(disable_decoding=True, disconnect_on_error=False)
        except ResponseError as error:
            return ServerError(_message_of(error))

    async def _drop(self) -> None:
        self._is_up = False
        await self._connection.disconnect(nowait=True)


class Backoff:
    """Waits between tries: doubling from 50 ms up to `cap_s`, with jitter. A success resets it."""

    def __init__(self, cap_s: float) -> None:
        self._cap_s = cap_s
        self._next_s = 0.0

    async def wait(self) -> None:
        """Sleeps for the next wait."""
        self._next_s = min(self._cap_s, max(0.05, 2 * self._next_s))
        await asyncio.sleep(self._next_s * random.uniform(0.5, 1.0))

    def reset(self) -> None:
        """The last try succeeded."""
        self._next_s = 0.0


async def check_server(url: str) -> str:
    """Connects once and returns the server's version. Raises StartupError, one line, where it can't be used."""
    link = Link(url, "check")
    try:
        info = _parse_info(await link.call("INFO"))
    except ConnectionLostError as error:
        raise StartupError(f"{redacted(url)}: {_startup_reason(error)}") from error
    except ServerError as error:
        raise StartupError(
            f"{redacted(url)}: Redis refuses: {_driver_words(error)}. Check the user's rights (docs/wire.md)"
        ) from error
    finally:
        await link.close()
    version = info.get("redis_version", "0")
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        raise StartupError(f"{redacted(url)}: the server's version is {version}: Redis 6.2 or Valkey is needed")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and info.get("maxmemory", "0") != "0":
        raise StartupError(
            f"{redacted(url)}: maxmemory-policy is {policy}, which evicts jobs and replies: set it to noeviction"
        )
    return info.get("valkey_version", version)


def redacted(url: str) -> str:
    """The URL without user, password and query, for messages; also where a password has characters it may not have."""
    scheme, separator, rest = url.partition("://")
    before, _, after = rest.rpartition("@")
    if "?" in before and "password=" in before:  # an @ in the query's password, or a ? in the one before the host
        return f"{scheme}{separator}..."
    return f"{scheme}{separator}{after.partition('?')[0]}"


def not_a_url(url: str) -> StartupError:
    """The error for a URL that can't be understood. The parser's own words may hold a part of the password."""
    return StartupError(
        f"{redacted(url)} is no Redis URL: use redis://[user:password@]host:port/db, rediss:// or unix:///path, "
        "with / # ? @ : % in a password as %2F %23 %3F %40 %3A %25"
    )


def _make_connection(url: str) -> tuple[Any, float]:
    """The driver's connection, without a limit of its own, and how many seconds an answer may take."""
    try:
        parts = urlsplit(url)
        path = parts.path.strip("/")
        if parts.scheme in ("redis", "rediss") and path and not path.isdigit():
            raise ValueError(f"database {path!r} is no number")
        if parts.scheme == "unix" and not path:
            raise ValueError("it names no socket")
        options: dict[str, Any] = dict(parse_url(url))
        kind = options.pop("connection_class", Connection)
        timeout_s = float(options.pop("socket_timeout", SOCKET_TIMEOUT_S))
        options.setdefault("socket_connect_timeout", CONNECT_TIMEOUT_S)
        options |= {"protocol": 2, "retry": Retry(NoBackoff(), 0), "socket_timeout": None}
        return kind(**options), timeout_s
    except (ValueError, TypeError):
        raise not_a_url(url) from None


def _message_of(error: ResponseError) -> str:
    """The server's own words: the driver strips the code of the errors that it has classes for."""
    code = getattr(error, "status_code", None) or ""
    message = str(error)
    return message if not code or message.startswith(code) else f"{code} {message}"


def _startup_reason(error: ConnectionLostError) -> str:
    cause = error.__cause__
    if isinstance(cause, AuthenticationError) or "NOAUTH" in str(error) or "WRONGPASS" in str(error):
        return "Redis refuses the user or password: check them in the URL"
    if "DB index" in str(error):
        return "the server has no database of this number: name another at the end of the URL"
    return f"{error}. Start a server there, or name another with --redis-url"


def _driver_words(error: BaseException) -> str:
    """What an error says, as a part of a sentence: on one line, and without the full stops at its end."""
    text = " ".join(str(error).split())
    told = re.sub(r"[. ]*\.(?=\s|$)", ".", text).rstrip(". ")
    return told or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)


def _parse_info(raw: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in raw.decode("utf-8", "replace").splitlines() if not line.startswith("#"))
    return {name: value for name, _, value in lines if name}
