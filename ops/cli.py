"""The console script `pagemill`.

Commands are imported when they run, so that help is there at once and no command pays for another's imports. Every
mistake, the user's or the surroundings', is one line on stderr and exit code 2; PAGEMILL_DEBUG=1 shows the traceback.
Where the reader of the output left, as `head` does, that is exit code 1 without a word. Ctrl-C is 130; a command that
runs until it is told to stop, `serve`, ends with 0 then, by whatever signal and however far it was.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext

import click

from ops.lazy_group import LazyGroup
from ops.output import OutputError, checked_output
from ops.stopping import StopSignal, stops_by_signal
from worker.errors import PagemillError, SettingsError

# Shown by `pagemill --help`, those first that are needed first. The module of a command is ops.commands.NAME.
COMMANDS = {
    "serve": "Run a worker: take jobs from a queue and stream the replies.",
    "enqueue": "Send a chat message and stream the reply to the terminal.",
    "cancel": "Cancel a job by its id.",
    "jobs": "Show the depth of each lane and what is running.",
    "workers": "Show the workers that serve a queue.",
    "dead": "Show the dead letters of a queue: jobs that were given up.",
    "pause": "Have a queue's workers take no more jobs; running ones finish.",
    "resume": "Let a paused queue go on.",
    "drain": "Stop one worker; its running jobs finish first.",
    "acl": "Print the rights that a worker or a client needs on the server.",
    "redis": "Send one raw command to the server and print the answer.",
    "bench": "Measure the engine and its peers on this machine.",
    "simulate": "Run recorded traffic through the scheduler, without a model.",
}


def _print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        from importlib.metadata import version

        click.echo(f"pagemill {version('pagemill')}")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    package="ops.commands",
    summaries=COMMANDS,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
@click.pass_context
def pagemill(ctx: click.Context) -> None:
    """Language-model inference driven by a Redis queue.

    `pagemill COMMAND --help` explains a command.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (the process's own where left out) and answer its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    until_stopped = stops_by_signal() if words[:1] == ["serve"] else nullcontext()
    with checked_output(), until_stopped:
        try:
            return _run(words)
        except (KeyboardInterrupt, click.Abort) as error:
            # click turns the first into the second.
            return 0 if isinstance(error.__cause__ or error, StopSignal) else 130
        except Exception as error:
            if isinstance(error, OutputError) and error.is_reader_gone:
                return 1
            if os.environ.get("PAGEMILL_DEBUG", "") not in ("", "0"):
                raise
            _tell(one_line(error))
            return 2


def _run(words: list[str]) -> int:
    code = pagemill.main(args=words, prog_name="pagemill", standalone_mode=False)
    sys.stdout.flush()
    return code if isinstance(code, int) else 0


def _tell(why: str) -> None:
    if "worker.logs" in sys.modules:  # else no log was set up
        from worker.logs import say

        say(f"pagemill: {why}", "command_failed", "error", error=why)
    else:
        click.echo(f"pagemill: {why}", err=True)


def one_line(error: Exception) -> str:
    """What went wrong and what to do, in one line without secrets."""
    if isinstance(error, click.UsageError):
        where = error.ctx.command_path if error.ctx else "pagemill"
        text = f"{_as_sentence(error.format_message())} `{where} --help` shows what is accepted."
    elif isinstance(error, SettingsError):
        text = f"{_as_sentence(str(error))} `pagemill serve --help` explains every setting."
    elif isinstance(error, PagemillError):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error} (PAGEMILL_DEBUG=1 shows where)"
    return " ".join(text.split())


def _as_sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}."


if __name__ == "__main__":
    sys.exit(main())
