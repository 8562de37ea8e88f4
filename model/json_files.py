"""Reads the small JSON files of a checkpoint."""

import json
from pathlib import Path
from typing import Any

from model.errors import CorruptCheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CorruptCheckpointError, which names the file and the place."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CorruptCheckpointError(f"{path} can't be read ({error.strerror}): check the file") from error
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path} isn't valid JSON ({error}): fetch it again") from error
    if not isinstance(value, dict):
        raise CorruptCheckpointError(f"{path} holds a {type(value).__name__}, not an object: fetch it again")
    return value


def read_json_if_there(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or an empty one where there is no such file."""
    return read_json(path) if path.is_file() else {}
