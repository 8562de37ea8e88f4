"""The account of peers that tell each token, and of time in general."""

from collections.abc import Sequence
from typing import Any

import pytest

from ops.bench.errors import BenchError
from ops.bench.peers.streaming import Played, Request, handlers_of
from ops.bench.runs import PeerRun
from ops.bench.timeline import closed_loop, open_loop

TOKENS = [[11.0, 12.0, 15.0], [12.0], [14.0, 16.0]]


class ScriptedPeer:
    """A StreamingPeer that says what it is told to."""

    def __init__(self, token_s: list[list[float]]) -> None:
        self._token_s = token_s
        self.arrivals: list[list[float]] = []

    def prepare(self, batch: int, num_kv_tokens: int) -> dict[str, Any]:
        return {"batch": batch, "num_kv_tokens": num_kv_tokens}

    def play(self, requests: list[Request], arrivals_s: Sequence[float]) -> Played:
        self.arrivals.append(list(arrivals_s))
        return Played(10.0, self._token_s, [5, 6, 7])


def requests() -> list[Request]:
    return [([1], len(times)) for times in TOKENS]


def test_in_a_closed_loop_a_request_waits_from_when_there_is_a_place_for_it() -> None:
    found = closed_loop(10.0, TOKENS, batch=2)
    assert found.free_s == [10.0, 10.0, 12.0]
    assert found.ttft_s == [1.0, 2.0, 2.0]
    assert found.reply_s == [5.0, 2.0, 4.0]
    assert found.gap_s == [1.0, 3.0, 2.0]
    assert (found.wall_s, found.num_tokens) == (6.0, 6)


def test_in_an_open_loop_it_waits_from_its_arrival() -> None:
    found = open_loop(10.0, TOKENS, [0.0, 0.5, 3.0])
    assert found.ttft_s == [1.0, 1.5, 1.0]
    assert found.reply_s == [5.0, 1.5, 3.0]


def test_a_streaming_peer_is_asked_for_runs_of_both_kinds() -> None:
    peer = ScriptedPeer(TOKENS)
    handlers = handlers_of(peer)
    assert handlers["prepare"](batch=2, num_kv_tokens=5) == {"batch": 2, "num_kv_tokens": 5}
    run = PeerRun(**handlers["run"](requests=requests(), batch=2))
    assert (run.tokens_per_s, run.ttft_s, run.first_ids) == (1.0, [1.0, 2.0, 2.0], [5, 6, 7])
    late = PeerRun(**handlers["run_arrivals"](requests=requests(), arrivals_s=[0.0, 0.5, 3.0]))
    assert late.ttft_s == [1.0, 1.5, 1.0]
    assert peer.arrivals == [[0.0, 0.0, 0.0], [0.0, 0.5, 3.0]]


def test_a_reply_of_another_length_than_was_wanted_does_not_count() -> None:
    short = ScriptedPeer([TOKENS[0][:2], *TOKENS[1:]])
    with pytest.raises(BenchError, match="a reply has 2 tokens instead of 3"):
        handlers_of(short)["run"](requests=requests(), batch=2)
