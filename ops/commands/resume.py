"""`pagemill resume`: a paused queue goes on."""

import click

from ops.queue_control import is_paused, is_served, set_config
from ops.server import client_settings, find_server, run_on_link, server_options


@click.command()
@server_options
def command(queue: str | None, redis_url: str | None, data_dir: str | None) -> None:
    """Let a queue go on that `pagemill pause` has stopped."""
    settings = client_settings(queue, redis_url, data_dir)
    url = find_server(settings)
    was_paused = run_on_link(url, lambda link: is_paused(link, settings.queue), settings.queue)
    run_on_link(url, lambda link: set_config(link, settings.queue, {"paused": None}), settings.queue)
    click.echo(f"queue {settings.queue} goes on" if was_paused else f"queue {settings.queue} was not paused")
    if not run_on_link(url, lambda link: is_served(link, settings.queue), settings.queue):
        click.echo(f"No worker serves queue {settings.queue} now", err=True)
