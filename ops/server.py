"""How the commands find the server, and the options that they share for it."""

import asyncio
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from worker.embedded import URL_FILE, is_in_use
from worker.errors import StartupError
from worker.settings import Settings, load_settings
from worker.settings_words import env_name, flag_name
from worker.streams.address import not_a_url, parse_address, redacted
from worker.streams.connection import Argument, Link
from worker.streams.errors import ServerError, StreamsError
from worker.streams.route import node_url

Answer = TypeVar("Answer")
Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--queue", help="The queue. [default: PAGEMILL_QUEUE, else the model's name]"),
    click.option("--redis-url", help="The server. [default: PAGEMILL_REDIS_URL, else the embedded one]"),
    click.option("--data-dir", help="Where the embedded server keeps its data. [default: PAGEMILL_DATA_DIR]"),
)


def server_options(command: Command) -> Command:
    """Give a command `--queue`, `--redis-url` and `--data-dir`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def client_settings(
    queue: str | None = None,
    redis_url: str | None = None,
    data_dir: str | None = None,
    *,
    takes_several: bool = False,
) -> Settings:
    """The settings of a command that talks to a running server; None means that the flag wasn't given.

    Unless it `takes_several`, `queue` is one queue then. Raises StartupError where several are named.
    """
    flags = {"queue": queue, "redis_url": redis_url, "data_dir": data_dir}
    settings = load_settings({name: value for name, value in flags.items() if value is not None})
    if len(settings.queues) > 1 and not takes_several:
        where = env_name("queue") if queue is None else flag_name("queue")
        raise StartupError(
            f"{where} names {len(settings.queues)} queues and this command works with one: add --queue with one of "
            f"{', '.join(settings.queues)}"
        )
    return settings


def find_server(settings: Settings) -> str:
    """The URL of the server: the one that is set, else that of the embedded server that runs on this machine.

    Raises StartupError where there is neither.
    """
    if settings.redis_url is not None:
        return settings.redis_url.get_secret_value()
    path = settings.data_dir / URL_FILE
    try:
        url = path.read_text(encoding="utf-8").strip()
        if is_in_use(settings.data_dir):
            return url
        left = f"{path} is left over from one that was killed"
    except FileNotFoundError:
        left = f"no embedded server has left its address in {path}"
    except OSError as error:
        raise StartupError(f"can't read the server's address from {path}: {error.strerror}") from None
    raise StartupError(f"no worker runs here: no --redis-url, and {left}; start one with `{own_command()} serve`")


def own_command() -> str:
    """How the shell that we were started from finds this program: by its name where PATH leads to it, else by a path.

    The path is relative where that is shorter: it works in the same folder.
    """
    script = Path(sysconfig.get_path("scripts")) / "pagemill"
    if not script.exists():
        return f"{shlex.quote(sys.executable)} -m ops.cli"
    found = shutil.which("pagemill")
    if found is not None and os.path.realpath(found) == os.path.realpath(script):
        return "pagemill"
    return shlex.quote(min(str(script), os.path.relpath(script), key=len))


class _NamingLink(Link):
    """A connection that says which key holds something else than a command reads."""

    async def call(self, *command: Argument) -> Any:
        """See Link.call. Raises StartupError for a key of another type."""
        try:
            return await super().call(*command)
        except ServerError as error:
            if not error.is_wrong_type:
                raise
            key = next(word for word in map(_as_text, command) if word.startswith("pagemill:"))
            raise StartupError(
                f"{key} holds something else than this command reads: look with `pagemill redis TYPE '{key}'`, then "
                "RENAME or DEL it"
            ) from error


def _as_text(word: Argument) -> str:
    return word.decode("utf-8", "replace") if isinstance(word, bytes) else str(word)


def run_on_link(url: str, work: Callable[[Link], Awaitable[Answer]], queue: str | None = None) -> Answer:
    """What `work` answers on a connection of its own, to the server of `queue`.

    Its errors name the server, without the password.
    """

    async def run() -> Answer:
        link = _NamingLink(url, "command", queue)
        try:
            return await work(link)
        except StreamsError as error:
            raise StartupError(f"{redacted(url)}: {error}") from error
        finally:
            await link.close()

    return asyncio.run(run())


def direct_url(url: str, queue: str | None) -> str:
    """The URL of the one server that has the queue now. Raises StartupError where it can't be found."""
    try:
        return asyncio.run(node_url(parse_address(url), queue))
    except StreamsError as error:
        raise StartupError(f"{redacted(url)}: {error}") from error


@contextmanager
def clear_connection_errors(url: str) -> Iterator[None]:
    """Turn what a raw connection raises into a StartupError that names the server, without its password."""
    try:
        yield
    except OSError as error:
        raise StartupError(f"{redacted(url)}: {error}") from error
    except ValueError:
        raise not_a_url(url) from None
