"""`pagemill enqueue`: one job, and its reply as it comes."""

import asyncio
import sys
from typing import Any

import click

from ops.queue_control import is_served
from ops.server import client_settings, find_server, run_on_link, server_options
from ops.streamed_text import print_reply
from ops.utf8 import as_utf8, decode_utf8
from worker.client import AsyncClient, Prompt
from worker.reply_events import Reply


@click.command()
@server_options
@click.option("--raw", is_flag=True, help="TEXT is a prompt to complete as it stands, not a chat message.")
@click.option("--system", help="A system message before TEXT.")
@click.option("--max-tokens", type=int, help="Most tokens of the reply. [default: what is left of the context]")
@click.option("--temperature", type=float, help="0 takes the likeliest token each time.")
@click.option("--seed", type=int, help="The same seed gives the same reply.")
@click.option(
    "--lane",
    type=click.Choice(["high", "normal", "low"]),
    default="normal",
    show_default=True,
    help="Of these `high` is served first.",
)
@click.option("--id", "job_id", help="The job's id. [default: a random one]")
@click.option("--field", "pairs", multiple=True, metavar="NAME=VALUE", help="Any other field of the job; repeatable.")
@click.argument("text")
@click.pass_context
def command(
    ctx: click.Context,
    queue: str | None,
    redis_url: str | None,
    data_dir: str | None,
    raw: bool,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    lane: str,
    job_id: str | None,
    pairs: tuple[str, ...],
    text: str,
) -> None:
    """Send TEXT as a chat message and stream the reply; `-` reads TEXT from standard input.

    Ctrl-C cancels the job. A job that fails ends with exit code 1 and its error on stderr.
    """
    if raw and system is not None:
        raise click.UsageError("--system belongs to a chat message, so it can't stand beside --raw.")
    settings = client_settings(queue, redis_url, data_dir)
    url = find_server(settings)
    if text == "-":
        text = decode_utf8("standard input", sys.stdin.buffer.read())
    for name, word in [("TEXT", text), ("--system", system or ""), *[("--field", pair) for pair in pairs]]:
        as_utf8(name, word)
    fields = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    job = {name: value for name, value in fields.items() if value is not None} | _extra_fields(pairs)
    if not run_on_link(url, lambda link: is_served(link, settings.queue), settings.queue):
        click.echo(f"No worker serves queue {settings.queue} now; the job waits for one. Ctrl-C cancels it.", err=True)
    prompt = text if raw else _chat(system, text)
    try:
        reply = asyncio.run(_send(url, settings.queue, prompt, {"job_id": job_id, "lane": lane, **job}))
    except KeyboardInterrupt:
        ctx.exit(130)
    if reply.error is not None:
        code, message = reply.error
        click.echo(f"pagemill: the job failed: {code}: {message}", err=True)
        ctx.exit(1)


async def _send(url: str, queue: str, prompt: Prompt, job: dict[str, Any]) -> Reply:
    """Submit a job and print its reply. Ctrl-C, which arrives as a cancellation, cancels the job too."""
    client = AsyncClient(url, queue)
    try:
        job_id = await client.submit(prompt, **job)
        try:
            return await print_reply(client, job_id)
        except asyncio.CancelledError:
            await client.cancel(job_id)
            click.echo(f"\npagemill: cancelled {job_id}", err=True)
            raise
    finally:
        await client.aclose()


def _chat(system: str | None, text: str) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": text}]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


# Fields that other words of the command set.
OWN_OPTIONS = {"id": "--id", "job_id": "--id", "lane": "--lane", "prompt": "TEXT with --raw", "messages": "TEXT"}


def _extra_fields(pairs: tuple[str, ...]) -> dict[str, str]:
    fields = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise click.UsageError(f"--field {pair!r}: use NAME=VALUE, like --field top_p=0.9.")
        if name in OWN_OPTIONS:
            raise click.UsageError(f"--field {pair!r}: {name} is set by {OWN_OPTIONS[name]}.")
        fields[name] = value
    return fields
