"""Everything of one queue that talks to Redis, put together: which part uses which connection, and in what order."""

from dataclasses import dataclass
from typing import Self

from scheduler.policy_names import PolicyName, parse_policy
from worker.lane_weights import parse_lane_weights
from worker.protocol import ProtocolLimits
from worker.settings import Settings
from worker.streams.admission import Admission
from worker.streams.clock import ServerClock
from worker.streams.connection import Link
from worker.streams.health import ServerHealth
from worker.streams.jobs import JobSource, SourceOptions
from worker.streams.keys import QueueKeys
from worker.streams.leases import Leases
from worker.streams.outcomes import Outcomes
from worker.streams.overload import OldestWatch
from worker.streams.registry import CancelMarks, ControlReader, Registry
from worker.streams.replies import Replies
from worker.streams.scripts import Scripts
from worker.streams.turns import Turns

# However short a lease is, a server may take so long to answer.
MIN_ANSWER_S = 1.0


@dataclass(frozen=True, slots=True)
class QueueLinks:
    """The parts that serve one queue.

    Five connections: `source` and `control` block in their reads; `leasing` belongs to the thread that renews, which
    waits for nothing else; events go over a fourth, whose loss has a meaning of its own; all other commands share
    the fifth. No two queues share one: each queue is one slot, which may lie on a server of its own.
    """

    keys: QueueKeys
    clock: ServerClock
    commands: Link
    reading: Link
    leasing: Link
    leases: Leases
    source: JobSource
    replies: Replies
    outcomes: Outcomes
    oldest: OldestWatch
    admission: Admission
    registry: Registry
    control: ControlReader
    marks: CancelMarks
    limits: ProtocolLimits
    health: ServerHealth
    links: tuple[Link, ...]

    @classmethod
    def make(
        cls,
        settings: Settings,
        url: str,
        worker_id: str,
        *,
        queue: str,
        model: str,
    ) -> Self:
        """Put the parts together; nothing connects yet. Raises StartupError for a URL or a name that can't be used."""
        keys, clock, limits = QueueKeys(queue), ServerClock(), protocol_limits(settings)
        health = ServerHealth()
        commands, reading, events, control = (
            Link(url, name, queue, health) for name in ("commands", "jobs", "events", "control")
        )
        # A dead connection has to be noticed while there is time to renew over another one.
        max_answer_s = max(MIN_ANSWER_S, settings.lease_ms / 3000)
        leasing = Link(url, "leases", queue, health, max_answer_s=max_answer_s)
        scripts = Scripts(commands, keys, worker_id)
        leases = Leases(Scripts(leasing, keys, worker_id), settings.lease_ms)
        weights = parse_lane_weights(settings.lane_weights)
        options = SourceOptions(lease_ms=settings.lease_ms, lane_weights=weights)
        source = JobSource(reading, keys, worker_id, leases, options)

        admission = Admission(scripts, lease_ms=settings.lease_ms, run_ttl_ms=settings.run_ttl_ms)
        oldest = OldestWatch(
            *(commands, scripts, keys, clock, leases, settings.max_queue_depth, settings.lease_ms // 3)
        )
        is_fair = PolicyName.FAIR in parse_policy(settings.scheduling_policy)
        source.picker = Turns(oldest, admission, leases, is_fair=is_fair)
        return cls(
            keys=keys,
            clock=clock,
            commands=commands,
            reading=reading,
            leasing=leasing,
            leases=leases,
            source=source,
            replies=Replies(
                events,
                scripts,
                commands,
                keys,
                clock,
                model=model,
                run_ttl_ms=settings.run_ttl_ms,
                backoff_cap_s=settings.lease_ms / 6000,
            ),
            outcomes=Outcomes(scripts, leases, settings.lease_ms),
            oldest=oldest,
            admission=admission,
            registry=Registry(commands, scripts, keys, worker_id, clock, settings.heartbeat_ms),
            control=ControlReader(control, keys),
            marks=CancelMarks(commands, keys),
            limits=limits,
            health=health,
            links=(commands, reading, events, control),
        )

    @property
    def is_connected(self) -> bool:
        """Whether the connection that jobs are read from is up; it is in use all the time."""
        return self.reading.is_up

    async def close(self) -> None:
        """Close all connections but `leasing`, which whoever renews closes."""
        for link in self.links:
            await link.close()


def protocol_limits(settings: Settings) -> ProtocolLimits:
    """What a job may at most be, by the settings."""
    return ProtocolLimits(
        max_fields_bytes=settings.max_job_bytes,
        max_prompt_ref_bytes=settings.max_job_bytes,
        default_result_ttl_ms=settings.result_ttl_ms,
        max_result_ttl_ms=settings.max_result_ttl_ms,
    )
