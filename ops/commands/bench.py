"""`pagemill bench`: hands its words to the bench, which has options of its own."""

import click


@click.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Measure the engine and its peers on this machine; `pagemill bench --help` shows the options."""
    from ops.bench.cli import main

    ctx.exit(main(list(words)) or 0)
