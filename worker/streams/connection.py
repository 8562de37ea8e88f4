"""One connection to Redis that knows when it was lost.

A pool reconnects silently, but here it matters: after a failover the next token write would be accepted by a server
that lost the tokens before it. So each Link is one connection with one counter of connects; whoever writes replies
compares that counter. Replies are RESP2 as they come, in bytes. Nothing is ever retried here, but for the commands that
a Cluster's node has not carried out and sends to another (ASK).
"""

import asyncio
import random
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import structlog

from worker.streams.address import parse_address
from worker.streams.errors import ConnectionLostError, ServerError
from worker.streams.health import ServerHealth
from worker.streams.route import Route, target_of
from worker.streams.wire import Argument, Command, Wire

# A blocking read waits this long on the server; short, so that hints and a stop are met soon.
BLOCK_MS = 500

log = structlog.get_logger(__name__)

__all__ = ["BLOCK_MS", "Argument", "Backoff", "Command", "Link"]


class Link:
    """A connection that is made when it is first needed and made anew after it was lost.

    Commands of several tasks are sent one after the other. `generation` counts the connects: it changes exactly when
    what was sent before may have been lost. All keys of a queue are on one server, which is looked for at every
    connect.
    """

    def __init__(
        self,
        url: str,
        name: str,
        queue: str | None = None,
        health: ServerHealth | None = None,
        *,
        max_answer_s: float | None = None,
    ) -> None:
        """`queue` is whose keys the commands name; a Cluster's node for no queue in particular is good for little else
        than INFO. `name` labels log events, and `health` hears of all trouble. `max_answer_s`: how long an answer may
        take, where that is less than the URL says.

        Raises StartupError where the URL can't be understood.
        """
        address = parse_address(url)
        if max_answer_s is not None:
            address = replace(address, timeout_s=min(address.timeout_s, max_answer_s))
        self._route = Route(address, queue)
        self._name = name
        self._health = health
        self._lock = asyncio.Lock()
        self._wire: Wire | None = None
        self.generation = 0

    @property
    def is_up(self) -> bool:
        """Whether the next command goes over the connection that the last one used."""
        return self._wire is not None

    async def call(self, *command: Argument) -> Any:
        """The answer to one command. Raises ServerError for an error answer, ConnectionLostError for none."""
        (answer,) = await self.batch([command])
        if isinstance(answer, ServerError):
            raise answer
        return answer

    async def batch(self, commands: Sequence[Command], *, generation: int | None = None) -> list[Any]:
        """The answers to `commands`, sent at once; error answers stand in the list as ServerError.

        With `generation`, only over that connection. Raises ConnectionLostError if any answer is missing: what was
        carried out is not known then.
        """
        async with self._lock:
            if generation is not None and not (self._wire is not None and generation == self.generation):
                raise ConnectionLostError("the connection to Redis was lost before the write")
            wire = await self._connect()
            if generation is not None and generation != self.generation:
                raise ConnectionLostError("another server has the queue now")
            try:
                answers = await wire.ask(commands)
                answers = await self._ask_elsewhere(wire, commands, answers)
            except ConnectionLostError as error:
                await self._drop()
                self._note_loss(error)
                raise
            except BaseException:
                # Cancelled half-way: the answers still to come would be taken for those of the next command.
                await self._drop()
                raise
            await self._look_at(wire, commands, answers)
            return answers

    async def connect(self) -> int:
        """Connects where that is needed; answers the generation. Raises ConnectionLostError."""
        async with self._lock:
            await self._connect()
            return self.generation

    async def reset(self) -> None:
        """Closes the connection; the next command makes a new one."""
        async with self._lock:
            await self._drop()

    async def close(self) -> None:
        """Closes the connection for good."""
        await self.reset()

    async def _connect(self) -> Wire:
        if self._wire is not None and not await self._route.is_right(self._wire):
            await self._drop()
        if self._wire is not None:
            return self._wire
        try:
            self._wire = await self._route.connect()
        except ConnectionLostError as error:
            self._note_loss(error)
            raise
        self.generation += 1
        if self.generation > 1:
            log.debug("redis_reconnected", link=self._name, generation=self.generation)
        return self._wire

    async def _ask_elsewhere(self, wire: Wire, commands: Sequence[Command], answers: list[Any]) -> list[Any]:
        """While a slot moves, what its owner has not carried out goes to the next one: its key is there, or new.

        In the order of `commands`, before anything later is sent.
        """
        asks = [(number, answer) for number, answer in enumerate(answers) if _is_ask(answer)]
        target = target_of(asks[0][1], wire.node) if asks else None
        if target is None:
            return answers
        other = await self._route.open(target)
        try:
            found = await other.ask([part for number, _ in asks for part in (("ASKING",), commands[number])])
        finally:
            await other.close()
        answers = list(answers)
        for (number, _), answer in zip(asks, found[1::2], strict=True):
            answers[number] = answer
        return answers

    async def _look_at(self, wire: Wire, commands: Sequence[Command], answers: Sequence[Any]) -> None:
        """Leaves a server that is the wrong one, and has the health know what was refused and what went well."""
        for answer in answers:
            if isinstance(answer, ServerError) and answer.is_wrong_server:
                self._route.learn(answer, wire.node)
                await self._drop()
        if self._health is None:
            return
        refused = set()
        for command, answer in zip(commands, answers, strict=True):
            if isinstance(answer, ServerError):
                refused.add(_kind_of(command))
                self._health.refused(self._name, _kind_of(command), answer)
        self._health.heard(self._name)
        if self._health.is_troubled:
            for kind in {_kind_of(command) for command in commands} - refused:
                self._health.answered(self._name, kind)

    def _note_loss(self, error: ConnectionLostError) -> None:
        if self._health is not None:
            self._health.lost(self._name, error)

    async def _drop(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            await wire.close()


class Backoff:
    """Waits between tries: doubling from 50 ms up to `cap_s`, with jitter. A success resets it."""

    def __init__(self, cap_s: float) -> None:
        self._cap_s = cap_s
        self._next_s = 0.0

    async def wait(self) -> None:
        """Sleeps for the next wait."""
        self._next_s = min(self._cap_s, max(0.05, 2 * self._next_s))
        await asyncio.sleep(self._next_s * random.uniform(0.5, 1.0))

    def reset(self) -> None:
        """The last try succeeded."""
        self._next_s = 0.0


def _is_ask(answer: Any) -> bool:
    return isinstance(answer, ServerError) and answer.code == "ASK"


def _kind_of(command: Command) -> Hashable:
    """What tells one kind of command from another: its name, and which script."""
    return (command[0], command[1]) if command[0] in ("EVALSHA", "EVAL") else command[0]
