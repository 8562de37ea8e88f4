"""How a worker ends: running jobs finish within the grace period, what is left goes to a peer, then it leaves.

Leases and replies of all queues are served until the last of it. Whoever calls has stopped the taking of jobs, and
ends the engine and the connections afterwards.
"""

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any

import structlog

from worker.engine_gate import EngineGate
from worker.giving_up import while_worthwhile
from worker.served_queue import ServedQueue

log = structlog.get_logger(__name__)

# Time to write what is gathered and to give unfinished jobs to a peer; and as long to leave the registry.
HAND_OVER_S = 10.0
# How long each of these is tried where Redis is out of reach.
CUT_OFF_S = 0.5


async def shut_down(
    queues: Sequence[ServedQueue], gate: EngineGate, *, grace_s: float, room: asyncio.Event, hurry: asyncio.Event
) -> None:
    """Let jobs finish, then hand over what is left.

    `room` is set whenever a job was settled or lost; `hurry`, that nobody waits for running jobs any longer.
    """
    log.info("worker_stopping", num_jobs=num_held(queues), grace_s=grace_s)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            await _until_empty(queues, room, hurry)
    gate.stop()
    await _while_redis_answers(queues, _hand_over(queues, room))
    await _while_redis_answers(queues, _leave(queues))
    log.info("worker_stopped", num_jobs_left=num_held(queues))


def num_held(queues: Sequence[ServedQueue]) -> int:
    """Jobs of all queues that are taken and not settled."""
    return sum(queue.num_held for queue in queues)


async def _while_redis_answers(queues: Sequence[ServedQueue], work: Coroutine[Any, Any, None]) -> None:
    """Does `work` within HAND_OVER_S. Without Redis it is soon given up: leases run out by themselves."""

    def is_in_vain() -> bool:
        health = [queue.links.health for queue in queues if queue.num_held]
        return all(each.is_cut_off for each in health or [queue.links.health for queue in queues])

    await while_worthwhile(work, is_in_vain, patience_s=CUT_OFF_S, at_most_s=HAND_OVER_S)


async def _hand_over(queues: Sequence[ServedQueue], room: asyncio.Event) -> None:
    await asyncio.gather(*(queue.hand_over_all() for queue in queues))
    await _until_empty(queues, room, asyncio.Event())


async def _leave(queues: Sequence[ServedQueue]) -> None:
    """Where a registry can't be reached, the worker leaves it by its expiry."""
    await asyncio.gather(*(queue.links.registry.leave() for queue in queues), return_exceptions=True)


async def _until_empty(queues: Sequence[ServedQueue], room: asyncio.Event, enough: asyncio.Event) -> None:
    """Wait until no job is held any more, or until `enough` is set."""
    waiting = asyncio.create_task(enough.wait())
    try:
        while num_held(queues) and not enough.is_set():
            room.clear()
            freed = asyncio.create_task(room.wait())
            await asyncio.wait({freed, waiting}, return_when=asyncio.FIRST_COMPLETED)
            freed.cancel()
    finally:
        waiting.cancel()
