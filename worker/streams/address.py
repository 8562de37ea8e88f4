"""What a Redis URL says: one server, a primary that Sentinels name, or a Cluster; over TCP, TLS or a Unix socket.

    redis://[user:password@]host:port/db          rediss:// is the same over TLS
    unix:///path?db=0
    redis+sentinel://[user:password@]host:26379,host:26379/NAME/db?sentinel_password=...
    redis+cluster://[user:password@]host:7000,host:7001

What stands after `?` are the driver's options by their own names: `ssl_ca_certs`, `socket_timeout`, ...
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from redis.asyncio.connection import Connection, parse_url
from redis.exceptions import RedisError

from worker.errors import StartupError

# No answer for this long means that the connection is dead. A blocking read waits for less.
SOCKET_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 5.0
SENTINEL_PORT, REDIS_PORT = 26379, 6379
_FILE_OPTIONS = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")

Node = tuple[str, int]
"""Host and port."""


class Topology(StrEnum):
    """How the server is found."""

    SINGLE = "single"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class Address:
    """A URL understood.

    `nodes` are the server, the Sentinels, or the nodes of the Cluster that are asked first; empty for a Unix socket.
    `options` are the driver's for the server itself, without host and port; `sentinel_options` those for Sentinels.
    `timeout_s`: seconds that an answer may take. `tls` are the certificates, which are read once.
    """

    url: str
    topology: Topology
    nodes: tuple[Node, ...]
    kind: type[Any]
    options: Mapping[str, Any]
    timeout_s: float
    service: str = ""
    sentinel_options: Mapping[str, Any] | None = None
    tls: Any = None

    def of_sentinels(self) -> "Address":
        """How to talk to the Sentinels."""
        return replace(self, options=self.sentinel_options or {})

    def plain_url(self, node: Node) -> str:
        """The URL of one server of it, for tools that know no other."""
        if self.topology is Topology.SINGLE:
            return self.url
        parts = urlsplit(self.url)
        login, at, _ = parts.netloc.rpartition("@")
        pairs = [pair for pair in parse_qsl(parts.query) if not pair[0].startswith("sentinel_")]
        host = f"[{node[0]}]" if ":" in node[0] else node[0]
        query = f"?{urlencode(pairs)}" if pairs else ""
        scheme = parts.scheme.partition("+")[0]
        return f"{scheme}://{login}{at}{host}:{node[1]}/{self.options.get('db', 0)}{query}"


@lru_cache(maxsize=64)
def parse_address(url: str) -> Address:
    """What `url` says. Raises StartupError, one line without the password."""
    try:
        parts = urlsplit(url)
        scheme, _, way = parts.scheme.partition("+")
        if way and scheme not in ("redis", "rediss"):
            raise ValueError(f"there is no {parts.scheme}")
        match way:
            case "":
                address = _single(url)
            case "sentinel":
                address = _sentinel(url)
            case "cluster":
                address = _cluster(url)
            case _:
                raise ValueError(f"there is no {parts.scheme}")
        example = address.kind(**address.options)  # the driver has its own opinion of options
    except (ValueError, TypeError, RedisError):
        raise not_a_url(url) from None
    for name in _FILE_OPTIONS:
        path = address.options.get(name)
        if path is not None and not Path(path).exists():
            raise StartupError(f"{redacted(url)}: {name} names {path}, which doesn't exist")
    return replace(address, tls=getattr(example, "ssl_context", None))


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
        f"{redacted(url)} is no Redis URL: use redis://[user:password@]host:port/db, rediss://, unix:///path, "
        "redis+sentinel://host:port,host:port/NAME or redis+cluster://host:port,host:port, "
        "with / # ? @ : % in a password as %2F %23 %3F %40 %3A %25 (docs/deploying.md)"
    )


def _single(url: str) -> Address:
    parts = urlsplit(url)
    path = parts.path.strip("/")
    if parts.scheme in ("redis", "rediss") and path and not path.isdigit():
        raise ValueError(f"database {path!r} is no number")
    if parts.scheme == "unix" and not path:
        raise ValueError("it names no socket")
    kind, options, timeout_s, node = _driver_options(url)
    nodes = () if parts.scheme == "unix" else (node,)
    return Address(url, Topology.SINGLE, nodes, kind, options, timeout_s)


def _sentinel(url: str) -> Address:
    parts = urlsplit(url)
    service, _, db = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError("it names no primary")
    own = dict(parse_qsl(parts.query))
    login = {
        name.removeprefix("sentinel_"): own.pop(name)
        for name in ("sentinel_username", "sentinel_password")
        if name in own
    }
    kind, options, timeout_s, _ = _driver_options(_of_one_server(url, db, own))
    for_sentinels = {name: value for name, value in options.items() if name not in ("username", "password", "db")}
    return Address(
        url,
        Topology.SENTINEL,
        _hosts(parts.netloc, SENTINEL_PORT),
        kind,
        options,
        timeout_s,
        service=unquote(service),
        sentinel_options=for_sentinels | login,
    )


def _cluster(url: str) -> Address:
    parts = urlsplit(url)
    kind, options, timeout_s, _ = _driver_options(
        _of_one_server(url, parts.path.strip("/"), dict(parse_qsl(parts.query)))
    )
    if options.pop("db", 0):
        raise ValueError("a Cluster has database 0 alone")
    return Address(url, Topology.CLUSTER, _hosts(parts.netloc, REDIS_PORT), kind, options, timeout_s)


def _of_one_server(url: str, db: str, query: Mapping[str, str]) -> str:
    """The same login, database and options as a URL that the driver knows; its host stands for any."""
    parts = urlsplit(url)
    if db and not db.isdigit():
        raise ValueError(f"database {db!r} is no number")
    login, at, _ = parts.netloc.rpartition("@")
    words = f"?{urlencode(query)}" if query else ""
    return f"{parts.scheme.partition('+')[0]}://{login}{at}any:1/{db}{words}"


def _driver_options(url: str) -> tuple[type[Any], dict[str, Any], float, Node]:
    """The driver's class and options, how many seconds an answer may take, and the host.

    The driver gets no time limit of its own.
    """
    options: dict[str, Any] = dict(parse_url(url))
    if any(name.startswith("sentinel_") for name in options):
        raise ValueError("only Sentinels have such options")
    kind = options.pop("connection_class", Connection)
    timeout_s = float(options.pop("socket_timeout", SOCKET_TIMEOUT_S))
    options.setdefault("socket_connect_timeout", CONNECT_TIMEOUT_S)
    node = (options.pop("host", "localhost"), options.pop("port", REDIS_PORT))
    return kind, options, timeout_s, node


def _hosts(netloc: str, default_port: int) -> tuple[Node, ...]:
    """The hosts of a URL that names several."""
    nodes: list[Node] = []
    for place in netloc.rpartition("@")[2].split(","):
        parts = urlsplit(f"//{place}")
        if not parts.hostname:
            raise ValueError("a host is missing")
        nodes.append((parts.hostname, parts.port or default_port))
    return tuple(nodes)
