"""What one reply's events look like, without a server: ids, order, gathering, and what is owed."""

import json

from worker.errors import ErrorCode, JobError
from worker.streams.keys import TERMINAL_SEQ
from worker.streams.recovery import Recovered
from worker.streams.reply_writer import Event, ReplyStatus, ReplyWriter


def make() -> ReplyWriter:
    return ReplyWriter("a", 100, lambda _: None, lambda _: None)


def fields(event: Event | None) -> dict[str, str]:
    assert event is not None
    return dict(zip(event.fields[::2], event.fields[1::2], strict=True))


def write(writer: ReplyWriter, now_ms: int = 5) -> dict[str, str]:
    """The next event, which is answered at once."""
    event = writer.next_event(now_ms)
    writer.acknowledge()
    return fields(event)


def finish(writer: ReplyWriter) -> None:
    writer.end("stop", usage={}, receipt={})


def test_events_are_counted_from_one_and_the_terminal_one_is_the_largest() -> None:
    writer = make()
    assert writer.last_id == "100-0"
    writer.token([1], "a")
    event = writer.next_event(5)
    assert event is not None
    assert event.command("reply") == (
        "XADD",
        "reply",
        "NOMKSTREAM",
        "100-1",
        *("e", "token", "t", "5", "text", "a", "ids", "[1]", "n", "1"),
    )
    writer.acknowledge()
    finish(writer)
    last = writer.next_event(6)
    assert last is not None
    assert last.entry_id == f"100-{TERMINAL_SEQ}"
    writer.acknowledge()
    assert writer.status is ReplyStatus.ENDED


def test_one_event_is_in_flight_and_it_never_changes() -> None:
    writer = make()
    writer.token([1], "a")
    first = writer.next_event(5)
    writer.token([2], "b")
    assert writer.next_event(99) is first
    writer.acknowledge()
    assert fields(writer.next_event(99))["ids"] == "[2]"


def test_the_count_of_events_is_not_the_count_of_tokens() -> None:
    """A reset, an event of many tokens and text that comes later than its ids all need an id of their own."""
    writer = make()
    writer.token([1, 2, 3], "")
    assert write(writer) == {"e": "token", "t": "5", "text": "", "ids": "[1,2,3]", "n": "3"}
    writer.token([], "abc")
    assert write(writer) == {"e": "token", "t": "5", "text": "abc", "ids": "[]", "n": "3"}
    writer.reset("the model changed")
    assert write(writer) == {"e": "reset", "t": "5", "why": "the model changed", "n": "0"}
    writer.token([4], "d")
    assert write(writer)["n"] == "1"
    assert writer.last_id == "100-4"


def test_a_reset_drops_what_was_gathered() -> None:
    writer = make()
    writer.token([1], "void")
    writer.reset("why not")
    assert write(writer)["e"] == "reset"
    assert writer.next_event(5) is None
    assert writer.is_drained


def test_tokens_come_before_the_end_and_a_tail_of_text_goes_into_it() -> None:
    writer = make()
    writer.token([1], "a")
    finish(writer)
    assert write(writer)["ids"] == "[1]"
    assert write(writer)["text"] == ""
    writer = make()
    writer.token([1], "a")
    write(writer)
    writer.token([], "held back")
    finish(writer)
    assert write(writer) | {"t": ""} == {
        "e": "end",
        "t": "",
        "finish": "stop",
        "text": "held back",
        "usage": "{}",
        "receipt": "{}",
    }


def test_without_streaming_tokens_are_checkpoints_and_the_end_has_everything() -> None:
    writer = make()
    writer.configure(is_streaming=False)
    writer.token([1], "a")
    assert writer.due_ms() <= 1000
    assert write(writer, now_ms=1000) == {"e": "token", "t": "1000", "ids": "[1]", "n": "1"}
    writer.token([2, 3], "bc")
    assert writer.due_ms() == 2000
    writer.token([], "d")
    finish(writer)
    assert writer.due_ms() == 0
    last = write(writer)
    assert (last["e"], last["text"], last["ids"]) == ("end", "abcd", "[1,2,3]")


