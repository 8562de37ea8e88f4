"""Waits a moment for more prompts, so that a step that computes them is fuller."""

from scheduler.errors import InvalidConfigError
from scheduler.step_pace import StepPace
from scheduler.waiting_queue import WaitingQueue


class AdmissionDelay:
    """Holds admission back for at most `factor` times a decode step, counted from the oldest arrival; 0: never.

    Each step with a prompt in it delays those that decode; two prompts in one step delay them once. Nothing is held
    back where the prompts that wait fill the step already, or where nothing runs.

    Raises InvalidConfigError for a negative factor.
    """

    def __init__(self, factor: float, pace: StepPace) -> None:
        if not factor >= 0:
            raise InvalidConfigError(f"scheduler_delay_factor is {factor}: use 0 or more")
        self._factor = factor
        self._pace = pace

    def is_due(self, waiting: WaitingQueue, num_tokens_left: int, now: float) -> bool:
        """Whether those that wait, of whom there is one at least, are to be admitted in a step that begins now."""
        if self._factor == 0 or now - waiting.oldest.arrival_s >= self._factor * self._pace.last_decode_s:
            return True
        num_tokens = 0
        for seq in waiting:
            num_tokens += seq.num_tokens - seq.num_swapped_tokens
            if num_tokens >= num_tokens_left:
                return True
        return False
