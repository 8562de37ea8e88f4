"""Everything that one worker uses of one queue, wired together."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from worker.protocol_envelope import DEFAULT_LIMITS, JobEnvelope, ProtocolLimits, parse_envelope
from worker.streams.clock import ServerClock
from worker.streams.connection import Link, check_server
from worker.streams.jobs import JobSource, SourceOptions
from worker.streams.keys import QueueKeys, check_worker_id
from worker.streams.lanes import LaneOrder
from worker.streams.leases import Entry, Leases, Loss
from worker.streams.outcomes import Outcomes, fetch_prompt
from worker.streams.overload import OldestWatch
from worker.streams.registry import CancelMarks, ControlReader, Registry, add_dead_letter, read_config
from worker.streams.replies import RUN_TTL_MS, Replies
from worker.streams.scripts import Scripts


@dataclass(frozen=True, slots=True)
class HubOptions:
    """What a worker says once, at start. `max_depth` 0 is no limit; `model` stands in each reply's `open` event."""

    url: str
    queue: str
    worker_id: str
    model: str
    lease_ms: int = 30_000
    beat_ms: int = 5_000
    scan_ms: int = 5_000
    run_ttl_ms: int = RUN_TTL_MS
    max_depth: int = 0
    lane_weights: tuple[int, int, int] = (8, 4, 1)
    is_lane_order_strict: bool = False
    limits: ProtocolLimits = DEFAULT_LIMITS


class Hub:
    """Owns the five links of a worker and what works over them.

        jobs      `source`: blocks            control   `control`: blocks
        leases    `leases`: its own, so that nothing delays a renewal
        replies   `replies`: events only      commands  all else: open, settle, marks, beats, prompts

    The caller runs the tasks: `leases.run`, `replies.run`, `registry.run`, a loop over `source.take` (or, without
    room, `oldest.look` once a second), and a loop over `control.read`.
    """

    def __init__(self, options: HubOptions, on_loss: Callable[[Entry, Loss], None]) -> None:
        """`on_loss` hears of entries that are no longer ours: see `Leases`. Raises StartupError for bad names."""
        self.options = options
        worker_id = check_worker_id(options.worker_id)
        keys = self.keys = QueueKeys(options.queue)
        names = ("jobs", "leases", "replies", "commands", "control")
        self._links = {name: Link(options.url, name) for name in names}
        self.commands = self._links["commands"]
        self.clock = ServerClock()
        scripts = self.scripts = Scripts(self.commands, keys, worker_id)
        self.leases = Leases(Scripts(self._links["leases"], keys, worker_id), options.lease_ms, on_loss)
        source_options = SourceOptions(options.lease_ms, options.scan_ms)
        self.source = JobSource(self._links["jobs"], keys, worker_id, self.leases, source_options)
        weights = dict(zip(("high", "normal", "low"), options.lane_weights, strict=True))
        self.source.lanes = LaneOrder(weights, is_strict=options.is_lane_order_strict)
        self.oldest = OldestWatch(
            self.commands, scripts, keys, self.clock, self.leases, self._parse_at, options.max_depth
        )
        self.replies = Replies(
            self._links["replies"],
            scripts,
            self.commands,
            keys,
            self.clock,
            model=options.model,
            run_ttl_ms=options.run_ttl_ms,
            backoff_cap_s=options.lease_ms / 6000,
        )
        self.outcomes = Outcomes(scripts, self.leases, options.lease_ms)
        self.registry = Registry(self.commands, scripts, keys, worker_id, self.clock, options.beat_ms)
        self.cancels = CancelMarks(self.commands, keys)
        self.control = ControlReader(self._links["control"], keys)

    @classmethod
    async def connect(cls, options: HubOptions, on_loss: Callable[[Entry, Loss], None]) -> Self:
        """A hub whose server was found fit: groups exist, the clock is set. Raises StartupError, one line."""
        hub = cls(options, on_loss)
        await check_server(options.url)
        await hub.clock.sync(hub.commands)
        await hub.source.ensure_groups()
        return hub

    def parse(self, entry: Entry) -> JobEnvelope:
        """The envelope of an entry that was picked up now; never raises."""
        return self._parse_at(entry, self.clock.now_ms())

    def _parse_at(self, entry: Entry, now_ms: int) -> JobEnvelope:
        limits = self.options.limits
        return parse_envelope(
            entry.lane, entry.entry_id, entry.fields, now_ms=now_ms, repeated=entry.repeated, limits=limits
        )

    async def fetch_prompt(self, name: str) -> bytes:
        """The large prompt that a job's `prompt_ref` names. Raises JobError or StreamsError."""
        return await fetch_prompt(self.commands, self.keys, name, self.options.limits.max_prompt_ref_bytes)

    async def read_config(self) -> dict[str, str]:
        """The operators' settings of this queue. Raises StreamsError."""
        return await read_config(self.commands, self.keys)

    async def add_dead_letter(self, entry: Entry, error: str) -> None:
        """Keeps a job that can't be answered, and why. Raises StreamsError."""
        await add_dead_letter(self.commands, self.keys, entry, error=error, workers=(self.options.worker_id,))

    async def close(self) -> None:
        """Closes all links. End the tasks before."""
        for link in self._links.values():
            await link.close()
