"""Decides what the engine computes next: plain Python, no torch, no Redis, no clock of its own.

In the order in which to read: `sequence` (one request), `block_pool`, `block_table`, `prefix_cache`, `swap_tier` and
`kv_cache_manager` (memory), `policy`, `account`, `policy_fair`, `waiting_queue` and `preemption` (who comes first, who
gives way), `step_pace`, `latency_guard`, `admission_delay` and `deadlines` (what follows from the time that steps
take), `queues` and `roster` (who is where, who is in), `step_adder` (one step in the making), `serving`, `admission`,
`write_behind` and `progress` (its parts), `lookahead` (a step decided ahead), `scheduler` (all of it together),
`invariants` (what always holds).
`output` is what it says to the others; docs/scheduler.md tells why it is so.
"""

from scheduler.config import CacheConfig, PreemptionMode, SchedulerConfig
from scheduler.output import (
    FinishReason,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
    SequenceOutput,
    SequenceStats,
    Transfer,
    TransferResult,
)
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence, SequenceStatus

__all__ = [
    "CacheConfig",
    "FinishReason",
    "ModelRunnerOutput",
    "PreemptionMode",
    "SamplingParams",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutput",
    "SchedulerStats",
    "Sequence",
    "SequenceOutput",
    "SequenceStats",
    "SequenceStatus",
    "Transfer",
    "TransferResult",
]
