"""`pagemill acl`: the rights that Redis users need."""

import click

from worker.streams.rights import TOPOLOGIES, client_rule, rule_words, worker_rule

_RULES = {"worker": worker_rule, "client": client_rule}


@click.command()
@click.argument("role", metavar="ROLE", type=click.Choice(list(_RULES)))
@click.option("--user", help="The user's name. [default: pagemill-ROLE]")
@click.option(
    "--server-version",
    default="7.0",
    show_default=True,
    metavar="MAJOR.MINOR",
    help="Redis before 7.0 knows fewer kinds of rules; every Valkey counts as 7.0.",
)
@click.option(
    "--topology", type=click.Choice(TOPOLOGIES), default="single", show_default=True, help="What kind of server it is."
)
@click.option("--file", "is_for_file", is_flag=True, help="As a line of an ACL file, instead of a command.")
def command(role: str, user: str | None, server_version: str, topology: str, is_for_file: bool) -> None:
    """Print the rule that gives a ROLE, `worker` or `client`, the rights it needs on the server, and no others.

    Put a password of your own in the place of PASSWORD. What is printed can be pasted into redis-cli or valkey-cli, or
    with --file into the server's ACL file. On a Cluster each node needs it; Sentinels have users of their own.
    """
    if not server_version.partition(".")[0].isdecimal():
        raise click.BadParameter(
            "use the number that `INFO server` calls redis_version, like 6.2", param_hint="--server-version"
        )
    words = ["on", ">PASSWORD", *rule_words(_RULES[role](server_version, topology))]
    name = user or f"pagemill-{role}"
    if is_for_file:
        click.echo(f"user {name} {' '.join(words)}")
    else:
        # A selector has spaces, so it stands in quotes.
        click.echo(f"ACL SETUSER {name} reset " + " ".join(f'"{word}"' if " " in word else word for word in words))
