"""What one choice of a reply has said, and how much of that is written."""

from collections.abc import Sequence


class ChoiceBuffer:
    """Token ids and text of one choice: all of it, and what no event has carried yet."""

    def __init__(self, ids: Sequence[int] = (), text: str = "") -> None:
        self.ids = list(ids)
        self.num_sent_ids = len(self.ids)
        self._text = [text]
        self._unsent_text: list[str] = []

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._text)

    @property
    def unsent_text(self) -> str:
        """Text that no event has carried."""
        return "".join(self._unsent_text)

    @property
    def has_unsent_ids(self) -> bool:
        """Whether an event has still to carry ids."""
        return self.num_sent_ids < len(self.ids)

    @property
    def has_unsent_text(self) -> bool:
        """Whether an event has still to carry text."""
        return bool(self._unsent_text)

    def add(self, ids: Sequence[int], text: str) -> None:
        """Take in new tokens, and the text that may be shown since the last call."""
        self.ids += ids
        if text:
            self._text.append(text)
            self._unsent_text.append(text)

    def take_unsent(self) -> tuple[list[int], str]:
        """Ids and text for an event, which count as sent from now on."""
        ids, text = self.ids[self.num_sent_ids :], self.unsent_text
        self.num_sent_ids = len(self.ids)
        self._unsent_text = []
        return ids, text

    def owe_after(self, ids: Sequence[int], text: str) -> bool:
        """Only `ids` and `text` are written after all: what comes after them is owed again. False if they don't fit."""
        whole = self.text
        if self.ids[: len(ids)] != list(ids) or not whole.startswith(text):
            return False
        self.num_sent_ids = len(ids)
        rest = whole[len(text) :]
        self._unsent_text = [rest] if rest else []
        return True
