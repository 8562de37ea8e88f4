"""From token ids to the text of a reply: whole characters only, and never a part of a stop string."""

from collections.abc import Sequence
from dataclasses import dataclass

from model.decode_stream import decode_stream
from model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What some new ids add to a reply.

    num_tokens_kept: how many of the ids pushed belong to the reply: all, or those up to the one that completed a
    stop string.
    """

    text: str
    finished_by_stop: bool
    num_tokens_kept: int


class TextStream:
    """The text of one sequence, delta by delta.

    Deltas and the tail join to exactly what decoding all ids at once gives, cut at the first stop string that is
    complete (of two that end at the same character, the longer). Where it is cut doesn't depend on how the ids were
    grouped. A stop string is looked for in generated text alone, never in the prompt. What is kept back is exactly
    what may still become part of a stop string or of a character. The cost is linear in tokens and characters.

    prompt_tail: the last ids of the prompt, where the text is to go on from them: a character that the prompt began
    is then completed, and a first word keeps its leading space. Without it the text is that of the ids alone.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        prompt_tail: Sequence[int] = (),
    ) -> None:
        self._decoder = decode_stream(tokenizer, prompt_tail)
        self._stops = StopMatcher(stop, include_stop)

    @property
    def finished_by_stop(self) -> bool:
        """Whether a stop string has ended the text; only `finish` can find one later than its last token."""
        return self._stops.is_stopped

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Take new ids; after a stop string they add nothing."""
        texts: list[str] = []
        for count, token_id in enumerate(token_ids):
            if self._stops.is_stopped:
                return TextDelta("".join(texts), True, count)
            texts.append(self._stops.push(self._decoder.push(token_id)))
        return TextDelta("".join(texts), self._stops.is_stopped, len(token_ids))

    def finish(self) -> str:
        """What is still to be appended once no more ids come: incomplete bytes as U+FFFD, the start of a stop."""
        if self._stops.is_stopped:
            return ""
        return self._stops.push(self._decoder.finish()) + self._stops.finish()


class StopMatcher:
    """Passes text on up to the first stop string.

    Each stop string is followed by the automaton of Knuth, Morris and Pratt (SIAM J. Comput. 6, 1977): its state is
    the length of the longest prefix of the string that the text ends with, which is exactly what must be kept back.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool) -> None:
        self.is_stopped = False
        self._stops = [(stop, _failure_links(stop)) for stop in stops]
        self._states = [0] * len(stops)
        self._include_stop = include_stop
        self._kept = ""

    def push(self, text: str) -> str:
        """The text that no stop string can claim any more; up to the stop string if one is completed."""
        if not self._stops or self.is_stopped:
            return "" if self.is_stopped else text
        for index, char in enumerate(text):
            matched = self._advance(char)
            if matched:
                self.is_stopped = True
                end = len(self._kept) + index + 1
                known, self._kept = self._kept + text, ""
                return known[: end if self._include_stop else end - matched]
        known = self._kept + text
        num_settled = len(known) - max(self._states)
        self._kept = known[num_settled:]
        return known[:num_settled]

    def finish(self) -> str:
        """What was kept back for a stop string that never came."""
        kept, self._kept = self._kept, ""
        return kept

    def _advance(self, char: str) -> int:
        """Take one character; the length of the longest stop string that it completes, or 0."""
        longest = 0
        for index, (stop, links) in enumerate(self._stops):
            state = self._states[index]
            while state and stop[state] != char:
                state = links[state - 1]
            state += stop[state] == char
            self._states[index] = state
            if state == len(stop):
                longest = max(longest, state)
        return longest


def _failure_links(pattern: str) -> list[int]:
    """For each prefix of the pattern, the length of its longest proper prefix that is also its suffix."""
    links = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[length] != pattern[index]:
            length = links[length - 1]
        length += pattern[length] == pattern[index]
        links[index] = length
    return links
