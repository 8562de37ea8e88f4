"""Which lane to read next."""

from collections.abc import Mapping, Sequence

from worker.streams.keys import LANES

DEFAULT_WEIGHTS: Mapping[str, int] = {"high": 8, "normal": 4, "low": 1}


class LaneOrder:
    """Shares reads among lanes by weight, charged per entry: stride scheduling (Waldspurger 1995).

    Each lane has a pass, which grows by 1/weight for each entry read from it; the lane with the least pass is next.
    An empty lane saves nothing up: its pass moves up to that of the lane that was served. With `is_strict` the order
    is always high, normal, low.
    """

    def __init__(self, weights: Mapping[str, int] = DEFAULT_WEIGHTS, *, is_strict: bool = False) -> None:
        self._weights = {lane: max(1, weights.get(lane, 1)) for lane in LANES}
        self._passes = dict.fromkeys(LANES, 0.0)
        self._is_strict = is_strict

    def order(self) -> Sequence[str]:
        """Lanes in the order in which to try them."""
        return LANES if self._is_strict else sorted(LANES, key=self._passes.__getitem__)

    def charge(self, lane: str, num_entries: int, empty_lanes: Sequence[str] = ()) -> None:
        """`num_entries` were read from `lane`, after `empty_lanes` had nothing."""
        for empty in empty_lanes:
            self._passes[empty] = max(self._passes[empty], self._passes[lane])
        self._passes[lane] += num_entries / self._weights[lane]
