"""Whoever does harm: one fault after another, drawn from a seed, each counted when it has struck."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import psutil

from tests.faults.checker import Promise
from tests.faults.fleet import LEASE_MS, Fleet, Member
from tests.faults.history import History, What
from tests.faults.proxy import Line, Proxy
from tests.faults.server import MAX_CUT_S, FaultyServer

# Seconds between two faults, in the mean.
GAP_S = 0.6
# Up to so long a worker or an engine stands still: sometimes its lease runs out, sometimes not.
MAX_FREEZE_S = 2.5 * LEASE_MS / 1000
MAX_HANG_S = 5.0
MAX_DELAY_S = 1.5
MAX_DOWN_S = 1.0
# A worker of the real model takes seconds to start: it is hit less often.
WEIGHT_OF_REAL = 0.5
# Once the time is over, so long may what has not struck yet be tried.
OVERTIME_S = 15.0


class Adversary:
    """Strikes workers, engines, the server and connections. `after_crash` is called when the server is back.

    `strikes` counts the faults that found something to strike, by name; all names are in it from the start.
    """

    def __init__(
        self,
        rng: random.Random,
        fleets: Sequence[Fleet],
        proxy: Proxy,
        server: FaultyServer,
        history: History,
        promise: Promise,
        after_crash: Callable[[], Awaitable[None]],
    ) -> None:
        self._rng = rng
        self._fleets = fleets
        self._proxy = proxy
        self._server = server
        self._history = history
        self._after_crash = after_crash
        self._faults: dict[str, Callable[[], Awaitable[bool]]] = {
            "kill worker": self._kill_worker,
            "freeze worker": self._freeze_worker,
            "stop worker": self._stop_worker,
            "kill engine": self._kill_engine,
            "hang engine": self._hang_engine,
            "kill server": self._kill_server,
            "cut connection": self._cut,
            "delay": self._delay,
            "half-open": self._half_open,
            "lose answer": self._lose_answer,
        }
        if promise is Promise.BOUNDED:
            self._faults["power cut"] = self._cut_power
        self.strikes: Counter[str] = Counter(dict.fromkeys(self._faults, 0))
        self._lasting: set[asyncio.Task[None]] = set()
        self._stopped: dict[psutil.Process, None] = {}

    async def rage(self, seconds: float) -> None:
        """Do harm for that long: every fault once in random order, then any. Then let all of it pass."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        deck = self._rng.sample(list(self._faults), len(self._faults))
        while loop.time() < end or (self._missing() and loop.time() < end + OVERTIME_S):
            if not deck:
                deck = self._missing() if loop.time() >= end else [self._rng.choice(list(self._faults))]
            name = deck.pop()
            if await self._faults[name]():
                # A lost answer is counted when it is lost.
                self.strikes[name] += name != "lose answer"
            await asyncio.sleep(self._rng.uniform(0, 2 * GAP_S))
        await self.rest()

    async def rest(self) -> None:
        """Nothing stands still or is cut off any more."""
        for task in self._lasting:
            task.cancel()
        await asyncio.gather(*self._lasting, return_exceptions=True)
        for process in self._stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        self._proxy.heal()

    def _missing(self) -> list[str]:
        return [name for name, count in self.strikes.items() if not count]

    # Processes.

    def _victim(self) -> Member | None:
        """A worker that takes jobs."""
        members = [
            (member, 1.0 if fleet.is_scripted else WEIGHT_OF_REAL)
            for fleet in self._fleets
            for member in fleet.members
            if member.is_ready and not member.is_doomed and member.process.poll() is None
        ]
        if not members:
            return None
        return self._rng.choices([member for member, _ in members], [weight for _, weight in members])[0]

    async def _kill_worker(self) -> bool:
        member = self._victim()
        if member is None:
            return False
        member.is_doomed = True
        member.process.kill()
        return True

    async def _stop_worker(self) -> bool:
        """SIGTERM; now and then a second one."""
        member = self._victim()
        if member is None:
            return False
        member.is_doomed = True
        member.process.terminate()
        if self._rng.random() < 0.3:
            await asyncio.sleep(0.1)
            member.process.terminate()
        return True

    async def _freeze_worker(self) -> bool:
        """SIGSTOP for the service, or for its engine as well."""
        member = self._victim()
        processes = [] if member is None else member.processes()
        if self._rng.random() < 0.5:
            processes = processes[:1]
        return self._suspend(processes, self._rng.uniform(0.3, MAX_FREEZE_S))

    async def _kill_engine(self) -> bool:
        member = self._victim()
        engines = [] if member is None else member.processes()[1:]
        for engine in engines:
            engine.kill()
        return bool(engines)

    async def _hang_engine(self) -> bool:
        member = self._victim()
        return self._suspend([] if member is None else member.processes()[1:], self._rng.uniform(0.5, MAX_HANG_S))

    def _suspend(self, processes: Sequence[psutil.Process], seconds: float) -> bool:
        async def wake_later() -> None:
            await asyncio.sleep(seconds)
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()

        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
                self._stopped[process] = None
        task = asyncio.create_task(wake_later())
        self._lasting.add(task)
        task.add_done_callback(self._lasting.discard)
        return bool(processes)

    # The server.

    async def _kill_server(self) -> bool:
        return await self._crash(0.0)

    async def _cut_power(self) -> bool:
        return await self._crash(self._rng.uniform(0.1, MAX_CUT_S))

    async def _crash(self, forget_s: float) -> bool:
        self._history.add(What.CRASHED)
        self._proxy.server = None
        await self._server.crash(forget_s)
        await asyncio.sleep(self._rng.uniform(0, MAX_DOWN_S))
        await self._server.start()
        self._proxy.server = self._server.address
        await self._after_crash()
        return True

    # Connections.

    def _lines(self) -> list[Line]:
        """Some connections: one, all of one party, or all there are."""
        lines = self._proxy.lines()
        if not lines:
            return []
        one = self._rng.choice(lines)
        return self._rng.choice([[one], [one], self._proxy.lines(one.party), lines])

    async def _cut(self) -> bool:
        lines = self._lines()
        for line in lines:
            line.cut()
        return bool(lines)

    async def _delay(self) -> bool:
        lines = self._lines()
        until = asyncio.get_running_loop().time() + self._rng.uniform(0.05, MAX_DELAY_S)
        for line in lines:
            line.held_until = until
        return bool(lines)

    async def _half_open(self) -> bool:
        lines = self._lines()
        for line in lines:
            line.is_half_open = True
        return bool(lines)

    async def _lose_answer(self) -> bool:
        lines = self._lines()
        for line in lines:
            line.lose_answer(lambda: self.strikes.update(["lose answer"]))
        return bool(lines)
