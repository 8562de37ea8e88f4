"""Tells the kinds of checkpoint apart."""

import errno
from enum import StrEnum
from pathlib import Path

from model.errors import ModelNotFoundError, TooLittleMemoryError, UnsupportedModelError

MAX_LISTED = 8
"""Files named in an error message."""


class CheckpointKind(StrEnum):
    """What a model path is."""

    GGUF = "gguf"
    DIRECTORY = "directory"


def checkpoint_kind(path: Path) -> CheckpointKind:
    """What lies at `path`. Raises ModelNotFoundError or UnsupportedModelError, which say what was found instead."""
    if path.is_dir():
        if (path / "config.json").is_file():
            return CheckpointKind.DIRECTORY
        ggufs = sorted(child.name for child in path.glob("*.gguf"))
        if ggufs:
            raise ModelNotFoundError(
                f"{path} is a directory of GGUF files: name one of them, such as {path / ggufs[0]}"
            )
        raise ModelNotFoundError(f"{path} is no checkpoint: it has no config.json; found {found_in(path)}")
    if not path.exists():
        raise ModelNotFoundError(
            f"there is no model at {path}: give a directory with config.json and safetensors, or a .gguf file"
        )
    if path.suffix.lower() == ".gguf" or _starts_like_gguf(path):
        return CheckpointKind.GGUF
    raise UnsupportedModelError(
        f"{path} is no .gguf file: give one, or the directory that holds config.json and safetensors"
    )


def _starts_like_gguf(path: Path) -> bool:
    """Files in a hub cache are named by their hash, so the name alone doesn't tell."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise ModelNotFoundError(f"{path} can't be read ({error.strerror}): check its permissions") from error


def check_memory(path: Path, error: BaseException) -> None:
    """Raise TooLittleMemoryError where `error`, met on opening `path`, means that, and not that the file is damaged."""
    if getattr(error, "errno", None) == errno.ENOMEM or "annot allocate memory" in str(error):
        size = path.stat().st_size >> 20
        raise TooLittleMemoryError(
            f"{path} ({size} MiB) can't be mapped, for lack of memory: free some, or raise the limit (ulimit -v)"
        ) from error


def found_in(directory: Path) -> str:
    """The names in a directory, for an error message."""
    names = sorted(child.name for child in directory.iterdir())
    if not names:
        return "an empty directory"
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
