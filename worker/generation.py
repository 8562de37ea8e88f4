"""What one sequence has brought so far: token ids, the text that may be shown, and why it ended."""

from collections.abc import Sequence

from model.tokenizer import Tokenizer
from scheduler.output import FinishReason, SequenceOutput, SequenceStats
from scheduler.sampling_params import SamplingParams
from worker.text import TextStream

# Last tokens of a prompt that the text goes on from: more than a character can have bytes.
PROMPT_TAIL = 6


class Generation:
    """Turns the engine's token ids into text and ends it at a stop string. Owned by one job or one offline prompt.

    The engine knows ends that are tokens (end of sequence, stop token, length); those that are text are found here,
    a step or more after the token was drawn: what the engine drew beyond is cut off.
    """

    def __init__(self, sampling: SamplingParams, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self.sampling = sampling
        self.ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stats: SequenceStats | None = None
        self.error: str | None = None
        # Sum over the tokens that count; stays 0 unless the request chooses by it.
        self.logprob = 0.0
        self._stream = TextStream(
            tokenizer, sampling.stop, include_stop=sampling.include_stop, prompt_tail=prompt_ids[-PROMPT_TAIL:]
        )
        self._ready: list[str] = []
        self._tail = ""

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    def absorb(self, output: SequenceOutput) -> bool:
        """Take in what a step brought. True if a stop string has ended it, so that the engine must be told."""
        if self.is_finished:
            return False
        self.stats = output.stats
        self.error = output.error
        num_before = len(self.ids)
        is_stopped_by_text = self._extend(output.new_token_ids, output.finish_reason)
        if output.logprob is not None and len(self.ids) > num_before:
            self.logprob += output.logprob
        return is_stopped_by_text and output.finish_reason is None

    def replay(self, ids: Sequence[int], eos_token_ids: frozenset[int], max_tokens: int) -> None:
        """Take in the ids that an earlier attempt stored, judging anew whether they already end the reply.

        The attempt may have ended between its last token and its terminal event, so every end is looked for: length,
        end of sequence, stop token, stop string.
        """
        for count, token_id in enumerate(ids, start=1):
            self._extend((token_id,), self._end_at(token_id, count, eos_token_ids, max_tokens))
            if self.is_finished:
                return

    def _end_at(self, token_id: int, count: int, eos_token_ids: frozenset[int], max_tokens: int) -> FinishReason | None:
        # The order in which the scheduler asks, so that a reply ends alike whoever finds its end.
        if token_id in eos_token_ids and not self.sampling.ignore_eos:
            return FinishReason.EOS
        if token_id in self.sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if count >= max_tokens else None

    def _extend(self, ids: Sequence[int], reason: FinishReason | None) -> bool:
        """Take in ids, the last of which ends the sequence if there is a reason. True if a stop string ended it."""
        shown = ids
        if reason is FinishReason.STOP and not self.sampling.include_stop:
            shown = ids[:-1]  # a stop token is reported by its id, and is no part of the text
        delta = self._stream.push(shown)
        self._ready.append(delta.text)
        if delta.finished_by_stop:
            self.ids.extend(shown[: delta.num_tokens_kept])
            self.finish_reason = FinishReason.STOP
            return True
        self.ids.extend(ids)
        self.finish_reason = reason
        if reason is not None:
            self._tail = self._stream.finish()
            if self._stream.finished_by_stop:  # one that only the last, held-back characters completed
                self.finish_reason = FinishReason.STOP
        return False

    def take_text(self) -> str:
        """The text that became ready since the last call; it never ends inside a character or a stop string."""
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def take_tail(self) -> str:
        """After the end: what was held back for a stop string or half a character and is still to be appended."""
        tail, self._tail = self._tail, ""
        return tail

    def skip_text(self, num_chars: int) -> None:
        """Drop the first characters of the text and then of the tail: an earlier attempt has already sent them.

        The tail may have gone out with the last ids, in an event that outlived the terminal one.
        """
        text = self.take_text()
        self._ready.append(text[num_chars:])
        self._tail = self._tail[max(0, num_chars - len(text)) :]
