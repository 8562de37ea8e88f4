"""The least rights that Redis users need: the rules to ship, and a look at which of a worker's are missing."""

from collections.abc import Iterator

from worker.streams.connection import Command, Link
from worker.streams.errors import ServerError
from worker.streams.keys import GROUP, QueueKeys

_WORKER = (
    "resetchannels -@all +@stream -xsetid -xtrim {groups} +eval +evalsha +script|load +get +set +strlen +del +unlink "
    "+exists +pexpire +pttl +hset +hget +hgetall +hmget +hdel +hincrby +zadd +zrange +zrangebyscore +zrem +time +info "
    "+wait +multi +exec +discard +hello +auth +ping{more} ~pagemill:{{*}}:*"
)
# Subcommands can be taken away since 7.0; before, they can only be granted.
_GROUPS, _GROUPS_6 = "-xgroup|destroy -xgroup|setid", "-xgroup +xgroup|create +xgroup|delconsumer"
_CLIENT = (
    "resetchannels -@all +xadd +xread +xrange +xlen +hgetall +hello +auth +ping{more} %W~pagemill:{{*}}:jobs:high "
    "%W~pagemill:{{*}}:jobs:normal %W~pagemill:{{*}}:jobs:low %W~pagemill:{{*}}:control %R~pagemill:{{*}}:reply:* "
    "%R~pagemill:{{*}}:state:* (-@all +set %W~pagemill:{{*}}:cancel:* %W~pagemill:{{*}}:prompt:*)"
)
# Before 7.0 a pattern stands for reading and writing: such a client is trusted to leave replies alone.
_CLIENT_6 = (
    "resetchannels -@all +xadd +xread +xrange +xlen +hgetall +set +hello +auth +ping{more} ~pagemill:{{*}}:jobs:high "
    "~pagemill:{{*}}:jobs:normal ~pagemill:{{*}}:jobs:low ~pagemill:{{*}}:control ~pagemill:{{*}}:reply:* "
    "~pagemill:{{*}}:state:* ~pagemill:{{*}}:cancel:* ~pagemill:{{*}}:prompt:*"
)
# What finding the server takes. All of it saves detours only: whoever lacks it learns the same by trying.
_MORE = {"single": "", "sentinel": " +role", "cluster": " +cluster|slots +asking"}
TOPOLOGIES = tuple(_MORE)


def worker_rule(version: str = "7.0", topology: str = "single") -> str:
    """What a worker may do, as words of ACL SETUSER. `version` is what INFO calls `redis_version`, for Valkey too."""
    return _WORKER.format(groups=_GROUPS_6 if _is_old(version) else _GROUPS, more=_MORE[topology])


def client_rule(version: str = "7.0", topology: str = "single") -> str:
    """What a client may do. What stands in brackets is one word."""
    return (_CLIENT_6 if _is_old(version) else _CLIENT).format(more=_MORE[topology])


def rule_words(rule: str) -> list[str]:
    """The rule as arguments of ACL SETUSER."""
    head, bracket, selector = rule.partition(" (")
    return [*head.split(), *([f"({selector}"] if bracket else [])]


async def missing_rights(link: Link, keys: QueueKeys) -> list[str]:
    """What the worker's user lacks, as words of a rule: `+xack`, `~pagemill:{*}:*`. Raises ConnectionLostError.

    Each command that a worker sends is tried once, in a form that changes nothing: a user who may ask for rights has
    more than a worker needs.
    """
    probes = list(_probes(keys))
    missing = []
    for (right, _), answer in zip(probes, await link.batch([command for _, command in probes]), strict=True):
        if isinstance(answer, ServerError) and answer.code == "NOPERM":
            missing.append("~pagemill:{*}:*" if "key" in str(answer) else f"+{right}")
    return list(dict.fromkeys(missing))


def _probes(keys: QueueKeys) -> Iterator[tuple[str, Command]]:
    """Rights, and commands that need them. No such key exists, and what would make one is said wrongly on purpose."""
    key = keys.worker("nobody")
    yield "xadd", ("XADD", key, "NOMKSTREAM", "*", "name", "value")
    yield "xread", ("XREAD", "COUNT", 1, "STREAMS", key, "0-0")
    yield "xreadgroup", ("XREADGROUP", "GROUP", GROUP, "nobody", "COUNT", 1, "STREAMS", key, ">")
    yield "xack", ("XACK", key, GROUP, "0-1")
    yield "xdel", ("XDEL", key, "0-1")
    yield "xclaim", ("XCLAIM", key, GROUP, "nobody", 0, "0-1")
    yield "xautoclaim", ("XAUTOCLAIM", key, GROUP, "nobody", 0, "0-0")
    yield "xpending", ("XPENDING", key, GROUP)
    yield "xrange", ("XRANGE", key, "-", "+", "COUNT", 1)
    yield "xrevrange", ("XREVRANGE", key, "+", "-", "COUNT", 1)
    yield "xlen", ("XLEN", key)
    yield "xinfo|groups", ("XINFO", "GROUPS", key)
    yield "xinfo|consumers", ("XINFO", "CONSUMERS", key, GROUP)
    yield "xgroup|create", ("XGROUP", "CREATE", key, GROUP, "0")
    yield "xgroup|delconsumer", ("XGROUP", "DELCONSUMER", key, GROUP, "nobody")
    yield "eval", ("EVAL", "return 1", 0)
    yield "evalsha", ("EVALSHA", "0" * 40, 0)
    yield "get", ("GET", key)
    yield "set", ("SET", key, "value", "no option")
    yield "strlen", ("STRLEN", key)
    yield "del", ("DEL", key)
    yield "exists", ("EXISTS", key)
    yield "pexpire", ("PEXPIRE", key, 1)
    yield "hset", ("HSET", key, "field", "value", "a field without a value")
    yield "hget", ("HGET", key, "field")
    yield "hdel", ("HDEL", key, "field")
    yield "hgetall", ("HGETALL", key)
    yield "hmget", ("HMGET", key, "field")
    yield "zadd", ("ZADD", key, "no number", "member")
    yield "zrange", ("ZRANGE", key, 0, 0)
    yield "zrangebyscore", ("ZRANGEBYSCORE", key, 0, 0)
    yield "zrem", ("ZREM", key, "member")
    yield "time", ("TIME",)


def _is_old(version: str) -> bool:
    return int(version.partition(".")[0]) < 7
