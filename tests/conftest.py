"""What tests of all folders share."""

import os
from pathlib import Path

import platformdirs
import pytest

from worker.demo_model import ensure_demo_model
from worker.errors import StartupError


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The demo model's GGUF file, fetched once into the user's cache.

    Where it can't be fetched, tests that need it are skipped; in CI, where it is promised, they fail.
    """
    cache_dir = Path(os.environ.get("PAGEMILL_CACHE_DIR") or platformdirs.user_cache_path("pagemill"))
    try:
        return ensure_demo_model(cache_dir)
    except StartupError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"needs the demo model: {error}")
