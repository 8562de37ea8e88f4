"""The way to the server that has a queue: asked anew at every connect, since failovers and resharding move it.

single      the one address
sentinel    each Sentinel in turn for the primary's address, until a server there says of itself that it is one
cluster     each node in turn for the owner of the queue's slot; who isn't it names it (MOVED)
"""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

from worker.streams.address import Address, Node, Topology
from worker.streams.errors import ConnectionLostError, LoginRefusedError, ServerError
from worker.streams.keys import QueueKeys
from worker.streams.wire import Command, Wire

_SLOTS: Command = ("CLUSTER", "SLOTS")
# A primary that was replaced while it lives learns it late, from the Sentinels (measured: 10 s after they had agreed).
# What is written to it until then is lost, so whoever writes asks them, this often and no longer than that.
CHECK_EVERY_S = 2.0
CHECK_TIMEOUT_S = 0.5


class Route:
    """Finds the server of `queue`; None is any server of a Cluster, for what belongs to no queue."""

    def __init__(self, address: Address, queue: str | None) -> None:
        self._address = address
        # Clients and workers alike may ask for a lane's length, and only the slot's owner answers.
        self._probe: Command = ("PING",) if queue is None else ("XLEN", QueueKeys(queue).jobs("normal"))
        # Whoever knew the way the last time is at the front.
        self._nodes = list(address.nodes)
        self._owner: Node | None = None
        self._next_check = 0.0

    async def connect(self) -> Wire:
        """A connection to the right server. Raises ConnectionLostError where none is found."""
        match self._address.topology:
            case Topology.SENTINEL:
                return await self._to_primary()
            case Topology.CLUSTER:
                return await self._to_owner()
        wire, _ = await _opened(self._address, self._nodes[0] if self._nodes else None)
        return wire

    async def open(self, node: Node) -> Wire:
        """A connection to this one. Raises ConnectionLostError."""
        wire, _ = await _opened(self._address, node)
        return wire

    async def is_right(self, wire: Wire) -> bool:
        """Whether the Sentinels still name this server, asked now and then; as long as they don't answer, they do."""
        now = time.monotonic()
        if self._address.topology is not Topology.SENTINEL or now < self._next_check:
            return True
        self._next_check = now + CHECK_EVERY_S
        sentinel = self._nodes[0]
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                return await self._primary_by(sentinel) == wire.node
        except (ConnectionLostError, TimeoutError):
            self._nodes = [*self._nodes[1:], sentinel]
            return True

    def learn(self, error: ServerError, asked: Node | None) -> None:
        """Remembers the owner that a MOVED of the node `asked` names."""
        if error.code == "MOVED" and (node := target_of(error, asked)) is not None:
            self._owner = node

    async def _to_primary(self) -> Wire:
        last: Exception | None = None
        is_known = False
        for sentinel in list(self._nodes):
            try:
                node = await self._primary_by(sentinel)
                is_known = True
                wire, (role,) = await _opened(self._address, node, ("ROLE",))
            except LoginRefusedError:
                raise
            except ConnectionLostError as error:
                last = error
                continue
            # Who has no right to ask finds out by its first write.
            if role.code == "NOPERM" if isinstance(role, ServerError) else role[0] == b"master":
                self._nodes.remove(sentinel)
                self._nodes.insert(0, sentinel)
                self._next_check = time.monotonic() + CHECK_EVERY_S
                return wire
            await wire.close()
            last = ConnectionLostError(f"{_text(node)} is no primary")
        # A Sentinel that knows the name will know the next primary too.
        name = self._address.service
        raise ConnectionLostError(f"no primary of {name!r} is found: {last}", is_passing=is_known) from last

    async def _primary_by(self, sentinel: Node) -> Node:
        """What one Sentinel takes for the primary. Raises ConnectionLostError."""
        question = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._address.service)
        where = f"the Sentinel at {_text(sentinel)}"
        try:
            wire, (answer,) = await _opened(self._address.of_sentinels(), sentinel, question)
        except LoginRefusedError as error:
            raise LoginRefusedError(f"{where} refuses sentinel_username or sentinel_password ({error})") from error
        await wire.close()
        if isinstance(answer, ServerError):
            raise ConnectionLostError(f"{where} refuses: {answer}")
        if answer is None:
            raise ConnectionLostError(f"{where} watches no {self._address.service!r}")
        return answer[0].decode(), int(answer[1])

    async def _to_owner(self) -> Wire:
        last: Exception | None = None
        refusal: Exception | None = None
        is_passing = False
        asked: set[Node] = set()
        waiting = [*([self._owner] if self._owner else []), *self._nodes]
        while waiting:
            node = waiting.pop(0)
            if node in asked:
                continue
            asked.add(node)
            try:
                wire, (answer, slots) = await _opened(self._address, node, self._probe, _SLOTS)
            except LoginRefusedError:
                raise
            except ConnectionLostError as error:
                last, is_passing = error, is_passing or error.is_passing
                continue
            # Who else may be asked once this one is gone. Without the right to ask, those that the URL names remain.
            if not isinstance(slots, ServerError):
                self._nodes = list(dict.fromkeys([*self._address.nodes, *_nodes_of(slots, node)]))
                waiting += self._nodes
            # ASK is the owner's, of a lane that isn't there.
            if not isinstance(answer, ServerError) or answer.code == "ASK" or not answer.is_temporary:
                self._owner = node
                return wire
            await wire.close()
            is_passing = True
            if (owner := target_of(answer, node)) is None:
                refusal = answer
            else:
                waiting.insert(0, owner)
        why = refusal or last or "they don't agree who has it"
        raise ConnectionLostError(f"no node of the Cluster serves the queue: {why}", is_passing=is_passing) from last


async def node_url(address: Address, queue: str | None) -> str:
    """The URL of the server that has the queue now, for tools that know no other. Raises ConnectionLostError."""
    if address.topology is Topology.SINGLE:
        return address.url
    wire = await Route(address, queue).connect()
    await wire.close()
    assert wire.node is not None, "these are found over TCP"
    return address.plain_url(wire.node)


def target_of(error: ServerError, asked: Node | None) -> Node | None:
    """The node that MOVED or ASK names; a node that doesn't know its own address means that of the one `asked`."""
    target = error.target
    if target is None or target[0] or asked is None:
        return target
    return asked[0], target[1]


async def _opened(address: Address, node: Node | None, *commands: Command) -> tuple[Wire, list[Any]]:
    """A connection to `node`, and the answers to the first commands over it. Raises ConnectionLostError."""
    wire = Wire(address, node)
    try:
        await wire.connect()
        return wire, await wire.ask(commands) if commands else []
    except BaseException:
        await wire.close()
        raise


def _nodes_of(slots: list[Any], asked: Node) -> Iterator[Node]:
    """The nodes in an answer to CLUSTER SLOTS, primaries and replicas."""
    for _first, _last, *members in slots:
        for host, port, *_ in members:
            if host != b"?":  # a node that has no name
                yield host.decode() if host else asked[0], int(port)


def _text(node: Node) -> str:
    return f"{node[0]}:{node[1]}"
