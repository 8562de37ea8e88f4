"""One reader's view of one reply, put together from its events alone and strict about each of them."""

import json
from collections.abc import Iterable

from tests.faults.history import Event


class ReplyView:
    """Takes events in order. `problems` tells what is wrong with their order and their counts.

    It shares nothing with the client that ships with Pagemill, so that the same mistake is not made twice.
    """

    def __init__(self) -> None:
        self.ids: dict[int, list[int]] = {}
        self.text: dict[int, str] = {}
        self.finishes: dict[int, str] = {}
        self.terminal: Event | None = None
        self.problems: list[str] = []

    @classmethod
    def of(cls, events: Iterable[Event]) -> "ReplyView":
        """The view after all of `events`."""
        view = cls()
        for event in events:
            view.add(event)
        return view

    @property
    def num_tokens(self) -> int:
        """Tokens held, all choices together."""
        return sum(len(ids) for ids in self.ids.values())

    def add(self, event: Event) -> None:
        """Take the next event."""
        if self.terminal is not None:
            what = "second terminal event" if event.is_terminal else "event after the terminal one"
            self.problems.append(f"{what}: {event.event_id}")
            return
        match event.fields.get("e"):
            case "open":
                self._open(event)
            case "token":
                self._token(event)
            case "reset":
                self.ids, self.text = {}, {}
            case "end":
                self._end(event)
            case "error":
                self.terminal = event
            case other:
                self.problems.append(f"unknown event {other!r}: {event.event_id}")

    def _open(self, event: Event) -> None:
        covered = int(event.fields["from"])
        if covered != self.num_tokens:
            self.problems.append(f"open {event.event_id} goes on from {covered}, {self.num_tokens} tokens are there")

    def _token(self, event: Event) -> None:
        ids = json.loads(event.fields["ids"])
        first = int(event.fields["n"]) - len(ids)
        if first > self.num_tokens:
            self.problems.append(f"gap: tokens {self.num_tokens + 1} to {first} are missing at {event.event_id}")
        elif first < self.num_tokens:
            self.problems.append(f"repeat: tokens {first + 1} to {self.num_tokens} come again at {event.event_id}")
        index = int(event.fields.get("index", "0"))
        self.ids.setdefault(index, []).extend(ids)
        self.text[index] = self.text.get(index, "") + event.fields.get("text", "")

    def _end(self, event: Event) -> None:
        self.terminal = event
        fields = event.fields
        self.finishes[0] = fields["finish"]
        for choice in json.loads(fields.get("choices", "[]")):
            self.finishes[choice["index"]] = choice["finish"]
            self._whole(choice["index"], choice.get("ids"), choice.get("text", ""), event)
        whole = json.loads(fields["ids"]) if "ids" in fields else None
        self._whole(0, whole, fields.get("text", ""), event)

    def _whole(self, index: int, ids: list[int] | None, text: str, event: Event) -> None:
        """The terminal event has a tail of the text, or, of what was not streamed, all of it again."""
        self.text[index] = self.text.get(index, "") + text
        if ids is None:
            return
        held = self.ids.get(index, [])
        if ids[: len(held)] != held:
            self.problems.append(f"the checkpoints before {event.event_id} are no beginning of its ids")
        self.ids[index] = ids