def test_without_streaming_a_resumed_reply_has_the_text_of_all_attempts() -> None:
    """The stored ids had no text; what they say is owed as a whole."""
    writer = make()
    writer.resume(Recovered(ids=(1, 2)))
    writer.configure(is_streaming=False)
    writer.token([], "ab")
    writer.token([3], "c")
    finish(writer)
    last = write(writer)
    assert (last["text"], last["ids"]) == ("abc", "[1,2,3]")


def test_a_resumed_reply_goes_on_counting_tokens() -> None:
    writer = make()
    writer.resume(Recovered(ids=(1, 2), text="ab"))
    assert writer.next_event(5) is None
    writer.token([3], "c")
    event = write(writer)
    assert (event["ids"], event["n"], event["text"]) == ("[3]", "3", "c")


def test_tokens_gather_for_chunk_ms_but_the_first_does_not_wait() -> None:
    writer = make()
    writer.configure(chunk_ms=50)
    writer.token([1], "a")
    assert writer.due_ms() <= 1000
    write(writer, now_ms=1000)
    writer.token([2], "b")
    assert writer.due_ms() == 1050
    writer.hurry()
    assert writer.due_ms() == 0


def test_a_drawn_seed_is_told_once_an_attempt() -> None:
    writer = make()
    writer.configure(seed=42)
    writer.reset("x")
    assert "seed" not in write(writer)
    writer.token([1], "a")
    assert write(writer)["seed"] == "42"
    writer.token([2], "b")
    assert "seed" not in write(writer)
    writer.reopen(200, Recovered())
    write(writer)
    assert write(writer)["seed"] == "42"


def test_an_error_says_whether_to_try_again() -> None:
    writer = make()
    writer.error(JobError(ErrorCode.CANCELLED, "user left"), meta="m")
    event = write(writer)
    assert (event["code"], event["retryable"], event["meta"]) == ("cancelled", "0", "m")
    assert json.loads(event["details"]) == {}


def test_the_first_ending_counts_and_nothing_follows_it() -> None:
    writer = make()
    finish(writer)
    writer.error(JobError(ErrorCode.INTERNAL, "too late"))
    assert write(writer)["e"] == "end"
    writer.token([1], "a")
    writer.reset("x")
    finish(writer)
    assert writer.next_event(5) is None
    assert writer.is_drained


def test_a_closed_writer_tells_it_once_and_writes_nothing() -> None:
    closed: list[ReplyWriter] = []
    writer = ReplyWriter("a", 100, lambda _: None, closed.append)
    writer.token([1], "a")
    writer.close(ReplyStatus.FENCED)
    writer.close(ReplyStatus.ABANDONED)
    assert closed == [writer]
    assert writer.status is ReplyStatus.FENCED
    assert writer.next_event(5) is None


def test_what_a_server_lost_is_owed_again() -> None:
    writer = make()
    for number in range(4):
        writer.token([number], str(number))
        write(writer)
    writer.token([4], "4")
    writer.next_event(5)
    writer.reopen(200, Recovered(ids=(0, 1), text="01"))
    event = writer.next_event(6)
    assert event is not None
    assert event.entry_id == "200-1"
    assert fields(event)["ids"] == "[2,3,4]"
    assert fields(event)["text"] == "234"


def test_a_stored_reply_that_is_no_beginning_of_ours_is_reset() -> None:
    writer = make()
    writer.token([1, 2], "ab")
    write(writer)
    writer.reopen(200, Recovered(ids=(9,), text="z"))
    assert write(writer)["e"] == "reset"
    event = write(writer)
    assert (event["ids"], event["text"], event["n"]) == ("[1,2]", "ab", "2")
