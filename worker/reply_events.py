"""What a client makes of a reply stream, without any I/O: the events, and the rules for reading them.

A reply may be continued by another worker, begun anew, or cut back by a failover. The cursor knows how many tokens it
holds, so it notices each of these and asks for the stream to be read again from its start.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from worker.errors import PagemillError

START = "0-0"
TERMINAL = frozenset({"end", "error"})


class ReplyBrokenError(PagemillError):
    """The reply doesn't fit together even when it is read from its start: a worker broke the protocol."""


@dataclass(frozen=True, slots=True)
class ReplyEvent:
    """One event of a reply.

    kind: `open`, `token`, `reset`, `end` or `error`. On `reset` discard all text so far; `why` is `reread` where the
    client itself begins again, and what was discarded comes once more.
    text: what is to be appended, the terminal event's too. ids: the token ids that it covers.
    fields: everything that the event carries, as text.
    """

    id: str
    kind: str
    text: str = ""
    ids: tuple[int, ...] = ()
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_terminal(self) -> bool:
        """Whether this is the last event."""
        return self.kind in TERMINAL

    def number(self, name: str) -> int | None:
        """A whole-number field, or None where it is missing."""
        return int(self.fields[name]) if name in self.fields else None

    def data(self, name: str) -> Any:
        """A JSON field, or None where it is missing."""
        return json.loads(self.fields[name]) if name in self.fields else None


def parse_event(event_id: bytes, flat: list[bytes]) -> ReplyEvent:
    """An entry of a reply stream, as RESP2 gives it: id and alternating names and values."""
    words = [word.decode("utf-8", "replace") for word in flat]
    fields = dict(zip(words[::2], words[1::2], strict=True))
    ids = tuple(json.loads(fields["ids"])) if "ids" in fields else ()
    return ReplyEvent(event_id.decode(), fields.get("e", ""), fields.get("text", ""), ids, fields)


class ReplyCursor:
    """How far a reply has been read. `last_id` is where to read on; it is START again after a restart."""

    def __init__(self) -> None:
        self.last_id = START
        self.is_done = False
        self._num_held = 0
        self._misfit_id: str | None = None

    @property
    def has_begun(self) -> bool:
        """Whether any event has been read since the last start."""
        return self.last_id != START

    def accept(self, event: ReplyEvent) -> ReplyEvent:
        """The event to hand on: `event`, or a `reset` where it doesn't follow from what is held.

        After such a `reset` the rest of what was read is void, and reading begins again at `last_id`.
        Raises ReplyBrokenError if the same event is a misfit twice.
        """
        if not self._fits(event):
            if event.id == self._misfit_id:
                raise ReplyBrokenError(
                    f"the reply doesn't fit together at event {event.id}: send the job again with another id"
                )
            self._misfit_id = event.id
            return self.restart()
        self.last_id = event.id
        self.is_done = event.is_terminal
        if event.kind == "reset":
            self._num_held = 0
        elif event.kind == "token":
            self._num_held = self._covered(event)
        return event

    def restart(self) -> ReplyEvent:
        """Forget everything and read again from the start; answers the `reset` that says so to the reader."""
        self.last_id = START
        self._num_held = 0
        return ReplyEvent(START, "reset", fields={"e": "reset", "why": "reread", "n": "0"})

    def _fits(self, event: ReplyEvent) -> bool:
        if event.kind == "open":
            covered = event.number("from")
            return covered is None or covered >= self._num_held
        if event.kind == "token":
            return self._covered(event) - len(event.ids) == self._num_held
        return True

    def _covered(self, event: ReplyEvent) -> int:
        covered = event.number("n")
        return self._num_held + len(event.ids) if covered is None else covered


@dataclass(slots=True)
class ReplyChoice:
    """One choice of a reply as far as it has come; `finish` comes with the end."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish: str | None = None


@dataclass(slots=True)
class Reply:
    """A reply as far as it has come; complete once `last` is a terminal event.

    `text` and `ids` are those of the first of its `choices`, of which there are as many as have said anything.
    """

    choices: list[ReplyChoice] = field(default_factory=lambda: [ReplyChoice()])
    last: ReplyEvent | None = None

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def ids(self) -> list[int]:
        """Token ids of the first choice."""
        return self.choices[0].ids

    def add(self, event: ReplyEvent) -> None:
        """Take over the next event of the stream."""
        if event.kind == "reset":
            self.choices = [ReplyChoice()]
        self._add(event.number("index") or 0, event.text, event.ids, event.fields.get("finish"))
        for told in event.data("choices") or ():
            self._add(told["index"], told.get("text", ""), told.get("ids", ()), told["finish"])
        self.last = event

    def _add(self, index: int, text: str, ids: Sequence[int], finish: str | None) -> None:
        self.choices += [ReplyChoice() for _ in range(index + 1 - len(self.choices))]
        choice = self.choices[index]
        choice.text += text
        choice.ids += ids
        choice.finish = finish

    @property
    def is_ok(self) -> bool:
        """Whether the job ended as it should."""
        return self.last is not None and self.last.kind == "end"

    @property
    def finish(self) -> str | None:
        """Why it ended: `stop`, `eos`, `length`, …; None where it failed or goes on."""
        return None if self.last is None else self.last.fields.get("finish")

    @property
    def error(self) -> tuple[str, str] | None:
        """Code and message where the job failed."""
        if self.last is None or self.last.kind != "error":
            return None
        return self.last.fields.get("code", "internal"), self.last.fields.get("message", "")

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens that the job took, by kind."""
        usage = self.last.data("usage") if self.last else None
        return dict(usage or {})
