"""`pagemill workers`: the registry."""

from functools import partial

import click

from ops.server import client_settings, find_server, run_on_link, server_options
from ops.tables import age, print_queues_table
from worker.streams.connection import Link
from worker.streams.keys import QueueKeys

# Shown first, where a worker says them; whatever else it says comes after.
_FIRST = ("model", "version", "slots", "running", "waiting")


@click.command()
@server_options
def command(queue: str | None, redis_url: str | None, data_dir: str | None) -> None:
    """Show the workers that serve each queue, and when each was last heard of."""
    settings = client_settings(queue, redis_url, data_dir, takes_several=True)
    url = find_server(settings)
    beats = [(name, *beat) for name in settings.queues for beat in run_on_link(url, partial(_look, queue=name), name)]
    served = {name for name, *_ in beats}
    for name in settings.queues:
        if name not in served:
            click.echo(f"No worker serves queue {name} now", err=True)
    said = {name for *_, fields in beats for name in fields} - {"beat"}
    columns = [name for name in _FIRST if name in said] + sorted(said - {*_FIRST})
    rows = [[*words, *(fields.get(name, "") for name in columns)] for *words, fields in beats]
    print_queues_table("Workers", settings.queues, ("worker", "last beat", *columns), rows)


async def _look(link: Link, queue: str) -> list[tuple[str, str, dict[str, str]]]:
    """Name, age of the last beat and the fields of each worker.

    Where no worker is left that would take the lost ones out of the registry, their missing fields tell.
    """
    keys = QueueKeys(queue)
    seconds, micros = await link.call("TIME")
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    scores = await link.call("ZRANGE", keys.workers, 0, -1, "WITHSCORES")
    beats = []
    for raw_name, score in zip(scores[::2], scores[1::2], strict=True):
        answer = await link.call("HGETALL", keys.worker("").encode() + raw_name)
        flat = [word.decode("utf-8", "replace") for word in answer]
        if flat:
            name, last_beat = raw_name.decode("utf-8", "replace"), age(now_ms - float(score)) + " ago"
            beats.append((name, last_beat, dict(zip(flat[::2], flat[1::2], strict=True))))
    return beats
