"""Words of the command line as text. What is no UTF-8 there arrives as surrogates, which no server can be sent."""

import os

import click


def as_utf8(name: str, text: str) -> str:
    """`text` as it is; `name` says to the user what it is. Raises click.UsageError where its bytes are no UTF-8."""
    decode_utf8(name, os.fsencode(text))
    return text


def decode_utf8(name: str, raw: bytes) -> str:
    """The text in `raw`. Raises click.UsageError where it is no UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(
            f"{name} is not UTF-8 at byte {error.start}: convert it first, for instance with `iconv -t UTF-8`."
        ) from None
