"""Which lane to read next."""

from collections.abc import Sequence

import structlog

from worker.lane_weights import DEFAULT_LANE_WEIGHTS, parse_lane_weights
from worker.streams.keys import LANES
from worker.stride import Stride

log = structlog.get_logger(__name__)


class LaneOrder:
    """Shares reads among lanes by weight, charged per entry, so that none starves.

    With `strict` the order is always high, normal, low: a lane is read only once those above it are empty, and while
    they never are it starves, which is what strict means.
    """

    def __init__(self, weights: str = DEFAULT_LANE_WEIGHTS) -> None:
        """`weights` like `8:4:1`, or `strict`. Raises ValueError for anything else."""
        parsed = parse_lane_weights(weights)
        self._is_strict = parsed is None
        self._stride = Stride(dict(zip(LANES, parsed or (1, 1, 1), strict=True)))

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
    """The lane weights that hold: the operators' where they have set good ones, else the worker's own."""

    def __init__(self, own: str) -> None:
        """`own` are the weights by the worker's settings. Raises ValueError."""
        self._own = own
        self._holding = own
        self.order = LaneOrder(own)

    def apply(self, weights: str | None) -> None:
        """Take over what the operators' settings of the queue say; None brings the worker's own back.

        Raises ValueError.
        """
        weights = self._own if weights is None else weights
        if weights != self._holding:
            self.order, self._holding = LaneOrder(weights), weights
            log.info("lane_weights_set", weights=weights)
