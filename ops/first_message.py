"""What `serve` shows once it stands: a first exchange, and the lines to try from another terminal."""

import secrets
import shlex
import shutil
from pathlib import Path

import click
import platformdirs

from ops.server import URL_FILE
from ops.streamed_text import print_reply
from worker.client import AsyncClient
from worker.errors import PagemillError
from worker.settings import DEMO_MODEL, Settings, served_name
from worker.settings_words import env_name
from worker.streams.connection import redacted
from worker.streams.keys import QueueKeys

_JOKE = "Tell me a joke"


async def show_start(settings: Settings, message: str | None, metrics_url: str | None) -> None:
    """Send `message`, if there is one, stream its reply to stdout, then print the lines to try.

    `settings.redis_url` is the server in use. A failure is told and doesn't stop the worker.
    """
    if message is not None:
        await _exchange(settings, message)
    for line in lines_to_try(settings):
        click.echo(line)
    if metrics_url is not None:
        click.echo(f"Metrics: {metrics_url}/metrics")
    click.echo("Ctrl-C stops the worker.")


async def _exchange(settings: Settings, message: str) -> None:
    click.echo(f"> {message}")
    client = AsyncClient(_url(settings), settings.queue)
    messages = [{"role": "user", "content": message}]
    try:
        reply = await print_reply(client, await client.submit(messages, temperature=0))
        if reply.error is not None:
            click.echo("the first message failed: {}: {}".format(*reply.error), err=True)
    except PagemillError as error:
        click.echo(f"the first message got no reply: {error}", err=True)
    finally:
        await client.aclose()


def lines_to_try(settings: Settings) -> list[str]:
    """Commands for another terminal, ready to paste: by redis-cli where there is one, and by `pagemill redis`."""
    keys = QueueKeys(settings.queue)
    queue_flag = "" if settings.queue == served_name(DEMO_MODEL) else f" --queue {settings.queue}"
    server_flag = _server_flag(settings)
    tools = [f"pagemill redis{server_flag}"]
    cli = shutil.which("redis-cli") or shutil.which("valkey-cli")
    if cli is not None:
        tools.insert(0, f"{Path(cli).name} -u {_shell_url(settings)}")
    lines = ["", "Serving. From another terminal:", "", f"  pagemill enqueue{server_flag}{queue_flag} '{_JOKE}'"]
    for tool in tools:
        job_id = f"joke-{secrets.token_hex(4)}"
        job = ["XADD", keys.jobs("normal"), "*", "id", job_id, "prompt", _JOKE, "max_tokens", "64"]
        read = ["XREAD", "BLOCK", "4000", "COUNT", "256", "STREAMS", keys.reply(job_id), "0-0"]
        lines += ["", f"  {tool} {shlex.join(job)}", f"  {tool} {shlex.join(read)}"]
    return [*lines, ""]


def _url(settings: Settings) -> str:
    return "" if settings.redis_url is None else settings.redis_url.get_secret_value()


def _server_flag(settings: Settings) -> str:
    """How a command finds the server: the embedded one in the default place needs no word."""
    if not settings.embedded:
        return f" --redis-url {_shell_url(settings)}"
    if settings.data_dir == platformdirs.user_data_path("pagemill"):
        return ""
    return f" --data-dir {shlex.quote(str(settings.data_dir))}"


def _shell_url(settings: Settings) -> str:
    """The URL as a word for the shell. One that holds a password is not shown: the word says where to take it from."""
    if settings.embedded:
        return f'"$(cat {shlex.quote(str(settings.data_dir / URL_FILE))})"'
    url = _url(settings)
    return shlex.quote(url) if redacted(url) == url else f'"${env_name("redis_url")}"'
