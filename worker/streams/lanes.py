"""Which lane to read next."""

from collections.abc import Sequence

import structlog

from worker.lane_weights import STRICT, LaneWeights
from worker.streams.keys import LANES
from worker.stride import Stride

log = structlog.get_logger(__name__)


class LaneOrder:
    """Shares reads among lanes by weight, charged per entry, so that none starves.

    With `strict` the order is always high, normal, low: a lane is read only once those above it are empty, and while
    they never are it starves, which is what strict means.
    """

    def __init__(self, weights: LaneWeights = (8, 4, 1)) -> None:
        self._is_strict = weights == STRICT
        shares = (1, 1, 1) if weights == STRICT else weights
        self._stride = Stride(dict(zip(LANES, shares, strict=True)))

    def order(self) -> Sequence[str]:
        """Lanes in the order in which to try them."""
        return LANES if self._is_strict else self._stride.order()

    def charge(self, lane: str, num_entries: int, empty_lanes: Sequence[str] = ()) -> None:
        """`num_entries` were read from `lane`, after `empty_lanes` had nothing."""
        self._stride.charge(lane, num_entries, empty_lanes)

    def level(self) -> None:
        """All lanes were empty: what one was given more than another until now is forgotten."""
        self._stride.level()


class LaneChoice:
    """The order of lanes that holds: by the operators' weights, where they have set some, else by the worker's own."""

    def __init__(self, own: LaneWeights) -> None:
        """`own` are the weights by the worker's settings."""
        self._own = own
        self.weights = own
        self.order = LaneOrder(own)

    def use(self, weights: LaneWeights | None) -> None:
        """From now on `weights` hold; None: the worker's own."""
        if (weights := weights or self._own) != self.weights:
            self.order, self.weights = LaneOrder(weights), weights
            log.info("lane_weights_set", weights=weights)
