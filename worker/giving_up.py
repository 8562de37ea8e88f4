"""How long a worker that was told to stop still waits for a server that doesn't answer."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Answer = TypeVar("Answer")

# How often is looked whether it still makes sense to wait.
_LOOK_S = 0.05


async def unless_stopped(work: Coroutine[Any, Any, Answer], stop: asyncio.Event, patience_s: float) -> Answer | None:
    """What `work` answers; None, and `work` cancelled, if it takes longer than `patience_s` once `stop` is set."""
    working = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({working}, timeout=patience_s)
        return working.result() if working.done() else None
    finally:
        await _end(working, stopping)


async def while_worthwhile(
    work: Coroutine[Any, Any, None], is_hopeless: Callable[[], bool], *, patience_s: float, at_most_s: float
) -> None:
    """Does `work` for `at_most_s`; given up sooner once it `is_hopeless` for `patience_s` on end.

    Raises what `work` raises.
    """
    working = asyncio.create_task(work)
    loop = asyncio.get_running_loop()
    began = hopeful_at = loop.time()
    try:
        while not working.done() and (now := loop.time()) - began < at_most_s:
            if not is_hopeless():
                hopeful_at = now
            elif now - hopeful_at >= patience_s:
                return
            await asyncio.wait({working}, timeout=_LOOK_S)
        if working.done():
            working.result()
    finally:
        await _end(working)


async def _end(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
