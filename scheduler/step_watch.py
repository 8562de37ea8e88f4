"""What is learned from each step when it is over: its time, and who has used what of it."""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC
from itertools import compress
from math import inf

from scheduler.config import SchedulerConfig
from scheduler.latency_guard import LatencyGuard
from scheduler.output import Chunks
from scheduler.policy_fair import FairShare
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
        self._begun_s: deque[float] = deque()
        self._ended_s = -inf

    def begin(self, now: float) -> None:
        """A step is to be scheduled. Steps end in the order in which they begin."""
        self._begun_s.append(now)

    def end(self, now: float, running: Iterable[Sequence], seqs: SequenceABC[Sequence], chunks: Chunks) -> None:
        """`chunks`, of `seqs`, were computed; `running` are those that hold blocks, none of the chunks added yet.

        A step that was scheduled while another was computed takes from that one's end to its own.
        """
        step_s = now - max(self._begun_s.popleft(), self._ended_s)
        self._ended_s = now
        num_tokens = sum(chunks.num_tokens)
        self.pace.observe(step_s, num_tokens, len(seqs))
        self.guard.observe(step_s, num_tokens, len(seqs), sum(chunks.is_sampled))
        if self._fair is not None:
            self._fair.charge_step(running, compress(seqs, chunks.is_sampled), num_tokens, step_s)
