"""How long a worker that was told to stop still waits for a server that doesn't answer."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

# How often is looked whether it still makes sense to wait.
_LOOK_S = 0.05


async def while_worthwhile(
    work: Coroutine[Any, Any, None], is_hopeless: Callable[[], bool], *, at_least_s: float, at_most_s: float
) -> None:
    """Does `work` for `at_most_s`; after `at_least_s` it is given up where `is_hopeless`. Raises what it raises."""
    working = asyncio.create_task(work)
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        while not working.done() and (waited_s := loop.time() - began) < at_most_s:
            if waited_s >= at_least_s and is_hopeless():
                return
            await asyncio.wait({working}, timeout=_LOOK_S)
        if working.done():
            working.result()
    finally:
        working.cancel()
        await asyncio.wait({working})
