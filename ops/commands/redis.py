"""`pagemill redis`: redis-cli for a machine that has none."""

import re
import sys

import click

from ops.resp import Answer, ErrorReply, RespConnection, plain, pretty
from ops.server import clear_connection_errors, client_settings, direct_url, find_server
from worker.streams.address import Topology, parse_address

# The queue whose key a word is.
_QUEUE = re.compile(r"pagemill:\{([A-Za-z0-9_.-]+)\}:")


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--redis-url", help="The server. [default: PAGEMILL_REDIS_URL, else the embedded one]")
@click.option("--data-dir", help="Where the embedded server keeps its data. [default: PAGEMILL_DATA_DIR]")
@click.option("--pretty/--plain", "is_pretty", default=None, help="How to print. [default: pretty on a terminal]")
@click.argument("words", nargs=-1, required=True, metavar="CMD [ARG]...", type=click.UNPROCESSED)
@click.pass_context
def command(
    ctx: click.Context, redis_url: str | None, data_dir: str | None, is_pretty: bool | None, words: tuple[str, ...]
) -> None:
    """Send one raw command to the server, exactly as typed, and print the answer as redis-cli does.

    Options of this command stand before CMD. An error of the server ends with exit code 1.

    \b
    pagemill redis XADD 'pagemill:{smollm2}:jobs:normal' '*' id haiku-1 prompt 'A haiku:'
    pagemill redis XREAD BLOCK 4000 STREAMS 'pagemill:{smollm2}:reply:haiku-1' 0-0
    """
    if words[0].startswith("-"):
        raise click.NoSuchOption(words[0], ctx=ctx)
    url = find_server(client_settings(redis_url=redis_url, data_dir=data_dir, takes_several=True))
    with clear_connection_errors(url):
        answer = _call(url, words)
    if is_pretty is None:
        is_pretty = sys.stdout.isatty()
    text = pretty(answer) if is_pretty else plain(answer)
    sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape") + b"\n")
    sys.stdout.flush()
    if isinstance(answer, ErrorReply):
        ctx.exit(1)


def _call(url: str, words: tuple[str, ...]) -> Answer:
    """The answer of the server that has the key; which one that is in a Cluster, its nodes say."""
    queue = next((match[1] for word in words if (match := _QUEUE.match(word))), None)
    with RespConnection(direct_url(url, queue)) as connection:
        answer = connection.call(words)
    address = parse_address(url)
    if address.topology is Topology.CLUSTER and isinstance(answer, ErrorReply) and answer.text.startswith("MOVED "):
        host, _, port = answer.text.split(" ")[2].rpartition(":")
        with RespConnection(address.plain_url((host, int(port)))) as connection:
            answer = connection.call(words)
    return answer
