"""The least client there is: RESP2 over a socket. What it can do, any language can."""

import socket
from typing import Any, Self
from urllib.parse import unquote, urlsplit

Part = bytes | str | int


class RespError(Exception):
    """The server's error answer."""


class RespClient:
    """Sends commands and reads answers: bytes, int, None or a list of those; an error answer raises RespError."""

    def __init__(self, url: str, timeout_s: float = 10.0) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 6379), timeout_s)
        self._file = self._socket.makefile("rb")
        if parts.password:
            user = [unquote(parts.username)] if parts.username else []
            try:
                self.call("AUTH", *user, unquote(parts.password))
            except BaseException:
                self.close()
                raise

    def call(self, *command: Part) -> Any:
        """One command and its answer."""
        (answer,) = self.pipeline(command)
        if isinstance(answer, RespError):
            raise answer
        return answer

    def pipeline(self, *commands: tuple[Part, ...]) -> list[Any]:
        """Sends all commands at once; error answers stand in the list."""
        self.send(*commands)
        return [self.read() for _ in commands]

    def send(self, *commands: tuple[Part, ...]) -> None:
        """Sends without reading."""
        self._socket.sendall(b"".join(encode(command) for command in commands))

    def read(self) -> Any:
        """One answer; an error is returned, not raised."""
        line = self._file.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionError("the server closed the connection")
        kind, rest = line[:1], line[1:-2]
        match kind:
            case b"+":
                return rest
            case b":":
                return int(rest)
            case b"-":
                return RespError(rest.decode())
            case b"$":
                return None if rest == b"-1" else self._file.read(int(rest) + 2)[:-2]
            case b"*":
                return None if rest == b"-1" else [self.read() for _ in range(int(rest))]
        raise ValueError(f"no RESP2: {line[:80]!r}")

    def hash(self, key: str) -> dict[str, str]:
        """HGETALL as text."""
        return pairs(self.call("HGETALL", key))

    def events(self, key: str) -> list[tuple[str, dict[str, str]]]:
        """All entries of a stream: id and fields."""
        return [(entry_id.decode(), pairs(flat)) for entry_id, flat in self.call("XRANGE", key, "-", "+")]

    def pending(self, key: str, group: str = "workers") -> dict[str, tuple[str, int]]:
        """What is pending in a group: entry id to consumer and delivery count."""
        answer = self.call("XPENDING", key, group, "-", "+", 10_000)
        return {entry_id.decode(): (consumer.decode(), count) for entry_id, consumer, _, count in answer}

    def group(self, key: str, name: str = "workers") -> dict[str, Any]:
        """What XINFO says of a consumer group."""
        groups = [dict(zip(flat[::2], flat[1::2], strict=True)) for flat in self.call("XINFO", "GROUPS", key)]
        (found,) = [group for group in groups if group[b"name"] == name.encode()]
        return {field.decode(): value for field, value in found.items()}

    def close(self) -> None:
        """Closes the socket."""
        self._file.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def encode(command: tuple[Part, ...]) -> bytes:
    """A command as an array of bulk strings."""
    parts = [part if isinstance(part, bytes) else str(part).encode() for part in command]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)


def pairs(flat: list[bytes]) -> dict[str, str]:
    """name, value, name, value, ... as a dict of text; bytes that are none are shown as escapes."""
    return {
        name.decode("utf-8", "backslashreplace"): value.decode("utf-8", "backslashreplace")
        for name, value in zip(flat[::2], flat[1::2], strict=True)
    }
