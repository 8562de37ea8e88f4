"""Random weights in real shapes, which stand in for a checkpoint: `load_format` dummy.

Speed and memory depend on shapes, not on what was learnt, so a folder with a config.json is all that a bench needs. The
shapes of some well-known models lie in `presets/`, each a folder with its config.json.
"""

from pathlib import Path
from typing import Final

from model.config import ModelConfig, config_from_directory
from model.errors import ModelNotFoundError, UnsupportedModelError

PRESETS: Final = Path(__file__).with_name("presets")
# The demo model goes by a short name.
_ALIASES: Final = {"smollm2": "smollm2-135m"}


def preset_names() -> list[str]:
    """The models whose shapes are shipped."""
    return sorted(path.name for path in PRESETS.iterdir() if path.is_dir())


def dummy_model_path(model: str) -> Path:
    """The folder whose config.json says the shapes: a path that is there, or the name of a preset in any case.

    Raises ModelNotFoundError with the presets' names.
    """
    wanted = _ALIASES.get(model.lower(), model.lower())
    for name in preset_names():
        if name.lower() == wanted:
            return PRESETS / name
    if Path(model).exists():
        return Path(model)
    raise ModelNotFoundError(
        f"there are no shapes called {model!r}: name a folder with a config.json, or one of {', '.join(preset_names())}"
    )


def dummy_config(path: Path) -> ModelConfig:
    """The configuration in a folder that needs no weight files.

    Raises ModelNotFoundError, CorruptCheckpointError or UnsupportedModelError.
    """
    if path.is_file():
        raise UnsupportedModelError(
            f"load_format is dummy and {path} a file, not a folder: name one with a config.json, or one of "
            f"{', '.join(preset_names())}"
        )
    if not (path / "config.json").is_file():
        raise ModelNotFoundError(
            f"load_format is dummy and there is no config.json in {path}: name a folder with one, or one of "
            f"{', '.join(preset_names())}"
        )
    return config_from_directory(path)
