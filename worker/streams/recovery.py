"""What a reply stream holds already."""

import json
from dataclasses import dataclass
from typing import Any

from worker.streams.connection import Link
from worker.streams.errors import StreamsError

_PAGE = 500


@dataclass(frozen=True, slots=True)
class Recovered:
    """The tokens and the text that a reply's events carry, from the last `reset` on.

    `num_tokens` is the last event's `n`; `ids` has as many. Ids may run ahead of text. `seed` is what an earlier
    attempt drew, None where none was told. `num_attempts` counts the opens, the reader's own included.
    """

    ids: tuple[int, ...] = ()
    text: str = ""
    seed: int | None = None
    num_attempts: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens covered."""
        return len(self.ids)


async def recover(link: Link, reply_key: str) -> Recovered:
    """Reads the stream once, in pages. Only final after this worker's own open succeeded, which fences all others.

    Raises StreamsError, also where an event is not one that a worker writes.
    """
    ids: list[int] = []
    text: list[str] = []
    seed: int | None = None
    num_attempts = 0
    start = "-"
    while True:
        page = await link.call("XRANGE", reply_key, start, "+", "COUNT", _PAGE)
        for entry_id, flat in page:
            event = dict(zip(flat[::2], flat[1::2], strict=False))
            if event.get(b"e") == b"open":
                num_attempts += 1
            elif event.get(b"e") == b"reset":
                ids.clear()
                text.clear()
            elif event.get(b"e") == b"token":
                ids += _ids_of(event, entry_id)
                text.append(event.get(b"text", b"").decode("utf-8", "replace"))
                seed = int(event[b"seed"]) if b"seed" in event else seed
        if len(page) < _PAGE:
            return Recovered(tuple(ids), "".join(text), seed, max(1, num_attempts))
        start = f"({page[-1][0].decode()}"


def _ids_of(event: dict[bytes, bytes], entry_id: bytes) -> list[int]:
    try:
        ids: Any = json.loads(event.get(b"ids", b"[]"))
    except ValueError as error:
        raise StreamsError(
            f"event {entry_id.decode()} of a reply can't be read: was it written by a worker?"
        ) from error
    return list(ids)
