"""`pagemill pause`: nobody takes jobs from the queue until it is resumed."""

import click

from ops.queue_control import is_served, set_config
from ops.server import client_settings, find_server, run_on_link, server_options


@click.command()
@server_options
def command(queue: str | None, redis_url: str | None, data_dir: str | None) -> None:
    """Have all workers of a queue take no more jobs from it, until `pagemill resume`.

    Running jobs finish. What waits stays; jobs that are overdue or called off are ended all the same.
    """
    settings = client_settings(queue, redis_url, data_dir)
    url = find_server(settings)
    run_on_link(url, lambda link: set_config(link, settings.queue, {"paused": "1"}), settings.queue)
    click.echo(f"queue {settings.queue} is paused: `pagemill resume --queue {settings.queue}` lets it go on")
    if not run_on_link(url, lambda link: is_served(link, settings.queue), settings.queue):
        click.echo(f"No worker serves queue {settings.queue} now", err=True)
