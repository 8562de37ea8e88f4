"""What steps take, learned from the times that the scheduler is told."""

from collections import deque

# The shortest of so many steps stands for what a step takes at least.
NUM_REMEMBERED = 32


class StepPace:
    """How fast the engine has been.

    Optimistic on purpose: nobody is given up who could have made it.

    shortest_s: seconds that a step takes at least; 0 as long as there was none.
    last_decode_s: seconds of the last step in which nothing but decodes ran; 0 as long as there was none.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._num_full_tokens = max_num_batched_tokens // 2
        self._recent: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self._tokens_per_s = 0.0
        self.shortest_s = 0.0
        self.last_decode_s = 0.0

    def observe(self, step_s: float, num_tokens: int, num_sequences: int) -> None:
        """A step of `num_tokens` tokens of `num_sequences` sequences took `step_s` seconds."""
        if num_tokens == 0:
            return
        self._recent.append(step_s)
        self.shortest_s = min(self._recent)
        if num_tokens == num_sequences:
            self.last_decode_s = step_s
        # Short steps say nothing about the speed of long ones: weights are read once a step.
        if num_tokens >= self._num_full_tokens and num_tokens > num_sequences and step_s > 0:
            self._tokens_per_s = max(self._tokens_per_s, num_tokens / step_s)

    def least_s(self, num_tokens: int) -> float:
        """Seconds that computing so many tokens of one sequence takes at least."""
        computing_s = num_tokens / self._tokens_per_s if self._tokens_per_s else 0.0
        return max(self.shortest_s, computing_s)
