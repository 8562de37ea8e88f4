"""The checker finds what is planted: one fault at a time in a history that is right without it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.faults.checker import MAX_FORGOTTEN_S, Promise, check
from tests.faults.history import Aftermath, Event, Expected, History, Record, What
from worker.streams.keys import TERMINAL_SEQ

OPEN = Event("100-0", {"e": "open", "from": "0"})
FIRST = Event("100-1", {"e": "token", "ids": "[7,8]", "n": "2", "text": "ab"})
RESUMED = Event("200-0", {"e": "open", "from": "2"})
SECOND = Event("200-1", {"e": "token", "ids": "[9]", "n": "3", "text": "c"})
END = Event(f"200-{TERMINAL_SEQ}", {"e": "end", "finish": "length", "text": "d"})
CANCELLED = Event(f"200-{TERMINAL_SEQ}", {"e": "error", "code": "cancelled"})
WHOLE = (OPEN, FIRST, RESUMED, SECOND, END)


class Run:
    """A history of one job `a`, and what is left. It was acknowledged at 10 s."""

    def __init__(self, stored: tuple[Event, ...] = WHOLE, seen: tuple[Event | None, ...] | None = None) -> None:
        self.history = History({"a": Expected((7, 8, 9), "abcd")})
        self.aftermath = Aftermath({"a": list(stored)})
        self.tell(What.ACKED, at=10.0)
        for event in stored if seen is None else seen:
            self.tell(What.REREAD if event is None else What.SAW, client="one", event=event)

    def tell(self, what: What, *, at: float = 11.0, client: str = "", event: Event | None = None) -> "Run":
        """Add a record."""
        job_id = "" if what is What.CRASHED else "a"
        self.history.records.append(Record(at, what, job_id, client, event))
        return self

    def leave(self, **left: Any) -> "Run":
        """Leave something on the server."""
        self.aftermath = replace(self.aftermath, **left)
        return self

    def kinds(self, promise: Promise) -> set[str]:
        """Kinds of violations that the checker finds."""
        return {violation.kind for violation in check(self.history, self.aftermath, promise)}


def changed(event: Event, **fields: str) -> Event:
    """The event with other fields."""
    return Event(event.event_id, {**event.fields, **fields})


def late(event_id: str, event: Event) -> Event:
    """The same fields under another id."""
    return Event(event_id, event.fields)


def both(*events: Event) -> Callable[[], Run]:
    """A run whose reply is that, and whose client saw all of it."""
    return lambda: Run(events)


@pytest.mark.parametrize("promise", Promise)
def test_a_right_history_has_no_violation(promise: Promise) -> None:
    assert Run().kinds(promise) == set()


PLANTED: dict[str, tuple[Callable[[], Run], set[str]]] = {
    "a late write": (both(*WHOLE, late("300-1", SECOND)), {"order"}),
    "a second end": (both(*WHOLE, late(f"300-{TERMINAL_SEQ}", END)), {"order"}),
    "an event written twice": (both(OPEN, FIRST, late("100-2", FIRST), RESUMED, SECOND, END), {"order", "reply"}),
    "a merged retry": (both(OPEN, FIRST, RESUMED, changed(SECOND, ids="[8,9]"), END), {"order", "reply"}),
    "a gap": (both(OPEN, FIRST, RESUMED, changed(SECOND, n="4"), END), {"order"}),
    "a missing event": (both(OPEN, RESUMED, SECOND, END), {"order", "reply"}),
    "an open that goes on from elsewhere": (
        both(OPEN, FIRST, changed(RESUMED, **{"from": "1"}), SECOND, END),
        {"order"},
    ),
    "an unknown event": (both(OPEN, changed(FIRST, e="tokens"), RESUMED, SECOND, END), {"order", "reply"}),
    "another token": (both(OPEN, changed(FIRST, ids="[7,1]"), RESUMED, SECOND, END), {"reply"}),
    "another text": (both(OPEN, FIRST, RESUMED, SECOND, changed(END, text="")), {"reply"}),
    "another end": (both(OPEN, FIRST, RESUMED, SECOND, changed(END, finish="stop")), {"reply"}),
    "an error": (both(OPEN, FIRST, RESUMED, SECOND, changed(END, e="error", code="poison")), {"reply"}),
    "no end": (both(*WHOLE[:-1]), {"unanswered", "unread"}),
    "no reply": (lambda: Run(stored=()), {"unanswered"}),
    "a client that never saw the end": (lambda: Run(seen=WHOLE[:-1]), {"unread"}),
    "a client that saw a token twice": (lambda: Run(seen=(OPEN, FIRST, *WHOLE[1:])), {"order", "reply"}),
    "a client that gave up": (lambda: Run().tell(What.BROKEN, client="one"), {"broken"}),
    "a skipped settle": (lambda: Run().leave(queued=("normal/1-0",), pending=("normal/1-0",)), {"left"}),
    "a key that lasts": (lambda: Run().leave(lasting=("reply:a",)), {"left"}),
    "a cancel that nobody asked for": (both(OPEN, FIRST, CANCELLED), {"reply"}),
}


@pytest.mark.parametrize("promise", Promise)
@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_planted_is_found(planted: str, promise: Promise) -> None:
    run, kinds = PLANTED[planted]
    assert run().kinds(promise) == kinds


def lossy_runs() -> Iterator[tuple[str, Run, set[str]]]:
    """Runs in which the server forgot something, and what is wrong with each where it must forget nothing."""
    rewritten = (OPEN, FIRST, late("150-0", RESUMED), late("150-1", SECOND), late(f"150-{TERMINAL_SEQ}", END))
    yield "an event that somebody saw is gone", Run(seen=(*rewritten[:3], None, *WHOLE)), {"reread", "rewritten"}
    yield "a reply that ended is another", Run(seen=rewritten), {"rewritten"}
    lost = Run().tell(What.CRASHED, at=11.0).tell(What.VANISHED, at=12.0)
    yield "a job that was just acknowledged is lost", lost, {"lost"}


@pytest.mark.parametrize(("run", "kinds"), [pytest.param(run, kinds, id=name) for name, run, kinds in lossy_runs()])
def test_what_a_server_forgets_is_wrong_only_where_it_promised_not_to(run: Run, kinds: set[str]) -> None:
    assert run.kinds(Promise.DURABLE) == kinds
    assert run.kinds(Promise.BOUNDED) == set()


def test_a_forgotten_job_needs_an_end_once_it_is_acknowledged_again() -> None:
    run = Run((), seen=WHOLE).tell(What.CRASHED, at=11.0).tell(What.VANISHED, at=12.0)
    assert run.kinds(Promise.BOUNDED) == set()
    assert run.tell(What.ACKED, at=13.0).kinds(Promise.BOUNDED) == {"unanswered"}


def test_a_server_that_forgets_more_than_its_last_seconds_is_never_right() -> None:
    run = Run().tell(What.CRASHED, at=10.1 + MAX_FORGOTTEN_S).tell(What.VANISHED, at=20.0)
    assert run.kinds(Promise.BOUNDED) == {"lost"}


def test_a_cancelled_reply_is_a_beginning_of_the_whole_one() -> None:
    assert Run((OPEN, FIRST, CANCELLED)).tell(What.CANCELLED).kinds(Promise.DURABLE) == set()
    other = (OPEN, changed(FIRST, ids="[7,1]"), CANCELLED)
    assert Run(other).tell(What.CANCELLED).kinds(Promise.DURABLE) == {"reply"}
    assert Run().tell(What.CANCELLED).kinds(Promise.DURABLE) == set()


def test_all_choices_are_judged() -> None:
    events = [
        OPEN,
        Event("100-1", {"e": "token", "ids": "[7]", "n": "1", "index": "0", "text": "a"}),
        Event("100-2", {"e": "token", "ids": "[7]", "n": "2", "index": "1", "text": "a"}),
    ]
    told = '[{"index":0,"finish":"length"},{"index":1,"finish":"length"}]'
    end = Event(f"100-{TERMINAL_SEQ}", {"e": "end", "finish": "length", "text": "", "choices": told})
    run = Run((*events, end))
    run.history.expected["a"] = Expected((7,), "a", num_choices=2)
    assert run.kinds(Promise.DURABLE) == set()
    run = Run((*events[:2], end))
    run.history.expected["a"] = Expected((7,), "a", num_choices=2)
    assert run.kinds(Promise.DURABLE) == {"reply"}


def test_an_unstreamed_reply_is_judged_by_its_end_and_its_checkpoints_too() -> None:
    checkpoint = Event("100-1", {"e": "token", "ids": "[7,8]", "n": "2"})
    end = Event(f"100-{TERMINAL_SEQ}", {"e": "end", "finish": "length", "text": "abcd", "ids": "[7,8,9]"})
    assert Run((OPEN, checkpoint, end)).kinds(Promise.DURABLE) == set()
    assert Run((OPEN, changed(checkpoint, ids="[7,1]"), end)).kinds(Promise.DURABLE) == {"order"}


def test_poison_must_end_as_such_and_nobody_else_may() -> None:
    poison = changed(CANCELLED, code="poison")
    for stored, error, kinds in [
        ((OPEN, FIRST, poison), "poison", set()),
        ((OPEN, changed(FIRST, ids="[7,1]"), poison), "poison", {"reply"}),
        ((OPEN, FIRST, poison), "", {"reply"}),
        ((OPEN, FIRST, changed(CANCELLED, code="internal")), "poison", {"reply"}),
        (WHOLE, "poison", {"reply"}),
    ]:
        run = Run(stored)
        run.history.expected["a"] = Expected((7, 8, 9), "abcd", error=error)
        assert run.kinds(Promise.DURABLE) == kinds, (stored, error)
