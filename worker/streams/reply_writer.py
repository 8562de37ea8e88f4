"""One attempt at one reply: what is written, what is in flight, what is still owed. No input or output of its own.

token(), reset(), end(), error()                   next_event()              acknowledge()
─────────────────────────────► gathers in memory ───────────────► in flight ────────────────► written
                                                    one at a time     │ answer lost: the same bytes again
                                                                      ▼ refused or nil: close()
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from worker.errors import JobError
from worker.streams.choice_buffer import ChoiceBuffer
from worker.streams.keys import TERMINAL_SEQ
from worker.streams.recovery import Recovered

CHECKPOINT_MS = 1000


class ReplyStatus(StrEnum):
    """LIVE until the terminal event is written (ENDED), a later attempt took over (FENCED) or the reply was deleted
    (ABANDONED)."""

    LIVE = "live"
    ENDED = "ended"
    FENCED = "fenced"
    ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True)
class Event:
    """An event as it is sent, and sent again: `fields` are its names and values in order."""

    entry_id: str
    fields: tuple[str, ...]
    is_terminal: bool

    def command(self, reply_key: str) -> tuple[str, ...]:
        """The XADD that writes it, if the reply still exists."""
        return ("XADD", reply_key, "NOMKSTREAM", self.entry_id, *self.fields)


class ReplyWriter:
    """Gathers one job's tokens and ends into events with ids ATTEMPT-SEQ, at most one of them in flight.

    A job may have several choices: each token event is of one of them and names it by `index`, and they take turns.
    Their ends, and unstreamed all that they have said, are in the terminal event's `choices`.

    `on_change` is called when there is something to write, `on_closed` when the status leaves LIVE, and once more at
    the end of a job that went on after its reply was deleted.
    """

    def __init__(
        self,
        job_id: str,
        attempt: int,
        on_change: Callable[["ReplyWriter"], None],
        on_closed: Callable[["ReplyWriter"], None],
    ) -> None:
        self.job_id = job_id
        self.attempt = attempt
        self.status = ReplyStatus.LIVE
        self.in_flight: Event | None = None
        self.num_token_events = 0  # that are known to be written
        self._on_change = on_change
        self._on_closed = on_closed
        self._is_streaming = True
        self._chunk_ms = 0
        self._seed: int | None = None
        self._is_seed_told = False
        self._seq = 0
        self._choices = [ChoiceBuffer()]
        self._next_index = 0
        self._is_mid_round = False
        self._reset_why: str | None = None
        self._had_reset = False
        self._finishes: list[str] = []
        self._terminal: tuple[str, Mapping[str, str]] | None = None
        self._last_event_ms = 0
        self._is_hurried = False

    # What the service says.

    def configure(
        self, *, is_streaming: bool = True, chunk_ms: int = 0, seed: int | None = None, num_choices: int = 1
    ) -> None:
        """How to write: without streaming, token events are checkpoints of ids, about one a second, and the terminal
        event has the whole text. `seed` is told in this attempt's first token event (the worker drew it)."""
        self._is_streaming = is_streaming
        self._chunk_ms = chunk_ms if is_streaming else max(chunk_ms, CHECKPOINT_MS)
        self._seed = seed
        self._choices += [ChoiceBuffer() for _ in range(num_choices - len(self._choices))]

    def resume(self, recovered: Recovered) -> None:
        """Goes on after what earlier attempts stored. Call before the first token."""
        stored = [recovered.choice(index) for index in range(1 + len(recovered.others))]
        self._choices = [ChoiceBuffer(each.ids, each.text) for each in stored]

    def token(self, ids: Sequence[int], text: str, index: int = 0) -> None:
        """New tokens and the text that may be shown since the last call, of one choice; either may be empty."""
        if self.status is not ReplyStatus.LIVE:
            return
        self._choices[index].add(ids, text)
        self._on_change(self)

    def reset(self, why: str) -> None:
        """All tokens so far are void: an exact continuation is impossible."""
        if self.status is not ReplyStatus.LIVE:
            return
        self._choices = [ChoiceBuffer() for _ in self._choices]
        self._reset_why = why
        self._had_reset = True
        self._on_change(self)

    def end(
        self,
        finish: str | Sequence[str],
        *,
        usage: Mapping[str, Any],
        receipt: Mapping[str, Any],
        beams: Sequence[Mapping[str, float]] = (),
        meta: str | None = None,
    ) -> None:
        """The terminal event `end`, after all tokens given so far. Text that has no ids with it goes into the event.

        `finish` of several choices has one for each, and so has `beams`, how a beam search scores them.
        """
        self._finishes = [finish] if isinstance(finish, str) else list(finish)
        # A beam search may find fewer than were asked for.
        self._choices = self._choices[: max(1, len(self._finishes))]
        fields = {"finish": self._finishes[0], "usage": compact(usage), "receipt": compact(receipt)}
        if beams:
            fields["beams"] = compact(beams)
        self._finish("end", fields | ({} if meta is None else {"meta": meta}))

    def error(self, error: JobError, *, meta: str | None = None) -> None:
        """The terminal event `error`, after all tokens given so far."""
        fields = {
            "code": error.code.value,
            "message": error.message,
            "retryable": "1" if error.is_retryable else "0",
            "details": compact(error.details),
        }
        self._finish("error", fields | ({} if meta is None else {"meta": meta}))

    def hurry(self) -> None:
        """Writes what is gathered without waiting for `chunk_ms`."""
        self._is_hurried = True
        self._on_change(self)

    @property
    def num_tokens(self) -> int:
        """Tokens given so far, earlier attempts' included."""
        return sum(len(choice.ids) for choice in self._choices)

    @property
    def is_drained(self) -> bool:
        """Nothing is in flight and nothing is owed."""
        return self.status is not ReplyStatus.LIVE or (self.in_flight is None and not self._owes())

    @property
    def last_id(self) -> str:
        """Id of the last event that is known to be written."""
        return f"{self.attempt}-{self._seq}"

    # What the batcher asks and tells.

    def due_ms(self) -> int:
        """When the next event may be written, by the server's clock; 0 is at once."""
        if self.in_flight is not None or self._terminal or self._reset_why is not None:
            return 0
        if self._is_hurried or self._is_mid_round:
            return 0
        return self._last_event_ms + self._chunk_ms if self._chunk_ms else 0

    def next_event(self, now_ms: int) -> Event | None:
        """The event to send now: the one in flight again, or a new one, or None if nothing is owed."""
        if self.status is not ReplyStatus.LIVE:
            return None
        if self.in_flight is None:
            self.in_flight = self._build(now_ms)
        return self.in_flight

    def acknowledge(self) -> None:
        """The event in flight is written."""
        event = self.in_flight
        assert event is not None, f"{self.job_id}: nothing is in flight"
        self.in_flight = None
        if event.is_terminal:
            self.close(ReplyStatus.ENDED)
        else:
            self._seq = int(event.entry_id.partition("-")[2])
            self.num_token_events += event.fields[1] == "token"

    def close(self, status: ReplyStatus) -> None:
        """Nothing more can be written."""
        if self.status is ReplyStatus.LIVE:
            self.status = status
            self._on_closed(self)

    def reopen(self, attempt: int, stored: Recovered) -> None:
        """The server lost writes and the reply was opened anew: what `stored` lacks is owed again, from memory."""
        self.attempt = attempt
        self._seq = 0
        self._is_seed_told = False
        self.in_flight = None
        has_more = len(stored.others) >= len(self._choices)
        if self._had_reset or has_more or not all(self._owe_after(stored, at) for at in range(len(self._choices))):
            self._reset_why = self._reset_why or "the server lost events"
            self._had_reset = True
            for index in range(len(self._choices)):
                self._owe_after(Recovered(), index)
        self._on_change(self)

    def _owe_after(self, stored: Recovered, index: int) -> bool:
        return self._choices[index].owe_after(stored.choice(index).ids, stored.choice(index).text)

    # How events are made.

    def _finish(self, kind: str, fields: Mapping[str, str]) -> None:
        if self.status is ReplyStatus.ABANDONED:  # the job went on without a reply, and has to be settled now
            self._on_closed(self)
        if self._terminal is None and self.status is ReplyStatus.LIVE:
            self._terminal = (kind, fields)
            self._on_change(self)

    def _owes(self) -> bool:
        return bool(
            self._terminal or self._reset_why is not None or any(self._has_unsent(choice) for choice in self._choices)
        )

    def _has_unsent(self, choice: ChoiceBuffer) -> bool:
        return choice.has_unsent_ids or (self._is_streaming and choice.has_unsent_text)

    def _build(self, now_ms: int) -> Event | None:
        if self._reset_why is not None:
            why, self._reset_why = self._reset_why, None
            return self._event(now_ms, "reset", {"why": why, "n": "0"})
        index = self._choice_to_tell()
        if index is not None:
            return self._token_event(now_ms, index)
        if self._terminal is not None:
            return self._terminal_event(now_ms, *self._terminal)
        return None

    def _choice_to_tell(self) -> int | None:
        """Whose token event comes next: choices take turns."""
        if self._terminal is not None and not self._is_streaming:
            return None  # the terminal event has it all
        num = len(self._choices)
        for index in [(self._next_index + offset) % num for offset in range(num)]:
            choice = self._choices[index]
            # The last text of a single choice goes into the terminal event, which has a place for it.
            is_for_end = num == 1 and self._terminal is not None and self._terminal[0] == "end"
            if choice.has_unsent_ids or (self._has_unsent(choice) and not is_for_end):
                return index
        return None

    def _token_event(self, now_ms: int, index: int) -> Event:
        ids, text = self._choices[index].take_unsent()
        fields: dict[str, str] = {}
        if self._is_streaming:
            fields["text"] = text
        fields["ids"] = compact(ids)
        # The events of other choices that are not written yet don't count.
        fields["n"] = str(sum(choice.num_sent_ids for choice in self._choices))
        if len(self._choices) > 1:
            fields["index"] = str(index)
        if self._seed is not None and not self._is_seed_told:
            fields["seed"] = str(self._seed)
            self._is_seed_told = True
        self._next_index = (index + 1) % len(self._choices)
        # What is gathered of the others goes out with it, or each would wait for its turn as many times as there are.
        self._is_mid_round = any(self._has_unsent(choice) for choice in self._choices[index + 1 :])
        self._is_hurried = self._is_hurried and self._choice_to_tell() is not None
        return self._event(now_ms, "token", fields)

    def _terminal_event(self, now_ms: int, kind: str, fields: Mapping[str, str]) -> Event:
        body = dict(fields)
        if kind == "end" and len(self._choices) > 1:
            body = {"finish": body.pop("finish"), "text": "", "choices": compact(self._told_choices())} | body
        elif kind == "end":
            (choice,) = self._choices
            body = {"finish": body.pop("finish"), "text": choice.unsent_text} | body
            if not self._is_streaming:
                body |= {"text": choice.text, "ids": compact(choice.ids)}
        return self._event(now_ms, kind, body, is_terminal=True)

    def _told_choices(self) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []
        for index, (choice, finish) in enumerate(zip(self._choices, self._finishes, strict=True)):
            said = {} if self._is_streaming else {"text": choice.text, "ids": choice.ids}
            told.append({"index": index, "finish": finish} | said)
        return told

    def _event(self, now_ms: int, kind: str, fields: Mapping[str, str], *, is_terminal: bool = False) -> Event:
        seq = TERMINAL_SEQ if is_terminal else self._seq + 1
        flat = [part for pair in fields.items() for part in pair]
        self._last_event_ms = now_ms
        return Event(f"{self.attempt}-{seq}", ("e", kind, "t", str(now_ms), *flat), is_terminal)


def compact(value: Any) -> str:
    """JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
