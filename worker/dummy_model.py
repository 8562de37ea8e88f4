"""Finds the shapes that random weights are made in."""

from pathlib import Path

from model.dummy import dummy_config, dummy_model_path
from model.errors import ModelError
from worker.errors import StartupError


def find_dummy_model(model: str) -> Path:
    """The folder whose config.json says them: `model` names it, or a preset.

    Raises StartupError, for a config.json that can't be computed as well: nothing has to be started to see that.
    """
    try:
        path = dummy_model_path(model)
        dummy_config(path)
        return path
    except ModelError as error:
        raise StartupError(str(error)) from error
