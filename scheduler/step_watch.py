"""What is learned from each step when it is over: its time, and who has used what of it."""

from collections.abc import Sequence as SequenceABC

from scheduler.config import SchedulerConfig
from scheduler.latency_guard import LatencyGuard
from scheduler.output import Chunk
from scheduler.policy_fair import FairShare
from scheduler.preemption import RunningQueue
from scheduler.sequence import Sequence
from scheduler.step_pace import StepPace


class StepWatch:
    """Tells a step's time and work to the pace, the latency guard and the tenants' accounts.

    Raises InvalidConfigError for a target of the time between tokens that isn't above 0.
    """

    def __init__(self, config: SchedulerConfig, fair: FairShare | None) -> None:
        self.pace = StepPace(config.max_num_batched_tokens)
        self.guard = LatencyGuard(config.target_itl_ms, config.max_num_seqs, config.max_num_batched_tokens)
        self._fair = fair
        self._begun_s = 0.0

    def begin(self, now: float) -> None:
        """A step is to be scheduled."""
        self._begun_s = now

    def end(self, now: float, running: RunningQueue, work: SequenceABC[tuple[Sequence, Chunk]]) -> None:
        """`work` was computed; `running` are those that hold blocks, the sequences of the work not moved on yet."""
        step_s = now - self._begun_s
        num_tokens = sum([chunk.num_tokens for _, chunk in work])
        self.pace.observe(step_s, num_tokens, len(work))
        num_decoding = sum([chunk.is_sampled for _, chunk in work])
        self.guard.observe(step_s, num_tokens, len(work), num_decoding)
        if self._fair is not None:
            self._fair.charge_step(running, work, step_s)
