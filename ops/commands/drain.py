"""`pagemill drain`: one worker stops, wherever it runs."""

import click

from ops.queue_control import set_config
from ops.server import client_settings, find_server, run_on_link, server_options
from worker.errors import StartupError
from worker.streams.connection import Link
from worker.streams.keys import QueueKeys


@click.command()
@server_options
@click.argument("worker_id")
def command(queue: str | None, redis_url: str | None, data_dir: str | None, worker_id: str) -> None:
    """Stop the worker WORKER_ID, which `pagemill workers` shows, as SIGTERM does.

    It takes no more jobs, lets those that run finish within its grace period, hands over what is left, and ends.
    """
    settings = client_settings(queue, redis_url, data_dir)
    url = find_server(settings)
    if not run_on_link(url, lambda link: _is_known(link, settings.queue, worker_id), settings.queue):
        raise StartupError(
            f"queue {settings.queue} has no worker {worker_id[:80]!r}: `pagemill workers` lists those it has"
        )
    run_on_link(url, lambda link: set_config(link, settings.queue, {f"drain:{worker_id}": "1"}), settings.queue)
    click.echo(f"worker {worker_id} was told to stop: `pagemill workers` shows it until it has")


async def _is_known(link: Link, queue: str, worker_id: str) -> bool:
    return bool(await link.call("EXISTS", QueueKeys(queue).worker(worker_id)) == 1)
