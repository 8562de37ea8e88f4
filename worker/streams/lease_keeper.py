"""Renews leases from a thread of its own, so that nothing that holds the service up costs it its jobs."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import structlog

from worker.streams.connection import Backoff, Link
from worker.streams.errors import StreamsError
from worker.streams.health import tell
from worker.streams.leases import Leases

log = structlog.get_logger(__name__)


class LeaseKeeper:
    """Renews what the queues of a worker hold, from one thread with an event loop of its own.

    Each queue comes with the link that its `Leases` use, which is the thread's from then on: one queue whose server is
    away holds up no other. `may_renew` is asked before each round, in that thread; while it says no, the leases run
    out.
    """

    def __init__(self, queues: Sequence[tuple[Leases, Link]], may_renew: Callable[[], bool] = lambda: True) -> None:
        self._queues = queues
        self._may_renew = may_renew

    async def run(self) -> None:
        """Renew every sixth of a lease until cancelled, then close the links.

        Losses are told in the loop that this runs in, where entries are held and released.
        """
        home, own = asyncio.get_running_loop(), asyncio.new_event_loop()
        renewing = own.create_task(self._renew_all(home))
        pool = ThreadPoolExecutor(1, thread_name_prefix="leases")
        ended = home.run_in_executor(pool, _run_to_its_end, own, renewing)
        try:
            await asyncio.shield(ended)
        finally:
            with contextlib.suppress(RuntimeError):  # its loop is closed: it has ended by itself
                own.call_soon_threadsafe(renewing.cancel)
            await asyncio.wait({ended})
            pool.shutdown()

    async def _renew_all(self, home: asyncio.AbstractEventLoop) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for leases, _ in self._queues:
                    with structlog.contextvars.bound_contextvars(queue=leases.queue):  # for what is logged of a loss
                        group.create_task(self._renew_on_time(leases, home))
        finally:
            for _, link in self._queues:
                await link.close()

    async def _renew_on_time(self, leases: Leases, home: asyncio.AbstractEventLoop) -> None:
        """Waits after a lost connection stay below a sixth of a lease."""
        backoff = Backoff(leases.period_s)
        while True:
            try:
                if self._may_renew() and (losses := await leases.renew()):
                    home.call_soon_threadsafe(leases.tell, losses)
                backoff.reset()
                await asyncio.sleep(leases.period_s)
            except StreamsError as error:
                tell(log, "lease_renewal_failed", error, num_held=len(leases))
                await backoff.wait()


def _run_to_its_end(loop: asyncio.AbstractEventLoop, task: "asyncio.Task[None]") -> None:
    """Runs `loop`, which is closed at the end, until `task` ends or is cancelled."""
    try:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())  # where names were looked up
        loop.close()
