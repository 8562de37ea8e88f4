"""Keeps the time between two tokens of a sequence to a target, by what it lets into a step."""

from math import inf

from scheduler.errors import InvalidConfigError

# Aim so much below the target: steps of the same size differ.
AIM = 0.9
FIRST_NUM_SEQS = 4
FIRST_NUM_TOKENS = 64
# A prompt goes on with at least so many tokens a step, whatever the target.
LEAST_NUM_TOKENS = 16
# So many slow steps in a row are the rule and no exception.
NUM_SLOW = 2
# After so many good steps with as many sequences as may run, one more is tried.
NUM_GOOD = 8


class LatencyGuard:
    """How many sequences may run, and how many tokens of prompts a step may compute beside decodes.

    A step takes a fixed time and some for each of its n sequences. So with n · aim / step of them it takes no longer
    than what is aimed at: this is the way up, at most doubled; one more is tried from time to time, which finds what
    the fixed part hides. Where steps are too long it is the way down. (Adding one at a time alone
    would take hundreds of steps to find room for hundreds; halving would give up half of the room for a little.) The
    tokens of prompts are reckoned alike, from what a step takes beyond a decode step.

    Nobody who runs is thrown out: where there are too many, no more are let in until some have ended.

    num_seqs: that may run. num_prompt_tokens: of prompts, in a step with decodes. Without a target (None) both are at
    their limits for ever.

    Raises InvalidConfigError for a target that isn't above 0.
    """

    def __init__(self, target_ms: float | None, max_num_seqs: int, max_num_tokens: int) -> None:
        if target_ms is not None and target_ms <= 0:
            raise InvalidConfigError(f"target_itl_ms is {target_ms}: use a number above 0, or None for no target")
        self._aim_s = inf if target_ms is None else AIM * target_ms / 1000
        self._max_num_seqs = max_num_seqs
        self._max_num_tokens = max_num_tokens
        self._num_good = 0
        self._num_slow = 0
        # The last step in which nothing but decodes ran, and what a token of a prompt took in the last one with both.
        self._decode_s = 0.0
        self._num_decodes = 1
        self._prompt_token_s = 0.0
        self._is_decoding = False
        is_off = target_ms is None
        self.num_seqs = max_num_seqs if is_off else min(FIRST_NUM_SEQS, max_num_seqs)
        self.num_prompt_tokens = max_num_tokens if is_off else min(FIRST_NUM_TOKENS, max_num_tokens)

    def num_step_tokens(self, num_running: int) -> int:
        """The token budget of the next step, if `num_running` sequences run. All of it where none of them decodes."""
        if not self._is_decoding or num_running == 0:
            return self._max_num_tokens
        num_prompt_tokens = self.num_prompt_tokens
        if self._prompt_token_s > 0:
            # More decodes than there were take no more than their share of what those took.
            decode_s = self._decode_s * max(1.0, num_running / self._num_decodes)
            num_prompt_tokens = min(num_prompt_tokens, int((self._aim_s - decode_s) / self._prompt_token_s))
        return min(self._max_num_tokens, num_running + max(LEAST_NUM_TOKENS, num_prompt_tokens))

    def observe(self, step_s: float, num_tokens: int, num_sequences: int, num_decoding: int) -> None:
        """A step of `num_tokens` tokens of `num_sequences` sequences took `step_s` seconds.

        `num_decoding` of them brought a token and go on.
        """
        if self._aim_s == inf:
            return
        self._is_decoding = num_decoding > 0
        if num_tokens == num_sequences:
            self._decode_s, self._num_decodes = step_s, max(1, num_sequences)
        if num_decoding == 0 or step_s <= 0:
            return
        if num_tokens == num_sequences:
            self._judge_size(step_s, num_sequences)
        else:
            self._judge_prompts(step_s, num_tokens - num_sequences)
            if step_s > self._aim_s and self.num_prompt_tokens == LEAST_NUM_TOKENS:
                self._judge_size(step_s, num_sequences)

    def _judge_size(self, step_s: float, num_sequences: int) -> None:
        wanted = int(num_sequences * min(2.0, self._aim_s / step_s))
        if step_s > self._aim_s:
            self._num_good = 0
            self._num_slow += 1
            if self._num_slow >= NUM_SLOW:
                self.num_seqs = max(1, min(self.num_seqs, wanted))
            return
        self._num_slow = 0
        self._num_good += num_sequences >= self.num_seqs
        if self._num_good >= NUM_GOOD:
            self._num_good = 0
            wanted = max(wanted, num_sequences + 1)
        self.num_seqs = min(self._max_num_seqs, max(self.num_seqs, wanted))

    def _judge_prompts(self, step_s: float, num_tokens: int) -> None:
        decode_s = min(self._decode_s, step_s)
        room_s, taken_s = self._aim_s - decode_s, step_s - decode_s
        factor = max(0.0, min(2.0, room_s / taken_s)) if taken_s > 0 else 2.0
        wanted = int(num_tokens * factor)
        self._prompt_token_s = taken_s / num_tokens
        if step_s > self._aim_s:
            self.num_prompt_tokens = max(LEAST_NUM_TOKENS, min(self.num_prompt_tokens, wanted))
        else:
            self.num_prompt_tokens = min(self._max_num_tokens, max(self.num_prompt_tokens, wanted))
