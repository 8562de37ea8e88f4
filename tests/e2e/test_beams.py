"""Beam search by raw commands through a real worker: told at the end, started over after a crash, cancelled whole."""

import signal
from typing import Any

import pytest

from tests.e2e.conftest import StartWorker
from tests.e2e.workers import Queue, eventually

BEAMS: dict[str, Any] = {"prompt": "the likeliest of all replies", "beam_width": 4, "max_tokens": 20, "ignore_eos": 1}


def test_the_best_come_at_the_end_with_their_scores_and_the_blocks_they_saved(queue: Queue) -> None:
    reply = queue.run(**BEAMS, n=3, stream=0)
    assert [fields["e"] for _, fields in reply.events] == ["open", "end"]
    choices, beams = reply.field("choices"), reply.field("beams")
    assert [(each["index"], each["finish"]) for each in choices] == [(index, "length") for index in range(3)]
    assert len({tuple(each["ids"]) for each in choices}) == 3
    assert [beam["score"] for beam in beams] == sorted((beam["score"] for beam in beams), reverse=True)
    for beam in beams:
        assert beam["score"] == pytest.approx(beam["logprob"] / 20)
    assert reply.field("usage")["completion_tokens"] == 3 * 20
    assert reply.field("receipt")["saved_blocks"] >= 3
    one = queue.run(**BEAMS, stream=0)
    assert (one.field("ids"), one.text) == (choices[0]["ids"], choices[0]["text"])
    assert one.field("beams") == beams[:1]
    queue.assert_settled()


def test_streaming_is_refused_and_the_error_says_what_to_do(queue: Queue) -> None:
    refused = queue.run(**BEAMS)
    assert refused.terminal["code"] == "bad_request"
    assert "set stream to 0" in refused.terminal["message"]


def test_beams_that_the_cache_can_not_hold_are_refused_with_numbers(queue: Queue) -> None:
    refused = queue.run(**(BEAMS | {"beam_width": 16, "max_tokens": 400}), stream=0)
    assert refused.terminal["code"] == "context_too_long"
    assert "16 beams of 28 prompt tokens and up to 400 more" in refused.terminal["message"]
    assert refused.field("details")["beam_width"] == 16


LONG = BEAMS | {"max_tokens": 400, "stream": 0}


def test_a_search_can_be_cancelled_while_it_runs(queue: Queue) -> None:
    job_id = queue.enqueue(**LONG, n=2)
    eventually(lambda: len(queue.reply(job_id).events) > 0, "the reply to open")
    queue.cancel(job_id)
    assert queue.wait(job_id).terminal["code"] == "cancelled"
    assert queue.run(**BEAMS, stream=0).terminal["e"] == "end"
    queue.assert_settled()


def test_a_killed_workers_search_starts_over_at_a_peer(start_worker: StartWorker, own_queue: Queue) -> None:
    first = start_worker(lease_ms=1500)
    first.wait_until_ready()
    job_id = own_queue.enqueue(**LONG, n=2)
    eventually(lambda: len(own_queue.reply(job_id).events) > 0, "the reply to open")
    first.signal(signal.SIGKILL)
    first.wait()
    first.assert_gone()
    start_worker(lease_ms=1500).wait_until_ready()
    reply = own_queue.wait(job_id)
    assert [fields["e"] for _, fields in reply.events] == ["open", "open", "end"]
    assert reply.field("usage")["replayed_tokens"] == 0
    again = own_queue.run(**LONG, n=2)
    assert reply.field("choices") == again.field("choices")
    own_queue.assert_settled()
