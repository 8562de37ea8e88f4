"""What the measurements of the bench share: turns, where the model is, and the engine of it."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from worker.engine_config import EngineConfig
from worker.openmp import limit_spinning

if TYPE_CHECKING:
    from worker.engine import Engine
    from worker.engine_config import EngineInfo

T = TypeVar("T")

# Options that are fields of EngineConfig by the same name.
_ENGINE_FIELDS: Final = ("load_format", "dtype", "quantization", "device", "num_threads", "block_size")


def by_turns(sides: Sequence[T], num_alternations: int) -> Iterator[tuple[int, T]]:
    """Each side once in each alternation, with the alternation's number.

    Each begins with another one: nobody is always the last, should the machine get busier.
    """
    for number in range(num_alternations):
        for side in rotated(sides, number):
            yield number, side


def rotated(sides: Sequence[T], by: int) -> list[T]:
    """The same sides in the same order, beginning with another one."""
    first = by % len(sides) if sides else 0
    return [*sides[first:], *sides[:first]]


def cache_folder(given: str | None) -> Path:
    """The folder that was named, or the user's."""
    import platformdirs

    return Path(given) if given else platformdirs.user_cache_path("pagemill")


def checkpoint_path(model: str, cache_dir: Path, load_format: str = "auto") -> Path:
    """Where the checkpoint lies; the demo model is fetched if it isn't there yet. Raises StartupError."""
    from ops.progress import progress_reporter
    from worker.demo_model import DEMO_MODEL_NAME, ensure_demo_model
    from worker.dummy_model import find_dummy_model

    if load_format == "dummy":
        return find_dummy_model(model)
    if model != DEMO_MODEL_NAME:
        return Path(model)
    with progress_reporter() as progress:
        return ensure_demo_model(cache_dir, progress)


def engine_config(values: Mapping[str, Any], **more: Any) -> EngineConfig:
    """What the options of flags.engine_options mean, with `more` fields; the demo model is fetched if need be.

    Raises StartupError where there is no such model.
    """
    folder = cache_folder(values["cache_dir"])
    path = checkpoint_path(values["model"], folder, values["load_format"])
    fields = {name: values[name] for name in _ENGINE_FIELDS if name in values}
    return EngineConfig(str(path), str(folder), **fields | more)


def start_engine(config: EngineConfig) -> "tuple[Engine, EngineInfo]":
    """An engine in this process, as a worker's engine process has it: call it before torch is imported."""
    limit_spinning()
    from worker.engine_builder import build_engine

    return build_engine(config)
