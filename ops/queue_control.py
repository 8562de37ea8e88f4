"""Writing what operators set for a queue, waking the workers that it is for, and whether there are any."""

from collections.abc import Mapping

from worker.errors import StartupError
from worker.streams.connection import Link
from worker.streams.keys import QueueKeys
from worker.streams.queue_config import QueueConfig, parse_config
from worker.streams.registry import read_config


async def set_config(link: Link, queue: str, fields: Mapping[str, str | None]) -> None:
    """Set these fields of the queue's config, or remove those that are None; then give the hint."""
    keys = QueueKeys(queue)
    given = [word for name, value in fields.items() if value is not None for word in (name, value)]
    removed = [name for name, value in fields.items() if value is None]
    if given:
        await link.call("HSET", keys.config, *given)
    if removed:
        await link.call("HDEL", keys.config, *removed)
    await link.call("XADD", keys.control, "MAXLEN", "~", 1000, "*", "op", "config")


async def queue_config(link: Link, queue: str) -> QueueConfig:
    """What operators have set for a queue."""
    return parse_config(await read_config(link, QueueKeys(queue)))


async def is_paused(link: Link, queue: str) -> bool:
    """Whether operators have paused a queue."""
    return (await queue_config(link, queue)).is_paused


async def is_served(link: Link, queue: str) -> bool:
    """Whether some worker's heartbeat has not expired; True where the registry can't be read, which says nothing."""
    keys = QueueKeys(queue)
    try:
        names = await link.call("ZRANGE", keys.workers, 0, -1)
    except StartupError:
        return True
    prefix = keys.worker("").encode()
    alive = await link.batch([("EXISTS", prefix + name) for name in names]) if names else []
    return any(answer == 1 for answer in alive)
