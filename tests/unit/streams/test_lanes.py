"""Fair turns by weight, and the weights that hold."""

import random
import sys
from collections import Counter
from itertools import pairwise

import pytest

from worker.lane_weights import LaneWeights, parse_lane_weights
from worker.streams.keys import LANES
from worker.streams.lanes import LaneChoice, LaneOrder
from worker.stride import Stride


def serve(order: LaneOrder, waiting: dict[str, int], num_entries: int, max_entries: int) -> list[str]:
    """Read lanes that hold `waiting` entries, up to `max_entries` at a time; answers whose entries came."""
    served: list[str] = []
    while len(served) < num_entries and any(waiting.values()):
        empty: list[str] = []
        for lane in order.order():
            if num := min(waiting[lane], max_entries):
                order.charge(lane, num, empty)
                waiting[lane] -= num
                served += [lane] * num
                break
            empty.append(lane)
    return served


@pytest.mark.parametrize("max_entries", [1, 3, 8])
@pytest.mark.parametrize("weights", [(8, 4, 1), (1, 1, 1), (100, 10, 5)])
def test_saturated_lanes_get_their_weighted_share(weights: tuple[int, int, int], max_entries: int) -> None:
    counts = Counter(serve(LaneOrder(weights), dict.fromkeys(LANES, 10**6), 5000, max_entries))
    for lane, weight in zip(LANES, weights, strict=True):
        assert counts[lane] / counts.total() == pytest.approx(weight / sum(weights), rel=0.1)


def test_the_low_lane_never_waits_for_more_than_its_last_bite_was_worth() -> None:
    """Between two of its reads come at most 12 others for each entry of the first, and one bite of either lane."""
    served = serve(LaneOrder(), dict.fromkeys(LANES, 10**6), 5000, 8)
    places = [place for place, lane in enumerate(served) if lane == "low"]
    assert max(after - before - 1 for before, after in pairwise(places)) <= 12 * 8 + 16
    single = serve(LaneOrder(), dict.fromkeys(LANES, 10**6), 5000, 1)
    places = [place for place, lane in enumerate(single) if lane == "low"]
    assert max(after - before - 1 for before, after in pairwise(places)) <= 13


def test_a_low_job_that_comes_late_waits_for_two_bites_at_most() -> None:
    order = LaneOrder()
    waiting = {"high": 10**6, "normal": 10**6, "low": 0}
    serve(order, waiting, 1000, 8)
    waiting["low"] = 1
    assert "low" in serve(order, waiting, 17, 8)


def test_strict_order_starves_the_lanes_below() -> None:
    served = serve(LaneOrder("strict"), {"high": 3000, "normal": 1, "low": 1}, 3002, 8)
    assert served == ["high"] * 3000 + ["normal", "low"]


def test_a_lane_that_came_alone_for_long_pays_nothing_for_it() -> None:
    """What the others didn't use while they were empty is no credit of theirs."""
    order = LaneOrder()
    for _ in range(1000):
        order.charge("high", 1)
        order.level()
    counts = Counter(serve(order, dict.fromkeys(LANES, 10**6), 130, 1))
    assert counts == {"high": 80, "normal": 40, "low": 10}


def test_nobody_who_has_something_waits_long_whoever_comes_and_goes() -> None:
    seed = random.randrange(10**6)
    sys.stdout.write(f"seed {seed}\n")
    rng = random.Random(seed)
    stride = Stride({"a": 1, "b": 1, "c": 1})
    rounds_waited = dict.fromkeys("abc", 0)
    for _ in range(3000):
        present = {name for name in "abc" if name == "c" or rng.random() < 0.7}
        order = stride.order()
        served = next(name for name in order if name in present)
        stride.charge(served, 1, order[: order.index(served)])
        rounds_waited = {name: rounds_waited[name] + 1 if name in present - {served} else 0 for name in "abc"}
        assert max(rounds_waited.values()) <= 4


@pytest.mark.parametrize(
    ("text", "weights"), [("8:4:1", (8, 4, 1)), (" 1: 1000:7 ", (1, 1000, 7)), ("strict", "strict")]
)
def test_weights_are_read_from_text(text: str, weights: LaneWeights) -> None:
    assert parse_lane_weights(text) == weights


@pytest.mark.parametrize(
    "text", ["", "8:4", "8:4:1:1", "8:0:1", "8:4:-1", "1001:1:1", "9" * 5000 + ":1:1", "Strict", "٣:1:1"]
)
def test_anything_else_is_refused_with_what_is_accepted(text: str) -> None:
    with pytest.raises(ValueError, match="strict"):
        parse_lane_weights(text)


def test_operators_weights_hold_until_they_are_taken_back() -> None:
    choice = LaneChoice((8, 4, 1))
    own = choice.order
    choice.use(None)
    assert choice.order is own, "what each lane got is not forgotten by a look that finds nothing new"
    choice.use((1, 1, 1))
    assert Counter(serve(choice.order, dict.fromkeys(LANES, 99), 30, 1)) == dict.fromkeys(LANES, 10)
    choice.use("strict")
    assert choice.order.order() == LANES
    choice.use(None)
    assert Counter(serve(choice.order, dict.fromkeys(LANES, 99), 13, 1)) == {"high": 8, "normal": 4, "low": 1}
