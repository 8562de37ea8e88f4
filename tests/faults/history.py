"""The record that a run is judged by: what was sent and acknowledged, and every event that any client saw."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

Fields = Mapping[str, str]


class What(StrEnum):
    """Kinds of records.

    ACKED: an XADD was answered. SAW: a client read an event. REREAD: a client discarded what it held and began again at
    the reply's start. BROKEN: a client found that the reply doesn't fit together. CANCELLED: a client asked for an end.
    CRASHED: the server was killed. VANISHED: afterwards it knew nothing of an acknowledged job.
    """

    ACKED = "acked"
    SAW = "saw"
    REREAD = "reread"
    BROKEN = "broken"
    CANCELLED = "cancelled"
    CRASHED = "crashed"
    VANISHED = "vanished"


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a reply, as it stands in the stream."""

    event_id: str
    fields: Fields

    @property
    def is_terminal(self) -> bool:
        """Whether a reply may have nothing after it."""
        return self.fields.get("e") in ("end", "error")


@dataclass(frozen=True, slots=True)
class Record:
    """Something that happened `at` seconds of the monotonic clock."""

    at: float
    what: What
    job_id: str = ""
    client: str = ""
    event: Event | None = None


@dataclass(frozen=True, slots=True)
class Expected:
    """What a job must answer: the greedy text of each choice, its ids, and why it ends.

    `error` is the code that it must end with instead, after a part of that; "" for none.
    """

    ids: tuple[int, ...]
    text: str
    finish: str = "length"
    num_choices: int = 1
    error: str = ""


@dataclass(frozen=True, slots=True)
class Aftermath:
    """What the server holds once the run is over.

    replies: all events of each reply. queued, pending: entries of all lanes that are still there. lasting: keys of
    single jobs that never expire.
    """

    replies: Mapping[str, Sequence[Event]]
    queued: Sequence[str] = ()
    pending: Sequence[str] = ()
    lasting: Sequence[str] = ()


@dataclass(slots=True)
class History:
    """Grows while a run goes on. `expected` holds every job that was sent or is going to be."""

    expected: dict[str, Expected] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)

    def add(self, what: What, job_id: str = "", client: str = "", event: Event | None = None) -> None:
        """Record what happens now."""
        self.records.append(Record(time.monotonic(), what, job_id, client, event))

    def known(self) -> set[str]:
        """Ids of jobs that were acknowledged and, so far as anybody has looked, not forgotten since."""
        known: set[str] = set()
        for record in self.records:
            if record.what is What.ACKED:
                known.add(record.job_id)
            elif record.what is What.VANISHED:
                known.discard(record.job_id)
        return known

    def jobs(self, what: What) -> set[str]:
        """Ids of all jobs that have such a record."""
        return {record.job_id for record in self.records if record.what is what}

    def times(self, what: What) -> list[float]:
        """When such records were made."""
        return [record.at for record in self.records if record.what is what]

    def views(self) -> dict[tuple[str, str], list[Event | None]]:
        """What each client saw of each job, in order; None stands where it began again."""
        views: dict[tuple[str, str], list[Event | None]] = {}
        for record in self.records:
            if record.what in (What.SAW, What.REREAD):
                views.setdefault((record.client, record.job_id), []).append(record.event)
        return views

    def write(self, path: Path) -> None:
        """One JSON line a record, for whoever looks for the cause."""
        with path.open("w") as file:
            for record in self.records:
                file.write(json.dumps(asdict(record)) + "\n")
