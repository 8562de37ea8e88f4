"""The rules of the wire, taken out one at a time, to see that the checker of interleavings notices."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from worker.streams import scripts
from worker.streams.errors import ServerError
from worker.streams.replies import Replies
from worker.streams.reply_writer import Event, ReplyWriter

Patch = Callable[[pytest.MonkeyPatch], None]

NEXT_ATTEMPT = "math.max(now, last_attempt + 1, state_attempt + 1, own_attempt + 1)"
CLOCK = "local now = time[1] * 1000 + math.floor(time[2] / 1000)"


def lua(name: str, *edits: tuple[str, str]) -> Patch:
    """The script with pieces of it replaced, each of which it has exactly once."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        before = scripts.source_of

        def source_of(asked: str) -> str:
            text = before(asked)
            for old, new in edits if asked == name else ():
                assert text.count(old) == 1, f"{name}.lua has not once: {old}"
                text = text.replace(old, new)
            return text

        monkeypatch.setattr(scripts, "source_of", source_of)

    return patch


coarse_clock = lua("open", (CLOCK, "local now = time[1] * 1000"))
"""Attempts of one second begin with the same number. No rule is broken by it."""


def compare_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a lost connection writing goes on as if nothing had happened."""

    async def compare(self: Replies, writers: Sequence[ReplyWriter], generation: int) -> None:
        for writer in writers:
            self._live[writer].generation = generation

    monkeypatch.setattr(Replies, "_compare", compare)


def merge_unanswered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an event carried whose answer was lost goes into the next one, with newer tokens."""
    next_event = ReplyWriter.next_event

    def merged(self: ReplyWriter, now_ms: int) -> Event | None:
        event = self.in_flight
        if event is not None and not event.is_terminal:
            fields = dict(zip(event.fields[::2], event.fields[1::2], strict=True))
            choice = self._choices[0]
            choice.num_sent_ids -= len(json.loads(fields["ids"]))
            choice._unsent_text.insert(0, fields["text"])
            self._seq, self.in_flight = self._seq + 1, None
        return next_event(self, now_ms)

    compare_nothing(monkeypatch)
    monkeypatch.setattr(ReplyWriter, "next_event", merged)


def two_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event of two tokens is written as two events in one pipeline."""
    take_answers = Replies._take_answers

    async def flush(self: Replies) -> bool:
        generation = await self._link.connect()
        now_ms = self._clock.now_ms()
        await self._compare([each for each in self._dirty if self._live[each].generation != generation], generation)
        for writer in list(self._dirty):
            event = writer.next_event(now_ms)
            if event is None:
                continue
            events = halves(event)
            answers: list[Any] = await self._link.batch(
                [each.command(self._keys.reply(writer.job_id)) for each in events], generation=generation
            )
            if not isinstance(answers[-1], ServerError):
                writer.in_flight = events[-1]
            await take_answers(self, [writer], answers[-1:], generation)
            if writer.is_drained:
                self._dirty.pop(writer, None)
        return True

    monkeypatch.setattr(Replies, "flush", flush)


def halves(event: Event) -> list[Event]:
    """The event as two, if it has two tokens."""
    fields = dict(zip(event.fields[::2], event.fields[1::2], strict=True))
    ids = json.loads(fields.get("ids", "[]"))
    if len(ids) < 2 or event.is_terminal:
        return [event]
    attempt, _, seq = event.entry_id.partition("-")
    made = []
    for number, token in enumerate(ids):
        num_later = len(ids) - 1 - number
        changed = fields | {"ids": f"[{token}]", "text": f"{token} ", "n": str(int(fields["n"]) - num_later)}
        flat = tuple(part for pair in changed.items() for part in pair)
        made.append(replace(event, entry_id=f"{attempt}-{int(seq) + number}", fields=flat))
    return made


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """A rule, what takes it out, and the deeds that show it."""

    rule: str
    patches: tuple[Patch, ...]
    deeds: tuple[str, ...]


BROKEN_RULES = [
    BrokenRule(
        "ATTEMPT is a time, not a count from 1",
        (lua("open", (NEXT_ATTEMPT, "math.max(1, last_attempt + 1)")),),
        ("claim", "expire"),
    ),
    BrokenRule(
        "ATTEMPT is above the record's",
        (coarse_clock, lua("open", (NEXT_ATTEMPT, "math.max(now, last_attempt + 1, own_attempt + 1)"))),
        ("claim", "expire"),
    ),
    BrokenRule(
        "only the owner opens",
        (lua("open", ("if #pending > 0 and pending[1][2] ~= consumer then return {'lost'} end", "")),),
        ("claim",),
    ),
    BrokenRule(
        "only the owner settles",
        (lua("settle", ("if #pending > 0 and pending[1][2] ~= consumer then return 'other' end", "")),),
        ("claim", "expire"),
    ),
    BrokenRule(
        "only the owner renews",
        (lua("renew", ("if is_mine[id] then", "if true then")),),
        ("claim",),
    ),
    BrokenRule("after a lost connection the last id is compared", (compare_nothing,), ("claim", "fail_over")),
    BrokenRule("an event is sent again as it was", (merge_unanswered,), ("claim", "lose")),
    BrokenRule("one event of a reply is in flight", (two_in_flight,), ("claim", "refuse")),
]
