"""What a reply stream holds already."""

import json
import re
from dataclasses import dataclass
from typing import Any

from worker.protocol_fields import MAX_INT, MAX_TOKEN_ID
from worker.streams.connection import Link
from worker.streams.errors import StreamsError

_PAGE = 500


# More choices than any job may have: an index beyond is not one that a worker writes.
_MAX_INDEX = 255


class UnreadableReplyError(StreamsError):
    """A reply holds an event that no worker writes."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What the events of one choice carry. Ids may run ahead of text."""

    ids: tuple[int, ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True)
class Recovered:
    """The tokens and the text that a reply's events carry, from the last `reset` on.

    `ids` and `text` are those of choice 0, `others` those of the next ones as far as there are any. `num_tokens`, of
    all together, is the last event's `n`. `seed` is what an earlier attempt drew, None where none was told.
    `num_attempts` counts the opens, the reader's own included; `last_attempt` is the latest of them, 0 without any.
    """

    ids: tuple[int, ...] = ()
    text: str = ""
    seed: int | None = None
    num_attempts: int = 1
    others: tuple[Stored, ...] = ()
    last_attempt: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens covered, all choices together."""
        return len(self.ids) + sum(len(other.ids) for other in self.others)

    def choice(self, index: int) -> Stored:
        """What is stored of a choice, perhaps nothing."""
        if index == 0:
            return Stored(self.ids, self.text)
        return self.others[index - 1] if index <= len(self.others) else Stored()


async def recover(link: Link, reply_key: str) -> Recovered:
    """Reads the stream once, in pages. Only final after this worker's own open succeeded, which fences all others.

    Raises StreamsError; UnreadableReplyError where an event is not one that a worker writes.
    """
    ids: dict[int, list[int]] = {}
    text: dict[int, list[str]] = {}
    seed: int | None = None
    num_attempts = last_attempt = 0
    start = "-"
    while True:
        page = await link.call("XRANGE", reply_key, start, "+", "COUNT", _PAGE)
        for entry_id, flat in page:
            event = dict(zip(flat[::2], flat[1::2], strict=False))
            if event.get(b"e") == b"open":
                num_attempts, last_attempt = num_attempts + 1, int(entry_id.partition(b"-")[0])
            elif event.get(b"e") == b"reset":
                ids.clear()
                text.clear()
            elif event.get(b"e") == b"token":
                index = _index_of(event, entry_id)
                ids.setdefault(index, []).extend(_ids_of(event, entry_id))
                text.setdefault(index, []).append(event.get(b"text", b"").decode("utf-8", "replace"))
                seed = _seed_of(event, entry_id) if b"seed" in event else seed
        if len(page) < _PAGE:
            first, *others = [
                Stored(tuple(ids.get(index, ())), "".join(text.get(index, ())))
                for index in range(max(ids, default=0) + 1)
            ]
            return Recovered(first.ids, first.text, seed, max(1, num_attempts), tuple(others), last_attempt)
        start = f"({page[-1][0].decode()}"


async def read_workers(link: Link, reply_key: str) -> list[str]:
    """Who opened the reply, one name for each attempt, in order. Raises StreamsError."""
    workers: list[str] = []
    start = "-"
    while True:
        page = await link.call("XRANGE", reply_key, start, "+", "COUNT", _PAGE)
        for _, flat in page:
            event = dict(zip(flat[::2], flat[1::2], strict=False))
            if event.get(b"e") == b"open":
                workers.append(event.get(b"worker", b"").decode("utf-8", "replace"))
        if len(page) < _PAGE:
            return workers
        start = f"({page[-1][0].decode()}"


def _index_of(event: dict[bytes, bytes], entry_id: bytes) -> int:
    index = event.get(b"index", b"0")
    if not (index.isdigit() and len(index) <= 3 and int(index) <= _MAX_INDEX):
        raise _unreadable(entry_id)
    return int(index)


def _unreadable(entry_id: bytes) -> UnreadableReplyError:
    return UnreadableReplyError(
        f"event {entry_id.decode()} of a reply can't be read: no worker of this version wrote it"
    )


def _seed_of(event: dict[bytes, bytes], entry_id: bytes) -> int:
    if not re.fullmatch(rb"[0-9]{1,19}", event[b"seed"]) or int(event[b"seed"]) > MAX_INT:
        raise _unreadable(entry_id)
    return int(event[b"seed"])


def _ids_of(event: dict[bytes, bytes], entry_id: bytes) -> list[int]:
    try:
        ids: Any = json.loads(event.get(b"ids", b"[]"))
    except (ValueError, RecursionError) as error:
        raise _unreadable(entry_id) from error
    if type(ids) is not list or not all(type(item) is int and 0 <= item <= MAX_TOKEN_ID for item in ids):
        raise _unreadable(entry_id)
    return ids
