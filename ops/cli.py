"""The console script `pagemill`.

Commands are imported when they run, so that help is there at once and no command pays for another's imports. Every
mistake, the user's or the surroundings', is one line on stderr and exit code 2; PAGEMILL_DEBUG=1 shows the traceback.
"""

import importlib
import os
import sys
from collections.abc import Sequence

import click

from worker.errors import PagemillError

# Shown by `pagemill --help`, so that help needs no imports. The command's module is ops.commands.NAME.
COMMANDS = {
    "serve": "Run a worker: take jobs from a queue and stream the replies.",
    "enqueue": "Send a chat message and stream the reply to the terminal.",
    "cancel": "Cancel a job by its id.",
    "jobs": "Show the depth of each lane and what is running.",
    "workers": "Show the workers that serve a queue.",
    "dead": "Show the dead letters of a queue.",
    "redis": "Send one raw command to the server and print the answer.",
    "bench": "Measure the engine and its peers on this machine.",
    "simulate": "Run recorded traffic through the scheduler, without a model.",
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of COMMANDS: the ones needed first come first."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The object `command` of the command's module."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"ops.commands.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        from importlib.metadata import version

        click.echo(f"pagemill {version('pagemill')}")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show it.")
@click.pass_context
def pagemill(ctx: click.Context) -> None:
    """Language-model inference driven by a Redis queue.

    `pagemill COMMAND --help` explains a command.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (the process's own where left out) and answer its exit code."""
    try:
        code = pagemill.main(args=argv if argv is None else list(argv), prog_name="pagemill", standalone_mode=False)
    except (KeyboardInterrupt, click.Abort):
        return 130
    except BrokenPipeError:
        # Whoever read our output has left. Keep the interpreter from complaining when it flushes stdout at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("PAGEMILL_DEBUG", "") not in ("", "0"):
            raise
        click.echo(f"pagemill: {one_line(error)}", err=True)
        return 2
    return code if isinstance(code, int) else 0


def one_line(error: Exception) -> str:
    """What went wrong and what to do, in one line without secrets."""
    if isinstance(error, click.UsageError):
        where = error.ctx.command_path if error.ctx else "pagemill"
        text = f"{error.format_message()} `{where} --help` shows what is accepted."
    elif isinstance(error, PagemillError):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error} (PAGEMILL_DEBUG=1 shows where)"
    return " ".join(text.split())


if __name__ == "__main__":
    sys.exit(main())
