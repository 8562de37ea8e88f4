"""Parts of a trace, and the same trace faster, slower or smaller."""

import random
from dataclasses import replace

from ops.simulate.errors import SimulateError
from ops.simulate.traces import Trace, TraceRequest


def window(trace: Trace, num_requests: int | None, seed: int | None) -> Trace:
    """`num_requests` requests in a row: the first ones, or from where `seed` says; all of them for None."""
    total = len(trace.requests)
    if num_requests is None or num_requests >= total:
        return trace
    start = 0 if seed is None else random.Random(seed).randrange(total - num_requests + 1)
    chosen = trace.requests[start : start + num_requests]
    start_s = chosen[0].arrival_s
    return replace(
        trace,
        requests=tuple(
            replace(each, index=index, arrival_s=each.arrival_s - start_s) for index, each in enumerate(chosen)
        ),
    )


def with_burst(trace: Trace, num_requests: int) -> tuple[Trace, float]:
    """The same with `num_requests` requests of the middle arriving at once, when the first of them does; and that time.

    All others come when they came.
    """
    requests = trace.requests
    first = len(requests) // 2
    burst_s = requests[first].arrival_s
    burst = range(first, first + num_requests)
    changed = tuple(replace(each, arrival_s=burst_s) if each.index in burst else each for each in requests)
    return replace(trace, requests=changed), burst_s


def scaled(trace: Trace, *, speed_up: float, lengths: float, replies: float = 1.0) -> Trace:
    """Arrivals `speed_up` times as fast, and `lengths` times as many tokens in prompts, replies and shared blocks.

    Replies are `replies` times as long as that. Raises SimulateError where blocks that prompts share would have less
    than a token.
    """
    if speed_up == lengths == replies == 1:
        return trace
    tokens_per_hash = round(trace.tokens_per_hash * lengths)
    if tokens_per_hash < 1:
        raise SimulateError(f"lengths times {lengths:g} leave nothing of blocks of {trace.tokens_per_hash} tokens")
    requests = tuple(_scaled(each, speed_up, lengths, replies, tokens_per_hash) for each in trace.requests)
    return replace(trace, requests=requests, tokens_per_hash=tokens_per_hash)


def _scaled(
    request: TraceRequest, speed_up: float, lengths: float, replies: float, tokens_per_hash: int
) -> TraceRequest:
    num_prompt_tokens = max(1, round(request.num_prompt_tokens * lengths))
    if request.hash_ids:
        # The last id's block still holds something, and no token lies beyond it.
        most = len(request.hash_ids) * tokens_per_hash
        num_prompt_tokens = min(most, max(num_prompt_tokens, most - tokens_per_hash + 1))
    return replace(
        request,
        arrival_s=request.arrival_s / speed_up,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=max(1, round(request.num_output_tokens * lengths * replies)),
    )
