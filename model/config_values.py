"""The entries of a checkpoint's config.json, each checked as it is read."""

import math
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from model.errors import CorruptCheckpointError

# Lengths and ids are int32 where kernels read them.
MAX_COUNT: Final = (1 << 31) - 1


class ConfigValues:
    """The entries of config.json, each checked as it is read."""

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self._values = values
        self.origin = origin

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str) -> Any:
        """The entry as it stands, unchecked; None where there is none."""
        return self._values.get(name)

    def fail(self, name: str, wanted: str) -> NoReturn:
        """Raise CorruptCheckpointError: what the entry is, and what it must be."""
        found = f"is {self.get(name)!r}" if name in self._values else "is missing"
        raise CorruptCheckpointError(f"{self.origin}: {name} {found}: it must be {wanted}")

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number from `least` to MAX_COUNT; `default` where it is missing or null."""
        value = default if self.get(name) is None else self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_COUNT:
            self.fail(name, f"a whole number from {least} to {MAX_COUNT}")
        return value

    def number(self, name: str, default: float) -> float:
        """A finite number above 0; `default` where it is missing or null."""
        value = default if self.get(name) is None else self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
            self.fail(name, "a number above 0")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false; false where it is missing or null."""
        value = self.get(name) or False
        if not isinstance(value, bool):
            self.fail(name, "true or false")
        return value

    def token_id(self, name: str) -> int | None:
        """A token id, or None."""
        value = self.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            self.fail(name, "a token id")
        return value
