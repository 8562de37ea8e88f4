"""`pagemill cancel`: a durable mark that a worker meets, whether the job waits or runs."""

import click

from ops.server import client_settings, find_server, server_options
from worker.client import Client


@click.command()
@server_options
@click.option("--reason", default="cancelled by an operator", show_default=True, help="Kept with the mark.")
@click.argument("job_id")
def command(queue: str | None, redis_url: str | None, data_dir: str | None, reason: str, job_id: str) -> None:
    """Cancel the job JOB_ID, whether it waits or runs."""
    settings = client_settings(queue, redis_url, data_dir)
    with Client(find_server(settings), settings.queue, retry_s=0) as client:
        client.cancel(job_id, reason)
    click.echo(f"{job_id}: cancel mark set on queue {settings.queue}")
