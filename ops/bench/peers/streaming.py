"""What peers have in common that tell each token as it comes: two ways of offering requests, one account of time."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from ops.bench.errors import BenchError
from ops.bench.runs import PeerRun
from ops.bench.serving import Handler
from ops.bench.timeline import Timeline, closed_loop, open_loop

Request = tuple[list[int], int]
"""Prompt ids, and the number of output tokens."""


@dataclass(frozen=True, slots=True)
class Played:
    """What a peer made of some requests, in their order: when each token came, and the first request's ids.

    All times are of time.perf_counter.
    """

    started_s: float
    token_s: list[list[float]]
    first_ids: list[int]


class StreamingPeer(Protocol):
    """A peer that schedules requests itself, as many at once as it was prepared for."""

    def prepare(self, batch: int, num_kv_tokens: int) -> dict[str, Any]:
        """Be ready for `batch` sequences in flight with `num_kv_tokens` in all; answers what it runs with."""
        ...

    def play(self, requests: list[Request], arrivals_s: Sequence[float]) -> Played:
        """Run the requests to their ends. Request i is offered `arrivals_s[i]` seconds after the start."""
        ...


def handlers_of(peer: StreamingPeer) -> dict[str, Handler]:
    """What `serve` answers for it."""

    def run(requests: list[Request], batch: int) -> dict[str, Any]:
        played = peer.play(requests, [0.0] * len(requests))
        return _as_run(requests, played, closed_loop(played.started_s, played.token_s, batch))

    def run_arrivals(requests: list[Request], arrivals_s: list[float]) -> dict[str, Any]:
        played = peer.play(requests, arrivals_s)
        return _as_run(requests, played, open_loop(played.started_s, played.token_s, arrivals_s))

    return {"prepare": peer.prepare, "run": run, "run_arrivals": run_arrivals}


def _as_run(requests: list[Request], played: Played, timeline: Timeline) -> dict[str, Any]:
    for (_, wanted), times in zip(requests, played.token_s, strict=True):
        if len(times) != wanted:
            raise BenchError(f"a reply has {len(times)} tokens instead of {wanted}")
    run = PeerRun(
        wall_s=timeline.wall_s,
        num_output_tokens=timeline.num_tokens,
        num_steps=None,
        reply_s=timeline.reply_s,
        first_ids=played.first_ids,
        ttft_s=timeline.ttft_s,
        gap_s=timeline.gap_s,
    )
    return asdict(run)
