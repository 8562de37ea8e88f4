"""Replies of several choices: turns, counts, ends, what is owed after a loss, and what a client makes of it."""

import json

import pytest

from worker.reply_events import Reply, ReplyCursor, parse_event
from worker.streams.recovery import Recovered, Stored
from worker.streams.reply_writer import ReplyStatus, ReplyWriter


def make(num_choices: int = 3, *, is_streaming: bool = True, chunk_ms: int = 0) -> ReplyWriter:
    writer = ReplyWriter("a", 100, lambda _: None, lambda _: None)
    writer.configure(is_streaming=is_streaming, chunk_ms=chunk_ms, num_choices=num_choices)
    return writer


def write_all(writer: ReplyWriter, now_ms: int = 5) -> list[dict[str, str]]:
    """Every event that is owed, each answered at once."""
    written = []
    while (event := writer.next_event(now_ms)) is not None:
        writer.acknowledge()
        written.append({"id": event.entry_id, **dict(zip(event.fields[::2], event.fields[1::2], strict=True))})
    return written


def read(events: list[dict[str, str]]) -> Reply:
    """What a client makes of them."""
    reply, cursor = Reply(), ReplyCursor()
    for fields in events:
        flat = [part.encode() for name, value in fields.items() if name != "id" for part in (name, value)]
        event = parse_event(fields["id"].encode(), flat)
        assert cursor.accept(event) is event
        reply.add(event)
    return reply


def test_choices_take_turns_and_are_counted_together() -> None:
    writer = make()
    writer.token([1, 2], "ab", 0)
    writer.token([3], "c", 2)
    events = write_all(writer)
    assert [(event["index"], event["ids"], event["n"]) for event in events] == [("0", "[1,2]", "2"), ("2", "[3]", "3")]
    writer.token([4], "d", 0)
    writer.token([5], "e", 1)
    assert [event["index"] for event in write_all(writer)] == ["0", "1"]
    assert writer.num_tokens == 5


def test_text_that_was_held_back_comes_before_the_end_with_its_index() -> None:
    writer = make(2)
    writer.token([1], "a", 0)
    writer.token([2], "", 1)
    writer.token([], "tail", 1)
    writer.end(["stop", "length"], usage={}, receipt={})
    *tokens, end = write_all(writer)
    assert [(event["index"], event["text"]) for event in tokens] == [("0", "a"), ("1", "tail")]
    assert (end["finish"], end["text"], "ids" in end) == ("stop", "", False)
    assert json.loads(end["choices"]) == [{"index": 0, "finish": "stop"}, {"index": 1, "finish": "length"}]
    assert writer.status is ReplyStatus.ENDED


@pytest.mark.parametrize("is_streaming", [True, False])
def test_a_client_has_every_choice(is_streaming: bool) -> None:
    writer = make(3, is_streaming=is_streaming)
    writer.token([1], "a", 1)
    events = write_all(writer)
    writer.token([2, 3], "bc", 0)
    writer.token([4], "d", 1)
    writer.end(["stop", "length", "eos"], usage={}, receipt={})
    reply = read(events + write_all(writer))
    assert [(each.text, each.finish) for each in reply.choices] == [("bc", "stop"), ("ad", "length"), ("", "eos")]
    assert [each.ids for each in reply.choices] == [[2, 3], [1, 4], []]


def test_unstreamed_checkpoints_of_all_choices_go_out_together() -> None:
    writer = make(3, is_streaming=False)
    for index in range(3):
        writer.token([index], "x", index)
    events = []
    now_ms = 10_000
    while writer.due_ms() <= now_ms and (event := writer.next_event(now_ms)) is not None:
        writer.acknowledge()
        events.append(event)
    assert len(events) == 3
    writer.token([9], "y", 0)
    assert writer.due_ms() > now_ms


def test_after_a_loss_each_choice_owes_what_is_not_stored() -> None:
    writer = make(2)
    writer.token([1, 2], "ab", 0)
    writer.token([3, 4], "cd", 1)
    write_all(writer)
    writer.reopen(200, Recovered(ids=(1, 2), text="ab", others=(Stored((3,), "c"),)))
    assert [(e["index"], e["ids"], e["text"], e["n"]) for e in write_all(writer)] == [("1", "[4]", "d", "4")]


def test_after_a_loss_that_does_not_fit_all_choices_begin_anew() -> None:
    writer = make(2)
    writer.token([1], "a", 0)
    writer.token([3], "c", 1)
    write_all(writer)
    writer.reopen(200, Recovered(ids=(1,), text="a", others=(Stored((7,), "z"),)))
    reset, *tokens = write_all(writer)
    assert reset["e"] == "reset"
    assert [(event["index"], event["ids"]) for event in tokens] == [("0", "[1]"), ("1", "[3]")]


def test_choices_are_resumed_each_where_it_was() -> None:
    writer = ReplyWriter("a", 100, lambda _: None, lambda _: None)
    writer.resume(Recovered(ids=(1,), text="a", others=(Stored(), Stored((2, 3), "bc"))))
    writer.configure(num_choices=4)
    writer.token([4], "d", 2)
    writer.token([5], "e", 3)
    assert [(event["index"], event["n"]) for event in write_all(writer)] == [("2", "4"), ("3", "5")]
