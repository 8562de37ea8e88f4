"""`pagemill jobs`: what waits and what runs."""

from collections import Counter
from functools import partial
from typing import Any

import click

from ops.params import COUNT
from ops.queue_control import is_paused, is_served
from ops.server import client_settings, find_server, run_on_link, server_options
from ops.tables import age, print_queues_table
from worker.streams.connection import Link
from worker.streams.errors import ServerError
from worker.streams.keys import GROUP, LANES, QueueKeys, is_waiting_name

# Records looked at in one go; a queue may keep very many of finished jobs.
_SCAN_COUNT = 500
_FIELDS = ("status", "worker", "attempt", "crashes", "tenant", "entry")


@click.command()
@server_options
@click.option("--limit", type=COUNT, default=50, show_default=True, help="Most unfinished jobs to list.")
def command(queue: str | None, redis_url: str | None, data_dir: str | None, limit: int) -> None:
    """Show the depth of each lane, the jobs that run, and how many ended how, for each queue."""
    settings = client_settings(queue, redis_url, data_dir, takes_several=True)
    url = find_server(settings)
    lanes: list[list[Any]] = []
    jobs: list[list[Any]] = []
    outcomes: list[list[Any]] = []
    for name in settings.queues:
        some_lanes, some_jobs, ended = run_on_link(url, partial(_look, queue=name), name)
        if run_on_link(url, partial(is_paused, queue=name), name):
            click.echo(f"Queue {name} is paused: `pagemill resume --queue {name}` lets it go on", err=True)
        if not run_on_link(url, partial(is_served, queue=name), name):
            click.echo(f"No worker serves queue {name} now", err=True)
        lanes += ([name, *row] for row in some_lanes)
        jobs += ([name, *row] for row in some_jobs[:limit])
        outcomes += ([name, *row] for row in sorted(ended.items()))
    print_queues_table("Lanes", settings.queues, ("lane", "waiting", "held", "oldest"), lanes)
    if jobs:
        print_queues_table("Unfinished jobs", settings.queues, ("id", *_FIELDS), jobs)
    if outcomes:
        print_queues_table("Records of ended jobs", settings.queues, ("outcome", "jobs"), outcomes)


async def _look(link: Link, queue: str) -> tuple[list[list[Any]], list[list[Any]], Counter[str]]:
    keys = QueueKeys(queue)
    seconds, _ = await link.call("TIME")
    lanes = [[lane, *await _lane(link, keys.jobs(lane), int(seconds) * 1000)] for lane in LANES]
    jobs: list[list[Any]] = []
    outcomes: Counter[str] = Counter()
    prefix = keys.state("").encode()
    cursor = b"0"
    while True:
        cursor, names = await link.call("SCAN", cursor, "MATCH", keys.state("*"), "COUNT", _SCAN_COUNT, "TYPE", "hash")
        records = await link.batch([("HMGET", name, *_FIELDS) for name in names]) if names else []
        for name, record in zip(names, records, strict=True):
            if isinstance(record, ServerError):  # it expired, and something else came in its place
                continue
            values = [(value or b"").decode("utf-8", "replace") for value in record]
            if values[0] in ("running", "queued"):
                jobs.append([name.removeprefix(prefix), *values])
            else:
                outcomes[values[0]] += 1
        if cursor == b"0":
            return lanes, jobs, outcomes


async def _lane(link: Link, key: str, now_ms: int) -> tuple[int | str, int | str, str]:
    """Jobs that wait, jobs that workers hold, and the age of the oldest of either."""
    kind = (await link.call("TYPE", key)).decode()
    if kind == "none":
        return 0, 0, ""
    if kind != "stream":
        return "", "", f"{key} holds a {kind}: RENAME or DEL it"
    groups = [dict(zip(flat[::2], flat[1::2], strict=True)) for flat in await link.call("XINFO", "GROUPS", key)]
    held = 0
    if any(group[b"name"] == GROUP.encode() for group in groups):
        consumers = await link.call("XINFO", "CONSUMERS", key, GROUP)
        pending = {flat[1].decode(): flat[3] for flat in consumers}
        held = sum(number for name, number in pending.items() if not is_waiting_name(name))
    length = await link.call("XLEN", key)
    stream = await link.call("XINFO", "STREAM", key)
    first = dict(zip(stream[::2], stream[1::2], strict=True))[b"first-entry"]
    oldest = age(now_ms - int(first[0].split(b"-")[0])) if first else ""
    return max(0, length - held), held, oldest
