"""What `serve` shows once it stands: a first exchange, and the lines to try from another terminal."""

import re
import secrets
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click
import platformdirs

from ops.output import OutputError, discard_output
from ops.server import own_command
from ops.streamed_text import print_reply
from worker.client import AsyncClient
from worker.embedded import URL_FILE
from worker.errors import PagemillError
from worker.logs import say
from worker.settings import DEMO_MODEL, Settings, served_name
from worker.streams.connection import Link
from worker.streams.keys import QueueKeys

if TYPE_CHECKING:
    from worker.service import Service

# What small models answer well, the likeliest token each time.
_QUESTION = "Name three primary colors."
_PROMPT = "The three primary colors are"
_SAMPLING = ("temperature", "0", "max_tokens", "16")
# Stands for a password in what is printed.
_PASSWORD = "PASSWORD"  # noqa: S105 - the word itself


async def show_start(settings: Settings, message: str | None, metrics_url: str | None, service: "Service") -> None:
    """Send `message`, if there is one, stream its reply to stdout, then print the lines to try.

    `settings.redis_url` is the server in use. A failure is told and doesn't stop the worker. If `service` is told to
    stop meanwhile, nothing is left to try.
    """
    try:
        if message is not None:
            await _exchange(settings, message)
        if not service.is_stopping:
            for line in lines_to_try(settings):
                click.echo(line)
            if metrics_url is not None:
                click.echo(f"Metrics: {metrics_url}/metrics")
            click.echo("Ctrl-C stops the worker.")
    except OutputError as error:
        discard_output()
        if not error.is_reader_gone:
            say(f"pagemill: {error}; the worker serves on", "output_failed", "error", error=str(error))


async def _exchange(settings: Settings, message: str) -> None:
    client = AsyncClient(_url(settings), settings.queues[0])
    messages = [{"role": "user", "content": message}]
    try:
        if num_jobs := await _num_jobs(settings):
            jobs = "1 job" if num_jobs == 1 else f"{num_jobs:,} jobs"
            click.echo(f"{jobs} from before are served first, or beside this one:")
        click.echo(f"> {message}")
        reply = await print_reply(client, await client.submit(messages, lane="high", temperature=0))
        if reply.error is not None:
            why = "{}: {}".format(*reply.error)
            say(f"the first message failed: {why}", "first_message_failed", "error", error=why)
    except OutputError:
        raise
    except PagemillError as error:
        say(f"the first message got no reply: {error}", "first_message_failed", "error", error=str(error))
    finally:
        await client.aclose()


async def _num_jobs(settings: Settings) -> int:
    """Jobs of the first queue that wait or run already."""
    queue = settings.queues[0]
    keys, link = QueueKeys(queue), Link(_url(settings), "greeting", queue)
    try:
        lengths = await link.batch([("XLEN", lane) for lane in keys.lanes])
    finally:
        await link.close()
    return sum(length for length in lengths if isinstance(length, int))


def lines_to_try(settings: Settings) -> list[str]:
    """Commands for another terminal, ready to paste: by redis-cli where there is one, and by `pagemill redis`.

    They use the first queue; where there are several all are named.
    """
    queue = settings.queues[0]
    keys = QueueKeys(queue)
    queue_flag = "" if settings.queue == served_name(DEMO_MODEL) else f" --queue {queue}"
    server_flag = _server_flag(settings)
    pagemill = own_command()
    tools = [f"{pagemill} redis{server_flag}"]
    cli = shutil.which("redis-cli") or shutil.which("valkey-cli")
    if cli is not None and _url(settings).startswith(("redis://", "rediss://")):  # it takes no other
        tools.insert(0, f"{Path(cli).name} -u {_shell_url(settings)}")
    where = "From another terminal" + (", in this folder" if "/" in pagemill and not pagemill.startswith("/") else "")
    if _PASSWORD in server_flag:
        where += f", with the password in place of {_PASSWORD}"
    lines = [
        "",
        f"Serving{_which_queues(settings)}. {where}:",
        "",
        f"  {pagemill} enqueue{server_flag}{queue_flag} --temperature 0 {shlex.quote(_QUESTION)}",
    ]
    for tool in tools:
        job_id = f"try-{secrets.token_hex(4)}"
        job = ["XADD", keys.jobs("normal"), "*", "id", job_id, "prompt", _PROMPT, *_SAMPLING]
        read = ["XREAD", "BLOCK", "4000", "COUNT", "256", "STREAMS", keys.reply(job_id), "0-0"]
        lines += ["", f"  {tool} {shlex.join(job)}", f"  {tool} {shlex.join(read)}"]
    return [*lines, ""]


def _which_queues(settings: Settings) -> str:
    return "" if len(settings.queues) == 1 else " the queues " + ", ".join(settings.queues)


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
    """The URL as a word for the shell. A password in it is not shown: the embedded server's is read from its file,
    another one's is left for the user to fill in.
    """
    if settings.embedded:
        return f'"$(cat {shlex.quote(str(settings.data_dir / URL_FILE))})"'
    return shlex.quote(without_password(_url(settings)))


def without_password(url: str) -> str:
    """The URL with PASSWORD where it holds one, before its host or in its query; as it was where it holds none."""
    scheme, separator, rest = url.partition("://")
    login, at, place = rest.rpartition("@")
    place, mark, query = place.partition("?")
    pairs = [re.sub(r"(password=).*", rf"\1{_PASSWORD}", pair) for pair in query.split("&")]
    user, colon, _ = login.partition(":")
    if colon:
        login = f"{user or 'default'}:{_PASSWORD}"  # redis-cli 6.2 takes an empty user for a name
    return f"{scheme}{separator}{login}{at}{place}{mark}{'&'.join(pairs)}"
