"""Beam search as arithmetic: which continuations of which beams go on, which are finished, and when it is enough.

The semantics are those of transformers' `generate(num_beams=...)`, which its users compare with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nlargest
from math import isfinite

from scheduler.output import Candidate, FinishReason, Hypothesis
from scheduler.sampling_params import EarlyStopping


@dataclass(frozen=True, slots=True)
class Survivor:
    """A beam of the next step: beam `parent` of this one, and `token_id` behind it; `logprob` is that of all of it."""

    parent: int
    token_id: int
    logprob: float


class BeamSearch:
    """Scores of one request's beams, and the hypotheses that have ended.

        beams, at most `width`          candidates of each            sorted by the sum of log probabilities
          0  logprob ──────────────►  (token, logprob) …  ─┐      ┌─ among the first `width`, an end: a hypothesis
          1  logprob ──────────────►  (token, logprob) …  ─┼────► │  an end behind them: dropped
          …                                                ─┘      └─ the first `width` that are no end: the next beams

    A hypothesis scores the sum of its tokens' log probabilities, the last one's included, divided by its length to
    the power `length_penalty`: above 0 favours long ones. The best `width` are kept.

    It is done when `max_tokens` are reached, or when there are `width` hypotheses and, by `early_stopping`:

    True     that is enough
    False    no beam, scored at its present length, beats the worst of them
    "never"  no beam can ever beat the worst of them, if it loses nothing more up to the length that scores best

    A beam needs no more candidates than `num_candidates`, its likeliest: of the first `width` of all beams together
    no more can be its own, and among so many at least `width` are no end.
    """

    __slots__ = ("early_stopping", "hypotheses", "is_done", "length_penalty", "logprobs", "max_tokens", "num_tokens",
                 "width")  # fmt: skip

    def __init__(
        self, width: int, max_tokens: int, length_penalty: float = 1.0, early_stopping: EarlyStopping = False
    ) -> None:
        self.width = width
        self.max_tokens = max_tokens
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        self.num_tokens = 0
        # Of each live beam. It begins with one, of no token.
        self.logprobs = [0.0]
        # The best first.
        self.hypotheses: list[Hypothesis] = []
        self.is_done = False

    def advance(
        self,
        candidates: Sequence[Sequence[Candidate]],
        token_ids: Sequence[Sequence[int]],
        end_of: Callable[[int], FinishReason | None],
    ) -> list[Survivor]:
        """Take a step: the beams of the next one, the likeliest first; none once it is done.

        `candidates` of each beam, with the log probability of the token alone, `token_ids` that each beam has generated
        so far; `end_of` tells whether a token ends a reply. Of equals the earlier beam's, then the earlier candidate.
        """
        assert not self.is_done, f"a search that is done after {self.num_tokens} tokens takes another step"
        assert len(candidates) == len(token_ids) == len(self.logprobs), f"{len(candidates)} of {len(self.logprobs)}"
        self.num_tokens += 1
        is_last = self.num_tokens >= self.max_tokens
        survivors: list[Survivor] = []
        for rank, survivor in enumerate(self._ordered(candidates)):
            reason = end_of(survivor.token_id) or (FinishReason.LENGTH if is_last else None)
            if reason is None:
                if len(survivors) < self.width:
                    survivors.append(survivor)
            elif rank < self.width:
                self._finish((*token_ids[survivor.parent], survivor.token_id), survivor.logprob, reason)
            if rank >= self.width - 1 and len(survivors) == self.width:
                break
        self.is_done = not survivors or self._is_enough(max(survivor.logprob for survivor in survivors))
        if self.is_done:
            survivors.clear()
        self.logprobs = [survivor.logprob for survivor in survivors]
        return survivors

    def _ordered(self, candidates: Sequence[Sequence[Candidate]]) -> list[Survivor]:
        every = [
            Survivor(parent, each.token_id, before + each.logprob)
            for parent, (before, own) in enumerate(zip(self.logprobs, candidates, strict=True))
            for each in own
            if isfinite(each.logprob)
        ]
        return sorted(every, key=lambda survivor: -survivor.logprob)

    def _finish(self, token_ids: tuple[int, ...], logprob: float, reason: FinishReason) -> None:
        score = logprob / self.num_tokens**self.length_penalty
        made = [*self.hypotheses, Hypothesis(token_ids, logprob, score, reason)]
        self.hypotheses = nlargest(self.width, made, key=lambda hypothesis: hypothesis.score)

    def _is_enough(self, best_logprob: float) -> bool:
        if len(self.hypotheses) < self.width:
            return False
        if self.early_stopping is True:
            return True
        may_grow = self.early_stopping == "never" and self.length_penalty > 0
        length = self.max_tokens if may_grow else self.num_tokens
        best_score: float = best_logprob / length**self.length_penalty
        return best_score <= self.hypotheses[-1].score


def num_candidates(width: int, num_ends: int) -> int:
    """Candidates of each beam that a search of `width` needs, where `num_ends` tokens end a reply."""
    return width + num_ends


def num_blocks_at_most(num_prompt_tokens: int, num_tokens: int, width: int, block_size: int) -> int:
    """Blocks that beams whose KV is of `num_tokens` tokens, prompt included, hold at the most.

    Each has its own of all but the full blocks of the prompt.
    """
    num_shared = num_prompt_tokens // block_size
    return num_shared + width * (-(-max(num_tokens, num_prompt_tokens) // block_size) - num_shared)
