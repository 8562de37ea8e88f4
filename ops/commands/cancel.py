"""`pagemill cancel`: a durable mark that a worker meets, whether the job waits or runs."""

import click

from ops.server import client_settings, find_server, server_options
from ops.utf8 import as_utf8
from worker.client import Client


@click.command()
@server_options
@click.option(
    "--reason", default="cancelled by an operator", show_default=True, help="Told to who waits for the reply."
)
@click.argument("job_id")
@click.pass_context
def command(
    ctx: click.Context, queue: str | None, redis_url: str | None, data_dir: str | None, reason: str, job_id: str
) -> None:
    """Cancel the job JOB_ID, whether it waits or runs.

    A job that has ended already is left as it is, with exit code 1.
    """
    settings = client_settings(queue, redis_url, data_dir)
    as_utf8("--reason", reason)
    with Client(find_server(settings), settings.queue, retry_s=0) as client:
        status = client.status(job_id)
        if status not in (None, "queued", "running"):
            click.echo(f"pagemill: {job_id} has ended already ({status}): there is nothing to cancel", err=True)
            ctx.exit(1)
        client.cancel(job_id, reason)
    click.echo(f"{job_id}: cancel mark set on queue {settings.queue}")
    if status is None:
        click.echo(
            f"No worker of queue {settings.queue} has taken a job {job_id}. If it waits there, it ends as soon as one "
            "takes it; if the id is wrong, `pagemill jobs` lists those that run.",
            err=True,
        )
