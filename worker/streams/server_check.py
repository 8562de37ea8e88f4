"""Whether a server is fit to work with, asked once at start; one that needs time is waited for."""

import structlog

from worker.errors import StartupError
from worker.streams.address import Topology, parse_address, redacted
from worker.streams.connection import Backoff, Link
from worker.streams.errors import ConnectionLostError, LoginRefusedError, ServerError, StreamsError
from worker.streams.health import ServerHealth
from worker.streams.keys import QueueKeys
from worker.streams.rights import missing_rights

MIN_VERSION = (6, 2)
# Longest wait between two looks at a server that isn't ready.
LOOK_AGAIN_S = 1.0

log = structlog.get_logger(__name__)


async def check_server(url: str, queue: str | None = None, health: ServerHealth | None = None) -> str:
    """The version of the server that has `queue`, once it serves. `health` tells what is waited for.

    A server that loads its data, has no room for another client, or whose primary is being replaced is waited for.
    Raises StartupError, one line, where waiting wouldn't help.
    """
    link = Link(url, "check", queue)
    try:
        info = await _info_when_ready(link, url, health or ServerHealth())
        missing = [] if queue is None else await missing_rights(link, QueueKeys(queue))
    except ConnectionLostError as error:
        raise StartupError(f"{redacted(url)}: {error}. See whether it is still there") from error
    finally:
        await link.close()
    version = info.get("redis_version", "0")
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        raise StartupError(f"{redacted(url)}: the server's version is {version}: Redis 6.2 or Valkey is needed")
    if _is_replica(info):
        primary = f"{info.get('master_host')}:{info.get('master_port')}"
        raise StartupError(
            f"{redacted(url)}: the server is a read-only replica of {primary}: name that one, or the Sentinels "
            "(redis+sentinel://host:26379/NAME), which follow a failover"
        )
    _check_memory(url, info)
    if missing:
        raise StartupError(
            f"{redacted(url)}: the user may not do what a worker does: grant {' '.join(missing)} "
            "(`pagemill acl worker` prints the whole rule)"
        )
    if info.get("aof_enabled") == "0":
        log.warning(
            "redis_forgets", effect="jobs and replies are lost when the server ends", advice="set appendonly to yes"
        )
    return info.get("valkey_version", version)


def _check_memory(url: str, info: dict[str, str]) -> None:
    policy = info.get("maxmemory_policy")
    if policy is None:
        log.warning("redis_policy_unknown", advice="see to it that maxmemory-policy is noeviction")
    elif policy != "noeviction":
        limit = "" if info.get("maxmemory", "0") != "0" else " as soon as maxmemory is set"
        raise StartupError(
            f"{redacted(url)}: maxmemory-policy is {policy}, which evicts jobs and replies{limit}: set it to noeviction"
        )


async def _info_when_ready(link: Link, url: str, health: ServerHealth) -> dict[str, str]:
    """What INFO says once the server serves. Raises StartupError."""
    backoff, topology = Backoff(LOOK_AGAIN_S), parse_address(url).topology
    while True:
        try:
            info = _parse_info(await link.call("INFO"))
            why_not = _why_not_ready(info, topology)
            if why_not is None:
                health.heard("check")
                health.answered("check", "INFO")
                return info
            health.refused("check", "INFO", why_not)
            if why_not.is_wrong_server:
                await link.reset()
        except LoginRefusedError as error:
            raise StartupError(f"{redacted(url)}: {_login_words(error)}") from error
        except ConnectionLostError as error:
            if not error.is_passing:
                raise StartupError(f"{redacted(url)}: {_lost_words(error, url)}") from error
            health.lost("check", error)
        except ServerError as error:
            if not error.is_temporary:
                raise StartupError(f"{redacted(url)}: Redis refuses: {_refusal_words(error)}") from error
            health.refused("check", "INFO", error)
        await backoff.wait()


def _why_not_ready(info: dict[str, str], topology: Topology) -> ServerError | None:
    """What a server would answer to all but INFO, if that will pass."""
    if info.get("loading", "0") != "0":
        return ServerError("LOADING")
    # Where somebody replaces primaries there will be another one; the one that is named may be too old.
    if _is_replica(info) and topology is not Topology.SINGLE:
        return ServerError("READONLY")
    return None


def _is_replica(info: dict[str, str]) -> bool:
    return info.get("role") == "slave" and info.get("slave_read_only") != "0"


def _login_words(error: LoginRefusedError) -> str:
    if "DB index" in str(error):
        return "the server has no database of this number: name another at the end of the URL"
    if "Sentinel" in str(error):
        return str(error)
    if "permission" in str(error):
        return f"{error}. A database other than 0 takes the right +select"
    return "Redis refuses the user or password: check them in the URL"


def _lost_words(error: ConnectionLostError, url: str) -> str:
    topology = parse_address(url).topology
    if "certificate" in str(error) or "SSL" in str(error):
        return f"{error}. Name the certificate's authority with ssl_ca_certs in the URL; see docs/deploying.md"
    if topology is Topology.SENTINEL:
        return f"{error}. Check hosts and name in the URL"
    return f"{error}. Start a server there, or name another with --redis-url"


def _refusal_words(error: StreamsError) -> str:
    return " ".join(str(error).split()).rstrip(". ") + ". Check the user's rights (`pagemill acl worker` prints them)"


def _parse_info(raw: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in raw.decode("utf-8", "replace").splitlines() if not line.startswith("#"))
    return {name: value for name, _, value in lines if name}
