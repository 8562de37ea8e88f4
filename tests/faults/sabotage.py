"""Broken workers, to see that the checker notices: each sabotage replaces one step of the real one in this process."""

import itertools
from collections.abc import Callable, Mapping

from worker.protocol import JobEnvelope
from worker.streams.choice_buffer import ChoiceBuffer
from worker.streams.keys import TERMINAL_SEQ
from worker.streams.outcomes import Outcomes
from worker.streams.scripts import SettleStatus

settle = Outcomes.settle
take_unsent = ChoiceBuffer.take_unsent


def skip_settle() -> None:
    """A reply ends, and its entry stays on the queue."""

    async def skip(self: Outcomes, envelope: JobEnvelope, _outcome: str, **_options: object) -> SettleStatus:
        self._leases.release((envelope.lane, envelope.entry_id))
        return SettleStatus.DONE

    Outcomes.settle = skip  # type: ignore[method-assign,assignment]


def write_late() -> None:
    """Something is written after the terminal event, by whoever opened the reply once more."""

    async def write_and_settle(
        self: Outcomes,
        envelope: JobEnvelope,
        outcome: str,
        *,
        record: Mapping[str, str] | None = None,
        keep_prompt: bool = False,
    ) -> SettleStatus:
        link, key = self._scripts._link, self._scripts._keys.reply(envelope.id)
        (last,) = await link.call("XREVRANGE", key, "+", "-", "COUNT", 1)
        attempt, _, seq = last[0].decode().partition("-")
        if int(seq) == TERMINAL_SEQ:
            late = ("e", "token", "t", "0", "text", "!", "ids", "[0]", "n", "1")
            await link.call("XADD", key, f"{int(attempt) + 1}-1", *late)
        return await settle(self, envelope, outcome, record=record, keep_prompt=keep_prompt)

    Outcomes.settle = write_and_settle  # type: ignore[method-assign]


def repeat_tokens() -> None:
    """Now and then an event carries the token before it once more, as one that is merged with an unanswered one."""
    turns = itertools.count()

    def take(self: ChoiceBuffer) -> tuple[list[int], str]:
        before = self.ids[: self.num_sent_ids]
        ids, text = take_unsent(self)
        return ([*before[-1:], *ids], text) if next(turns) % 5 == 4 else (ids, text)

    ChoiceBuffer.take_unsent = take  # type: ignore[method-assign]


def drop_tokens() -> None:
    """Now and then an event is written without its first token."""
    turns = itertools.count()

    def take(self: ChoiceBuffer) -> tuple[list[int], str]:
        ids, text = take_unsent(self)
        return (list(ids[1:]), text) if next(turns) % 5 == 4 else (list(ids), text)

    ChoiceBuffer.take_unsent = take  # type: ignore[method-assign]


SABOTAGES: dict[str, Callable[[], None]] = {
    each.__name__: each for each in (skip_settle, write_late, repeat_tokens, drop_tokens)
}
