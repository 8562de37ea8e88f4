"""Where the dev extra promises Triton, so that its tests must not be skipped."""

import os
import platform
from typing import Final

IS_TRITON_PROMISED: Final = (
    bool(os.environ.get("CI")) and platform.system() == "Linux" and platform.machine() == "x86_64"
)
