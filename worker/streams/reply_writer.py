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

    `on_change` is called when there is something to write, `on_closed` once when the status leaves LIVE.
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
        self._on_change = on_change
        self._on_closed = on_closed
        self._is_streaming = True
        self._chunk_ms = 0
        self._seed: int | None = None
        self._is_seed_told = False
        self._seq = 0
        self._ids: list[int] = []
        self._num_sent_ids = 0
        self._text: list[str] = []
        self._unsent_text: list[str] = []
        self._reset_why: str | None = None
        self._had_reset = False
        self._terminal: tuple[str, Mapping[str, str]] | None = None
        self._last_event_ms = 0
        self._is_hurried = False

    # What the service says.

    def configure(self, *, is_streaming: bool = True, chunk_ms: int = 0, seed: int | None = None) -> None:
        """How to write: without streaming, token events are checkpoints of ids, about one a second, and the terminal
        event has the whole text. `seed` is told in this attempt's first token event (the worker drew it)."""
        self._is_streaming = is_streaming
        self._chunk_ms = chunk_ms if is_streaming else max(chunk_ms, CHECKPOINT_MS)
        self._seed = seed

    def resume(self, recovered: Recovered) -> None:
        """Goes on after what earlier attempts stored. Call before the first token."""
        self._ids = list(recovered.ids)
        self._num_sent_ids = len(self._ids)
        self._text = [recovered.text]
        self._unsent_text = []

    def token(self, ids: Sequence[int], text: str) -> None:
        """New tokens and the text that may be shown since the last call; either may be empty."""
        if self.status is not ReplyStatus.LIVE:
            return
        self._ids += ids
        if text:
            self._text.append(text)
            self._unsent_text.append(text)
        self._on_change(self)

    def reset(self, why: str) -> None:
        """All tokens so far are void: an exact continuation is impossible."""
        if self.status is not ReplyStatus.LIVE:
            return
        self._ids.clear()
        self._text.clear()
        self._unsent_text.clear()
        self._num_sent_ids = 0
        self._reset_why = why
        self._had_reset = True
        self._on_change(self)

    def end(
        self, finish: str, *, usage: Mapping[str, Any], receipt: Mapping[str, Any], meta: str | None = None
    ) -> None:
        """The terminal event `end`, after all tokens given so far. Text that has no ids with it goes into the event."""
        fields = {"finish": finish, "usage": compact(usage), "receipt": compact(receipt)}
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
        return len(self._ids)

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
        if self.in_flight is not None or self._terminal or self._reset_why is not None or self._is_hurried:
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
        text = "".join(self._text)
        is_prefix = tuple(self._ids[: len(stored.ids)]) == stored.ids and text.startswith(stored.text)
        if self._had_reset or not is_prefix:
            self._reset_why = self._reset_why or "the server lost events"
            self._had_reset = True
            stored = Recovered()
        self._num_sent_ids = len(stored.ids)
        self._unsent_text = [text[len(stored.text) :]] if self._is_streaming else []
        self._on_change(self)

    # How events are made.

    def _finish(self, kind: str, fields: Mapping[str, str]) -> None:
        if self._terminal is None and self.status is ReplyStatus.LIVE:
            self._terminal = (kind, fields)
            self._on_change(self)

    def _owes(self) -> bool:
        return bool(
            self._terminal
            or self._reset_why is not None
            or self._num_sent_ids < len(self._ids)
            or (self._is_streaming and self._unsent_text)
        )

    def _build(self, now_ms: int) -> Event | None:
        if self._reset_why is not None:
            why, self._reset_why = self._reset_why, None
            return self._event(now_ms, "reset", {"why": why, "n": "0"})
        if self._owes_token_event():
            return self._token_event(now_ms)
        if self._terminal is not None:
            return self._terminal_event(now_ms, *self._terminal)
        return None

    def _owes_token_event(self) -> bool:
        has_ids = self._num_sent_ids < len(self._ids)
        if self._terminal is None:
            return has_ids or bool(self._is_streaming and self._unsent_text)
        if not self._is_streaming:
            return False  # the terminal event has it all
        return has_ids or bool(self._unsent_text and self._terminal[0] == "error")

    def _token_event(self, now_ms: int) -> Event:
        fields: dict[str, str] = {}
        if self._is_streaming:
            fields["text"] = "".join(self._unsent_text)
        fields["ids"] = compact(self._ids[self._num_sent_ids :])
        fields["n"] = str(len(self._ids))
        if self._seed is not None and not self._is_seed_told:
            fields["seed"] = str(self._seed)
            self._is_seed_told = True
        self._num_sent_ids = len(self._ids)
        self._unsent_text = []
        self._is_hurried = False
        return self._event(now_ms, "token", fields)

    def _terminal_event(self, now_ms: int, kind: str, fields: Mapping[str, str]) -> Event:
        body = dict(fields)
        if kind == "end":
            body = {"finish": body.pop("finish"), "text": "".join(self._unsent_text)} | body
            if not self._is_streaming:
                body |= {"text": "".join(self._text), "ids": compact(self._ids)}
        return self._event(now_ms, kind, body, is_terminal=True)

    def _event(self, now_ms: int, kind: str, fields: Mapping[str, str], *, is_terminal: bool = False) -> Event:
        seq = TERMINAL_SEQ if is_terminal else self._seq + 1
        flat = [part for pair in fields.items() for part in pair]
        self._last_event_ms = now_ms
        return Event(f"{self.attempt}-{seq}", ("e", kind, "t", str(now_ms), *flat), is_terminal)


def compact(value: Any) -> str:
    """JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
