"""What a client makes of a reply stream, without any I/O: the events, and the rules for reading them.

A reply may be continued by another worker, begun anew, or cut back by a failover. The cursor knows how many tokens it
holds, so it notices each of these and asks for the stream to be read again from its start.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from worker.client_errors import JobFailedError, ReplyBrokenError

START = "0-0"
TERMINAL = frozenset({"end", "error"})


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
        """A whole-number field, or None where it is missing. Raises ReplyBrokenError where it is something else."""
        value = self.data(name)
        if value is None:
            return None
        if type(value) is not int:
            raise _broken(self.id, name)
        return int(value)

    def data(self, name: str) -> Any:
        """A JSON field, or None where it is missing. Raises ReplyBrokenError where it is no JSON."""
        try:
            return json.loads(self.fields[name]) if name in self.fields else None
        except (ValueError, RecursionError):
            raise _broken(self.id, name) from None

    @property
    def covered(self) -> int | None:
        """Tokens that the reply holds once this event is in, all choices together; None where it doesn't say."""
        match self.kind:
            case "open":
                return self.number("from")
            case "reset":
                return 0
        return self.number("n")


def parse_event(event_id: bytes, flat: list[bytes]) -> ReplyEvent:
    """An entry of a reply stream, as RESP2 gives it: id and alternating names and values.

    Raises ReplyBrokenError where its ids are no list of numbers.
    """
    words = [word.decode("utf-8", "replace") for word in flat]
    event = ReplyEvent(event_id.decode(), "", fields=dict(zip(words[::2], words[1::2], strict=True)))
    ids = event.data("ids")
    if ids is not None and not (isinstance(ids, list) and all(type(each) is int for each in ids)):
        raise _broken(event.id, "ids")
    return ReplyEvent(event.id, event.fields.get("e", ""), event.fields.get("text", ""), tuple(ids or ()), event.fields)


def _broken(event_id: str, name: str) -> ReplyBrokenError:
    return ReplyBrokenError(f"{name} of event {event_id} can't be read: send the job again with another id")


class ReplyCursor:
    """How far a reply has been read. `last_id` is where to read on; it is START again after a restart."""

    def __init__(self, last_id: str = START, num_held: int | None = None) -> None:
        """Goes on where another reader stopped: after event `last_id`, with `num_held` tokens of all choices together.

        None is as many as that event says.
        """
        self.last_id = last_id
        self.is_done = False
        self._num_held = 0 if last_id == START else num_held
        self._misfit_id: str | None = None

    @property
    def has_begun(self) -> bool:
        """Whether any event has been read since the last start."""
        return self.last_id != START

    def stands_at(self, event: ReplyEvent) -> bool:
        """Whether what is held is what the reply holds up to `event`, the one that the server has at `last_id`.

        Where that is the terminal one, the cursor is done.
        """
        self.is_done = event.is_terminal
        if self._num_held is None:
            self._num_held = event.covered
        return event.is_terminal or (self._num_held is not None and event.covered in (None, self._num_held))

    def accept(self, event: ReplyEvent) -> ReplyEvent:
        """The event to hand on: `event`, or a `reset` where it doesn't follow from what is held.

        After such a `reset` the rest of what was read is void, and reading begins again at `last_id`.
        Raises ReplyBrokenError if the same event is a misfit twice.
        """
        held = self._num_held or 0
        if not self._fits(event, held):
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
            self._num_held = self._covered(event, held)
        return event

    def restart(self) -> ReplyEvent:
        """Forget everything and read again from the start; answers the `reset` that says so to the reader."""
        self.last_id = START
        self._num_held = 0
        return ReplyEvent(START, "reset", fields={"e": "reset", "why": "reread", "n": "0"})

    def _fits(self, event: ReplyEvent, held: int) -> bool:
        if event.kind == "open":
            return event.covered is None or event.covered >= held
        if event.kind == "token":
            return self._covered(event, held) - len(event.ids) == held
        return True

    def _covered(self, event: ReplyEvent, held: int) -> int:
        return held + len(event.ids) if event.covered is None else event.covered


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

    @property
    def last_id(self) -> str:
        """Id of the last event: where to read on."""
        return START if self.last is None else self.last.id

    @property
    def num_tokens(self) -> int:
        """Tokens held, all choices together."""
        return sum(len(choice.ids) for choice in self.choices)

    def add(self, event: ReplyEvent) -> None:
        """Take over the next event of the stream."""
        if event.kind == "reset":
            self.choices = [ReplyChoice()]
        self._add(event.number("index") or 0, event.text, event.fields.get("finish"))
        if event.is_terminal:
            self._end(0, event.data("ids"))
        else:
            self.choices[event.number("index") or 0].ids += event.ids
        for told in event.data("choices") or ():
            self._add(told["index"], told.get("text", ""), told["finish"])
            self._end(told["index"], told.get("ids"))
        self.last = event

    def _add(self, index: int, text: str, finish: str | None) -> None:
        self.choices += [ReplyChoice() for _ in range(index + 1 - len(self.choices))]
        choice = self.choices[index]
        choice.text += text
        choice.finish = finish

    def _end(self, index: int, ids: Sequence[int] | None) -> None:
        """What was not streamed has all its ids in the terminal event, those of its checkpoints too."""
        if ids is not None:
            self.choices[index].ids = list(ids)

    @property
    def is_over(self) -> bool:
        """Whether nothing comes any more."""
        return self.last is not None and self.last.is_terminal

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
        failure = self.failure
        return None if failure is None else (failure.code, failure.message)

    @property
    def failure(self) -> JobFailedError | None:
        """The error event as an exception, where the job failed."""
        if self.last is None or self.last.kind != "error":
            return None
        fields, details = self.last.fields, self.last.data("details")
        return JobFailedError(
            fields.get("message", ""),
            code=fields.get("code", "internal"),
            is_retryable=fields.get("retryable") == "1",
            details=details if isinstance(details, dict) else {},
        )

    def raise_for_error(self) -> Self:
        """The reply itself. Raises JobFailedError where the job failed; what had come by then stays in the reply."""
        if (failure := self.failure) is not None:
            raise failure
        return self

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens that the job took, by kind."""
        usage = self.last.data("usage") if self.last else None
        return dict(usage or {})

    def to_json(self) -> str:
        """All of it, for another process that reads on."""
        last = None if self.last is None else asdict(self.last)
        return json.dumps({"choices": [asdict(choice) for choice in self.choices], "last": last}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` wrote."""
        held = json.loads(text)
        last = held["last"] and ReplyEvent(**(held["last"] | {"ids": tuple(held["last"]["ids"])}))
        return cls([ReplyChoice(**choice) for choice in held["choices"]], last)
