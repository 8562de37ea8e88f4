"""`pagemill dead`: jobs that could not be answered, or that were given up."""

import re
from typing import Any

import click

from ops.params import COUNT
from ops.server import client_settings, find_server, run_on_link, server_options
from ops.tables import print_table
from worker.errors import StartupError
from worker.streams.connection import Link
from worker.streams.keys import QueueKeys

_ENTRY_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
_FIELDS = (b"id", b"error", b"deliveries", b"workers", b"source_id")


@click.command()
@server_options
@click.option("--limit", type=COUNT, default=50, show_default=True, help="Most dead letters to list.")
@click.argument("entry_id", required=False)
def command(queue: str | None, redis_url: str | None, data_dir: str | None, limit: int, entry_id: str | None) -> None:
    """Show the newest dead letters, or all fields of the one whose ENTRY_ID the list shows."""
    settings = client_settings(queue, redis_url, data_dir)
    url = find_server(settings)
    if entry_id is not None and not _ENTRY_ID.fullmatch(entry_id):
        raise StartupError(f"{entry_id[:80]!r} is no entry id, like 1764464400123-0: `pagemill dead` lists them")
    if entry_id is None:
        rows = run_on_link(url, lambda link: _newest(link, settings.queue, limit), settings.queue)
        columns = ("entry", *(name.decode() for name in _FIELDS))
        print_table(f"Dead letters of {settings.queue}", columns, rows)
    else:
        fields = run_on_link(url, lambda link: _one(link, settings.queue, entry_id), settings.queue)
        print_table(f"Dead letter {entry_id}", ("field", "value"), list(fields.items()))


async def _newest(link: Link, queue: str, limit: int) -> list[list[Any]]:
    entries = await link.call("XREVRANGE", QueueKeys(queue).dead, "+", "-", "COUNT", limit)
    rows = []
    for entry, flat in entries:
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        rows.append([entry, *(fields.get(name, b"") for name in _FIELDS)])
    return rows


async def _one(link: Link, queue: str, entry_id: str) -> dict[bytes, bytes]:
    entries = await link.call("XRANGE", QueueKeys(queue).dead, entry_id, entry_id)
    if not entries:
        raise StartupError(f"queue {queue} has no dead letter {entry_id}: `pagemill dead` lists them")
    flat = entries[0][1]
    return dict(zip(flat[::2], flat[1::2], strict=True))
