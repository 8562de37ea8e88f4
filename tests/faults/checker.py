"""Judges a run by its history: did every client get exactly the reply that it was promised?"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tests.faults.history import Aftermath, Event, Expected, History, What
from tests.faults.reply_view import ReplyView

# A server with `appendfsync everysec` forgets at most this much of what it acknowledged: the second between two
# fsyncs, and the two seconds for which it puts off a write while an fsync is under way.
MAX_FORGOTTEN_S = 3.0


class Promise(StrEnum):
    """What the server's disk keeps, and so what can be promised.

    DURABLE (`appendfsync always`): nothing that was acknowledged is ever lost or written anew. BOUNDED (`everysec`):
    a crash may take back what was acknowledged less than MAX_FORGOTTEN_S before; clients send such jobs again, and
    read such replies again.
    """

    DURABLE = "always"
    BOUNDED = "everysec"


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise. `kind` is one of the words of `check`; `detail` says what was seen."""

    kind: str
    job_id: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.job_id or 'the queue'}: {self.detail}"


def check(history: History, aftermath: Aftermath, promise: Promise) -> list[Violation]:
    """All violations of a run.

    unanswered  an acknowledged job has no terminal event     order    gap, repeat, or anything after the terminal one
    unread      a client never saw the end                    reply    ids, text or end are not what they must be
    lost        the server forgot a job that it may not       rewritten  an event that was seen is gone, or is another
    reread      a client had to begin again                   broken   a client gave up on a reply
    left        an entry, or a key that never expires, is still there
    """
    return [
        *_replies(history, aftermath),
        *_clients(history),
        *_lost(history, promise),
        *(_kept(history, aftermath) if promise is Promise.DURABLE else ()),
        *_left(aftermath),
    ]


def _replies(history: History, aftermath: Aftermath) -> Iterator[Violation]:
    """The reply of each job that the server has to know, as a client reads it that comes after everything."""
    cancelled = history.jobs(What.CANCELLED)
    for job_id in sorted(history.known()):
        view = ReplyView.of(aftermath.replies.get(job_id, ()))
        if view.terminal is None:
            yield Violation("unanswered", job_id, f"{view.num_tokens} tokens and no terminal event")
        yield from _judge(job_id, "a late reader", view, history.expected[job_id], job_id in cancelled)


def _clients(history: History) -> Iterator[Violation]:
    """What each client held at its end, and what it complained of."""
    cancelled = history.jobs(What.CANCELLED)
    for (client, job_id), seen in history.views().items():
        view = ReplyView.of(_since_last_start(seen))
        if view.terminal is None:
            yield Violation("unread", job_id, f"{client} saw {view.num_tokens} tokens and no terminal event")
        yield from _judge(job_id, client, view, history.expected[job_id], job_id in cancelled)
    for record in history.records:
        if record.what is What.BROKEN:
            yield Violation("broken", record.job_id, f"{record.client} could make nothing of it")


def _since_last_start(seen: Sequence[Event | None]) -> list[Event]:
    starts = [index for index, event in enumerate(seen) if event is None]
    return [event for event in seen[starts[-1] + 1 if starts else 0 :] if event is not None]


def _judge(job_id: str, who: str, view: ReplyView, expected: Expected, is_cancelled: bool) -> Iterator[Violation]:
    """The order of a reply's events, and whether it says what it must."""
    for problem in view.problems:
        yield Violation("order", job_id, f"{who}: {problem}")
    if view.terminal is None:
        return
    code = view.terminal.fields["code"] if view.terminal.fields.get("e") == "error" else ""
    is_cut = (code == "cancelled" and is_cancelled) or (code != "" and code == expected.error)
    if code != expected.error and not is_cut:
        yield Violation("reply", job_id, f"{who}: {json.dumps(dict(view.terminal.fields))}")
        return
    for index in range(expected.num_choices):
        ids, text = tuple(view.ids.get(index, ())), view.text.get(index, "")
        if is_cut:
            ids_wanted, text_wanted = expected.ids[: len(ids)], expected.text[: len(text)]
        else:
            ids_wanted, text_wanted = expected.ids, expected.text
            if view.finishes.get(index) != expected.finish:
                yield Violation("reply", job_id, f"{who}: choice {index} ends by {view.finishes.get(index)}")
        if ids != ids_wanted:
            yield Violation("reply", job_id, f"{who}: choice {index} has ids {ids}, not {ids_wanted}")
        if text != text_wanted:
            yield Violation("reply", job_id, f"{who}: choice {index} says {text!r}, not {text_wanted!r}")


def _lost(history: History, promise: Promise) -> Iterator[Violation]:
    """Jobs that the server had forgotten when it came back."""
    acked: dict[str, float] = {}
    crash_at = 0.0
    for record in history.records:
        match record.what:
            case What.ACKED:
                acked[record.job_id] = record.at
            case What.CRASHED:
                crash_at = record.at
            case What.VANISHED:
                age_s = crash_at - acked[record.job_id]
                if promise is Promise.DURABLE or age_s > MAX_FORGOTTEN_S:
                    yield Violation("lost", record.job_id, f"acknowledged {age_s:.1f} s before the crash")
            case _:
                pass


def _kept(history: History, aftermath: Aftermath) -> Iterator[Violation]:
    """Where nothing is forgotten, what anybody saw stands there to the end, and nobody has to begin again."""
    for record in history.records:
        if record.what is What.REREAD:
            yield Violation("reread", record.job_id, f"{record.client} had to read the reply again")
    stored = {job_id: {event.event_id: event for event in events} for job_id, events in aftermath.replies.items()}
    for (client, job_id), seen in history.views().items():
        for event in seen:
            if event is not None and stored.get(job_id, {}).get(event.event_id) != event:
                found = stored.get(job_id, {}).get(event.event_id)
                yield Violation("rewritten", job_id, f"{client} saw {event}, now it is {found}")


def _left(aftermath: Aftermath) -> Iterator[Violation]:
    for where, names in (("queued", aftermath.queued), ("pending", aftermath.pending), ("lasting", aftermath.lasting)):
        for name in names:
            yield Violation("left", "", f"{where}: {name}")
