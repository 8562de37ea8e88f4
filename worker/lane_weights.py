"""How lanes share a worker, as it is written in settings: `8:4:1`, or `strict`."""

import re
from typing import Final, Literal

LaneWeights = tuple[int, int, int] | Literal["strict"]
"""Of the lanes high, normal and low. With `strict` a lane waits for all above it."""

STRICT: Final = "strict"
DEFAULT_LANE_WEIGHTS = "8:4:1"
MAX_WEIGHT = 1000

_WEIGHT = re.compile(r"[0-9]{1,4}")


def parse_lane_weights(text: str) -> LaneWeights:
    """The weights that `text` stands for. Raises ValueError, which says what is accepted."""
    if text.strip() == STRICT:
        return STRICT
    parts = [part.strip() for part in text.split(":")]
    if not (len(parts) == 3 and all(_WEIGHT.fullmatch(part) and 1 <= int(part) <= MAX_WEIGHT for part in parts)):
        raise ValueError(
            f"use {STRICT}, or three whole numbers from 1 to {MAX_WEIGHT} as high:normal:low, "
            f"like {DEFAULT_LANE_WEIGHTS}"
        )
    high, normal, low = map(int, parts)
    return high, normal, low
