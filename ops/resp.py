"""The Redis protocol by hand: one raw command, the raw answer, and the answer as redis-cli prints it.

redis-py turns answers into Python's types and loses what they were (a status, a bulk string); this keeps it.
"""

import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Self
from urllib.parse import urlsplit

from redis.connection import parse_url

_CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Status:
    """A simple string, like OK."""

    text: str


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error, like `ERR unknown command`."""

    text: str


Answer = Status | ErrorReply | int | bytes | None | list["Answer"]


class RespConnection:
    """One connection in RESP2, the protocol that redis-cli speaks unless told otherwise."""

    def __init__(self, url: str) -> None:
        """Connect, and log in where the URL says so.

        Raises OSError, or ConnectionError if the server refuses the login; ValueError for a URL that can't be read.
        """
        options = _options_of(url)
        self._socket = _connect(options, is_tls=url.startswith("rediss://"))
        self._file: BinaryIO = self._socket.makefile("rb")
        try:
            if options.get("password") is not None:
                user = [options["username"]] if options.get("username") else []
                self._must("AUTH", *user, options["password"])
            if options.get("db"):
                self._must("SELECT", str(options["db"]))
        except OSError:
            self.close()
            raise
        self._socket.settimeout(None)

    def call(self, words: Sequence[str | bytes]) -> Answer:
        """Send one command and read its answer, however long that blocks. Raises ConnectionError if it is cut."""
        self._socket.sendall(encode(words))
        return self._read()

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def _must(self, *words: str) -> None:
        answer = self.call(words)
        if isinstance(answer, ErrorReply):
            raise ConnectionError(answer.text)

    def _read(self) -> Answer:
        line = self._file.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionError("the server closed the connection")
        kind, rest = line[:1], line[1:-2]
        match kind:
            case b"+":
                return Status(rest.decode(errors="replace"))
            case b"-":
                return ErrorReply(rest.decode(errors="replace"))
            case b":":
                return int(rest)
            case b"$":
                return None if rest == b"-1" else self._read_exactly(int(rest))
            case b"*":
                return None if rest == b"-1" else [self._read() for _ in range(int(rest))]
        raise ConnectionError(f"the answer isn't the Redis protocol: {line[:60]!r}")

    def _read_exactly(self, num_bytes: int) -> bytes:
        content = self._file.read(num_bytes + 2)
        if len(content) < num_bytes + 2:
            raise ConnectionError("the server closed the connection")
        return content[:-2]


def encode(words: Sequence[str | bytes]) -> bytes:
    """A command on the wire. Text that came from the command line undecodable goes out as the bytes it was."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        content = word if isinstance(word, bytes) else word.encode("utf-8", "surrogateescape")
        parts.append(b"$%d\r\n%b\r\n" % (len(content), content))
    return b"".join(parts)


def pretty(answer: Answer, indent: int = 0) -> str:
    """The answer as redis-cli prints it on a terminal."""
    match answer:
        case list():
            text = _pretty_list(answer, indent)
        case bytes():
            text = quoted(answer)
        case Status(words):
            text = words
        case ErrorReply(words):
            text = f"(error) {words}"
        case None:
            text = "(nil)"
        case _:
            text = f"(integer) {answer}"
    return text


def _pretty_list(items: list[Answer], indent: int) -> str:
    """Numbered lines; a list in a list is indented by the width of its label."""
    width = len(str(len(items)))
    rows = []
    for number, item in enumerate(items, 1):
        label = f"{number:>{width}}) "
        rows.append(label + pretty(item, indent + len(label)))
    return ("\n" + " " * indent).join(rows) or "(empty array)"


def plain(answer: Answer) -> str:
    """The answer as redis-cli prints it into a file or pipe: bare values, one a line."""
    match answer:
        case None:
            return ""
        case Status(text) | ErrorReply(text):
            return text
        case bytes():
            return answer.decode("utf-8", "surrogateescape")
        case list():
            return "\n".join(plain(item) for item in answer)
    return str(answer)


def quoted(content: bytes) -> str:
    """Bytes in double quotes with everything but printable ASCII escaped."""
    escapes = {0x22: '\\"', 0x5C: "\\\\", 0x0A: "\\n", 0x0D: "\\r", 0x09: "\\t", 0x07: "\\a", 0x08: "\\b"}
    return '"' + "".join(escapes.get(b) or (chr(b) if 0x20 <= b < 0x7F else f"\\x{b:02x}") for b in content) + '"'


def _options_of(url: str) -> dict[str, Any]:
    """What the URL says, in redis-py's words, which lets a database that is no number pass for 0."""
    path = urlsplit(url).path.strip("/")
    if not url.startswith("unix://") and path and not path.isdigit():
        raise ValueError(f"database {path!r} is no number")
    options: dict[str, Any] = dict(parse_url(url))  # type: ignore[no-untyped-call]
    return options


def _connect(options: dict[str, Any], *, is_tls: bool) -> socket.socket:
    if "path" in options:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_CONNECT_TIMEOUT_S)
        connection.connect(options["path"])
        return connection
    host = options.get("host") or "localhost"
    connection = socket.create_connection((host, options.get("port") or 6379), timeout=_CONNECT_TIMEOUT_S)
    if not is_tls:
        return connection
    context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"), capath=options.get("ssl_ca_path"))
    context.check_hostname = options.get("ssl_check_hostname", True)
    if options.get("ssl_cert_reqs") == "none":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if options.get("ssl_certfile"):
        password = options.get("ssl_password")
        context.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"), password)
    return context.wrap_socket(connection, server_hostname=host)
