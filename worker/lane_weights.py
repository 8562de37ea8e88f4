"""How lanes share a worker, as it is written in settings: `8:4:1`, or `strict`."""

from typing import Final, Literal

LaneWeights = tuple[int, int, int] | Literal["strict"]
"""Of the lanes high, normal and low. With `strict` a lane waits for all above it."""

STRICT: Final = "strict"
DEFAULT_LANE_WEIGHTS = "8:4:1"
MAX_WEIGHT = 1000


def parse_lane_weights(text: str) -> LaneWeights:
    """The weights that `text` stands for. Raises ValueError, which says what is accepted."""
    if text.strip() == STRICT:
        return STRICT
    parts = [part.strip() for part in text.split(":")]
    if len(parts) != 3 or not all(part.isascii() and part.isdecimal() for part in parts):
        raise ValueError(f"use three whole numbers as high:normal:low, like {DEFAULT_LANE_WEIGHTS}, or {STRICT}")
    if not all(len(part) <= 4 and 1 <= int(part) <= MAX_WEIGHT for part in parts):
        raise ValueError(f"use weights from 1 to {MAX_WEIGHT}; {STRICT} lets a lane wait for all above it")
    high, normal, low = map(int, parts)
    return high, normal, low
