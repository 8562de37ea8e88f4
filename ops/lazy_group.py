"""A group of commands that are imported when they are asked for."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click


@contextmanager
def _mistakes_of(find_context: Callable[[], click.Context]) -> Iterator[None]:
    """Say of mistakes in the words whose they are, where click doesn't: then that command's help is pointed to."""
    try:
        yield
    except click.UsageError as error:
        if error.ctx is None:
            error.ctx = find_context()
        raise


class LazyGroup(click.Group):
    """Help lists the commands without importing any, and no command pays for another's imports.

    package: command NAME is the object `command` of the module PACKAGE.NAME, with `_` for each `-`.
    summaries: what help says of each command, in the order in which it lists them.
    """

    def __init__(self, *args: Any, package: str, summaries: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._package = package
        self._summaries = summaries

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of the summaries."""
        return list(self._summaries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported now; None where there is none of this name."""
        if cmd_name not in self._summaries:
            return None
        module = importlib.import_module(f"{self._package}.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the group's own options from the words. A mistake in them is the group's."""
        with _mistakes_of(lambda: ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that the words name. A mistake in its words is the command's."""
        with _mistakes_of(lambda: self._asked_for(ctx)):
            return super().invoke(ctx)

    def _asked_for(self, ctx: click.Context) -> click.Context:
        name = ctx.invoked_subcommand
        command = None if name is None else self.get_command(ctx, name)
        return ctx if command is None else click.Context(command, ctx, name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self._summaries.items()))
