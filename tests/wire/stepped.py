"""Links whose commands take their turns as a seed says: the order of all steps is the seed's alone."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from tests.wire.resp import RespClient, RespError
from tests.wire.workers import FaultyLink
from worker.streams.connection import Command
from worker.streams.errors import ConnectionLostError, ServerError

FULL = "OOM command not allowed when used memory > 'maxmemory'."


class SteppedLink(FaultyLink):
    """A link that waits for its answers without letting the loop turn, over a client that it shares with others.

    With `rng`, other tasks go first for some turns, or for none, before a command is sent and before its answer comes
    in. A lost connection is only counted: what was in flight then is lost. With `is_refusing` the server is full when
    the next event of a reply comes, and has room again for what is sent behind it.
    """

    def __init__(self, raw: RespClient, url: str, name: str, queue: str) -> None:
        super().__init__(url, name, queue)
        self._raw = raw
        self._is_connected = False
        self.rng: random.Random | None = None
        self.is_refusing = False

    @property
    def is_up(self) -> bool:
        return self._is_connected

    async def connect(self) -> int:
        if not self._is_connected:
            self._is_connected = True
            self.generation += 1
        return self.generation

    async def reset(self) -> None:
        self._is_connected = False

    async def batch(self, commands: Sequence[Command], *, generation: int | None = None) -> list[Any]:
        await dawdle(self.rng)
        if generation is not None and not (self._is_connected and generation == self.generation):
            raise ConnectionLostError("lost before the write, by the test")
        generation = await self.connect()
        if self.lose_before:
            self.lose_before = False
            await self.reset()
            raise ConnectionLostError("lost before the send, by the test")
        answers = self._exchange(commands)
        await dawdle(self.rng)
        if self.lose_after or not self._is_connected or generation != self.generation:
            self.lose_after = False
            await self.reset()
            raise ConnectionLostError("the answer was lost, by the test")
        return answers

    def _exchange(self, commands: Sequence[Command]) -> list[Any]:
        refused: list[Any] = []
        if self.is_refusing and commands[0][0] == "XADD":
            self.is_refusing = False
            refused, commands = [ServerError(FULL)], commands[1:]
        sent = [tuple(part if isinstance(part, bytes | int) else str(part) for part in command) for command in commands]
        answers = self._raw.pipeline(*sent)
        return refused + [ServerError(str(each)) if isinstance(each, RespError) else each for each in answers]


async def dawdle(rng: random.Random | None) -> None:
    """Lets other tasks go first, for up to five turns."""
    for _ in range(0 if rng is None else rng.randrange(6)):
        await asyncio.sleep(0)
