"""What the parts of the bench share: where the model is."""

from pathlib import Path
from typing import Final

CACHE_VARIABLE: Final = "PAGEMILL_CACHE_DIR"


def cache_folder(given: str | None) -> Path:
    """The folder that was named, or the user's."""
    import platformdirs

    return Path(given) if given else platformdirs.user_cache_path("pagemill")


def checkpoint_path(model: str, cache_dir: Path) -> Path:
    """Where the checkpoint lies; the demo model is fetched if it isn't there yet. Raises StartupError."""
    from ops.progress import progress_reporter
    from worker.demo_model import DEMO_MODEL_NAME, ensure_demo_model

    if model != DEMO_MODEL_NAME:
        return Path(model)
    with progress_reporter() as progress:
        return ensure_demo_model(cache_dir, progress)
