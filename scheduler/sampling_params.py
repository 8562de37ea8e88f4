"""How one request wants its tokens chosen and where it wants them to end."""

import math
from dataclasses import dataclass
from typing import Literal

from scheduler.errors import InvalidSamplingParamsError

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_SEED = 2**63 - 1
MAX_CHOICES = 16
MAX_BEAM_WIDTH = 16
MAX_LENGTH_PENALTY = 10.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
MAX_ADDED_PENALTY = 2.0

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and ending of one request.

    temperature: 0 is greedy (argmax of the raw logits, the first index wins a tie).
    top_k: keep the k likeliest tokens; 0 keeps all. top_p: keep the smallest set of likeliest tokens whose
        probabilities reach p; 1 keeps all. min_p: keep the tokens at least so many times as probable as the likeliest;
        0 keeps all. min_p is applied first, then top_k, then top_p.
    repetition_penalty: the logit of each token of the prompt or the output is divided by it where it is positive, and
        multiplied where not; 1 is neutral. frequency_penalty, presence_penalty: the logit of a token that is n times in
        the output falls by n times the one, and by the other if n > 0; 0 is neutral. Before everything else, greedy or
        not. They follow from the tokens alone, so a preemption or a restart changes nothing.
    seed: the noise of a draw is a pure function of (seed, position), so from the same logits one seed gives one text,
        alone or in any batch. Logits are the same to the bit with the compiled kernels (float32 on the CPU); elsewhere
        they round by batch size, so a near tie may fall otherwise. None: the engine draws a seed.
    max_tokens: tokens to generate; None means what is left of the context.
    stop: generation ends where one of these strings appears in the generated text. The text up to it is
        kept, with it if `include_stop`.
    stop_token_ids: generation ends at one of these tokens; its id is reported, its text is not part of the reply
        (unless `include_stop`).
    ignore_eos: the checkpoint's end-of-sequence tokens don't end generation.
    n: choices of one prompt, each a sequence of its own whose seed follows from `seed` and its index; choice 0 is what
        n = 1 gives. The prompt is computed once.
    best_of: where it is above n, so many are generated, and the n of the largest sum of log probabilities (of the
        model's raw logits) are the answer, the best first.
    beam_width: above 1, beam search with so many beams (transformers' `num_beams`), and the `n` best of what it finds
        are the answer, the best first. Nothing is drawn: temperature, min_p, top_k, top_p and seed have no part in it,
        and penalties are refused.
    length_penalty, early_stopping: how its hypotheses are scored, and when there are enough of them (`BeamSearch`).

    Raises InvalidSamplingParamsError, which names the field and what is accepted.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    n: int = 1
    best_of: int = 1
    beam_width: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0 <= self.temperature <= 100):
            raise InvalidSamplingParamsError(f"temperature is {self.temperature}: use a number from 0 (greedy) to 100")
        if self.top_k < 0:
            raise InvalidSamplingParamsError(f"top_k is {self.top_k}: use a whole number from 1, or 0 for no limit")
        if not (math.isfinite(self.top_p) and 0 < self.top_p <= 1):
            raise InvalidSamplingParamsError(f"top_p is {self.top_p}: use a number above 0 and up to 1")
        if self.seed is not None and not -MAX_SEED - 1 <= self.seed <= MAX_SEED:
            raise InvalidSamplingParamsError(f"seed is {self.seed}: use a whole number of 64 bits, signed")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidSamplingParamsError(
                f"max_tokens is {self.max_tokens}: use a whole number from 1, or leave it out for all that is left"
            )
        if not 1 <= self.n <= MAX_CHOICES:
            raise InvalidSamplingParamsError(f"n is {self.n}: use a whole number from 1 to {MAX_CHOICES}")
        if not 1 <= self.best_of <= MAX_CHOICES or 1 < self.best_of < self.n:
            raise InvalidSamplingParamsError(
                f"best_of is {self.best_of}: use a whole number from n, which is {self.n}, to {MAX_CHOICES}"
            )
        self._check_penalties()
        self._check_stops()
        self._check_beams()

    def _check_penalties(self) -> None:
        if not (math.isfinite(self.min_p) and 0 <= self.min_p <= 1):
            raise InvalidSamplingParamsError(f"min_p is {self.min_p}: use a number from 0 (keeps all) to 1")
        if not MIN_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY:
            raise InvalidSamplingParamsError(
                f"repetition_penalty is {self.repetition_penalty}: use a number from {MIN_REPETITION_PENALTY:g} to "
                f"{MAX_REPETITION_PENALTY:g}, 1 for none"
            )
        for name in ("frequency_penalty", "presence_penalty"):
            value: float = getattr(self, name)
            if not abs(value) <= MAX_ADDED_PENALTY:
                raise InvalidSamplingParamsError(
                    f"{name} is {value}: use a number from -{MAX_ADDED_PENALTY:g} to {MAX_ADDED_PENALTY:g}, 0 for none"
                )

    def _check_beams(self) -> None:
        if not 1 <= self.beam_width <= MAX_BEAM_WIDTH:
            raise InvalidSamplingParamsError(
                f"beam_width is {self.beam_width}: use a whole number from 1 (no beam search) to {MAX_BEAM_WIDTH}"
            )
        if not (math.isfinite(self.length_penalty) and abs(self.length_penalty) <= MAX_LENGTH_PENALTY):
            raise InvalidSamplingParamsError(
                f"length_penalty is {self.length_penalty}: use a number from -{MAX_LENGTH_PENALTY:g} to "
                f"{MAX_LENGTH_PENALTY:g}"
            )
        if self.early_stopping not in (True, False, "never"):
            raise InvalidSamplingParamsError(f"early_stopping is {self.early_stopping!r}: use true, false or never")
        if not self.is_beam_search:
            return
        if self.n > self.beam_width:
            raise InvalidSamplingParamsError(
                f"n is {self.n} and beam_width {self.beam_width}: use an n up to beam_width, or more beams"
            )
        if self.best_of > 1:
            raise InvalidSamplingParamsError(
                f"best_of is {self.best_of} and beam_width {self.beam_width}: best_of chooses among draws, beam_width "
                "among beams: leave one of them out"
            )
        if self.has_penalties:
            raise InvalidSamplingParamsError(
                f"beam_width is {self.beam_width}: beams are compared by the model's own probabilities, so leave out "
                "repetition_penalty, frequency_penalty and presence_penalty"
            )
        if self.stop:
            raise InvalidSamplingParamsError(
                "stop can't end a beam, since it is looked for in text, and beams are tokens that may still be "
                "rewritten: use stop_token_ids with beam_width"
            )

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidSamplingParamsError(f"stop has {len(self.stop)} strings: use at most {MAX_STOP_STRINGS}")
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_CHARS:
                raise InvalidSamplingParamsError(f"a stop string has {len(text)} characters: use 1 to {MAX_STOP_CHARS}")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidSamplingParamsError(
                f"stop_token_ids has {len(self.stop_token_ids)} ids: use at most {MAX_STOP_TOKEN_IDS}"
            )
        for token_id in self.stop_token_ids:
            if token_id < 0:
                raise InvalidSamplingParamsError(f"stop_token_ids holds {token_id}: token ids start at 0")

    @property
    def has_penalties(self) -> bool:
        """Whether what was said so far changes what is said next, beside the model itself."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)

    @property
    def num_sequences(self) -> int:
        """How many sequences are generated for it. (The beams of a search are the scheduler's own.)"""
        return max(self.n, self.best_of)

    @property
    def is_choosing(self) -> bool:
        """Whether more are generated than returned, so that the best are known only when all have ended."""
        return self.best_of > self.n

    @property
    def is_beam_search(self) -> bool:
        """Whether it is searched for the likeliest replies, which are known only at the end."""
        return self.beam_width > 1

    @property
    def is_told_at_the_end(self) -> bool:
        """Whether no token is certain to be in the reply before all are."""
        return self.is_choosing or self.is_beam_search
