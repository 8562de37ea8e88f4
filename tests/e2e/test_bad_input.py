"""Whatever is sent, it gets exactly one error event with a code and advice, and its neighbours don't notice."""

import json
from typing import Any

import msgpack
import pytest

from tests.e2e.workers import Queue, WorkerProcess, eventually
from worker.errors import ErrorCode

BAD_JOBS: dict[str, tuple[list[Any], str]] = {
    "no prompt at all": (["max_tokens", 5], "bad_request"),
    "random bytes": ([b"\x00\xff\xfe", b"\x80\x81"], "bad_request"),
    "two prompts": (["prompt", "a", "tokens", "[1]"], "bad_request"),
    "flat and payload": (["prompt", "a", "payload", '{"prompt": "b"}', "encoding", "json"], "bad_request"),
    "a field twice": (["prompt", "a", "prompt", "b"], "bad_request"),
    "payload that is no JSON": (["payload", "{", "encoding", "json"], "bad_request"),
    "payload that is no msgpack": (["payload", b"\xc1", "encoding", "msgpack"], "bad_request"),
    "payload of a wrong type": (["payload", "[1]", "encoding", "json"], "bad_request"),
    "payload without encoding": (["payload", "{}"], "bad_request"),
    "deep payload": (["payload", "[" * 200 + "]" * 200, "encoding", "json"], "bad_request"),
    "msgpack extension": (
        ["payload", msgpack.packb({"prompt": msgpack.ExtType(5, b"x")}), "encoding", "msgpack"],
        "bad_request",
    ),
    "text for a number": (["prompt", "a", "max_tokens", "many"], "bad_request"),
    "number for a text": (["payload", '{"prompt": 5}', "encoding", "json"], "bad_request"),
    "unknown model": (["prompt", "a", "model", "gpt-99"], "model_not_found"),
    "unknown version": (["prompt", "a", "v", 2], "unsupported_version"),
    "a field that must be known": (["prompt", "a", "must_sing", 1], "bad_request"),
    "prompt too long": (["tokens", json.dumps([1] * 3000)], "context_too_long"),
    "max_tokens of -1": (["prompt", "a", "max_tokens", -1], "bad_request"),
    "max_tokens of 0": (["prompt", "a", "max_tokens", 0], "bad_request"),
    "max_tokens of a billion": (["prompt", "a", "max_tokens", 10**9], "context_too_long"),
    "max_tokens of 10^30": (["prompt", "a", "max_tokens", 10**30], "bad_request"),
    "token id beyond the vocabulary": (["tokens", "[5, 320]"], "bad_request"),
    "negative token id": (["tokens", "[-1]"], "bad_request"),
    "token id that is no number": (["tokens", '["a"]'], "bad_request"),
    "no tokens": (["tokens", "[]"], "bad_request"),
    "empty prompt": (["prompt", ""], "bad_request"),
    "invalid UTF-8": (["prompt", b"caf\xe9"], "bad_request"),
    "2 MB field": (["prompt", b"a" * 2_000_000], "payload_too_large"),
    "2 MB of small fields": ([x for i in range(2000) for x in (f"f{i}", "y" * 1000)], "payload_too_large"),
    "messages that are no list": (["messages", '{"role": "user"}'], "bad_request"),
    "message without content": (["messages", '[{"role": "user"}]'], "bad_request"),
    "temperature below 0": (["prompt", "a", "temperature", "-0.1"], "bad_request"),
    "temperature that is no number": (["prompt", "a", "temperature", "nan"], "bad_request"),
    "top_p of 0": (["prompt", "a", "top_p", 0], "bad_request"),
    "huge seed": (["prompt", "a", "seed", 2**70], "bad_request"),
    "stop id that is negative": (["prompt", "a", "stop_token_ids", "[-5]"], "bad_request"),
    "stop id beyond the vocabulary": (["prompt", "a", "stop_token_ids", "[5, 191222]"], "bad_request"),
    "bias of an id beyond the vocabulary": (["prompt", "a", "logit_bias", '{"191222": 5}'], "bad_request"),
    "schema that names itself": (
        ["prompt", "a", "response_format", '{"type": "json_schema", "json_schema": {"$ref": "#"}}'],
        "bad_request",
    ),
    "pattern that does not parse": (
        ["prompt", "a", "response_format", '{"type": "regex", "regex": "(["}'],
        "bad_request",
    ),
    "empty stop string": (["prompt", "a", "stop", '[""]'], "bad_request"),
    "not supported yet": (["prompt", "a", "logit_bias", '{"5": 1}'], "bad_request"),
    "penalty out of range": (["prompt", "a", "repetition_penalty", 0], "bad_request"),
    "beams with penalties": (["prompt", "a", "beam_width", 4, "stream", 0, "presence_penalty", 1], "bad_request"),
    "beams with streaming": (["prompt", "a", "beam_width", 4], "bad_request"),
    "beams with a stop string": (["prompt", "a", "beam_width", 4, "stop", "x", "stream", 0], "bad_request"),
    "beams that the cache can't hold": (["prompt", "a", "beam_width", 16, "stream", 0], "context_too_long"),
    "best_of with streaming": (["prompt", "a", "best_of", 4], "bad_request"),
    "best_of below n": (["prompt", "a", "best_of", 2, "n", 3, "stream", 0], "bad_request"),
    "too many choices": (["prompt", "a", "n", 17], "bad_request"),
    "prompt_ref to nothing": (["prompt_ref", "nothing-there"], "bad_request"),
    "prompt_ref with a key's name": (["prompt_ref", "pagemill:{x}:jobs:normal"], "bad_request"),
    "ttl of 0": (["prompt", "a", "ttl_ms", 0], "bad_request"),
}


@pytest.mark.parametrize("name", BAD_JOBS)
def test_bad_input_gets_one_error_that_says_what_to_do(queue: Queue, name: str) -> None:
    flat, code = BAD_JOBS[name]
    before = queue.enqueue(prompt="before", max_tokens=3, temperature=0, ignore_eos=1)
    bad = queue.enqueue_fields(flat)
    after = queue.enqueue(prompt="after", max_tokens=3, temperature=0, ignore_eos=1)
    terminal = queue.wait(bad).terminal
    assert terminal["e"] == "error"
    assert terminal["code"] == code
    assert code in set(ErrorCode)
    assert len(terminal["message"]) > 20
    assert ":" in terminal["message"], "an error says what is wrong, and after a colon what to do"
    for neighbour in (before, after):
        assert queue.wait(neighbour).field("usage")["completion_tokens"] == 3
    queue.assert_settled()


def test_a_malformed_id_is_answered_under_the_entrys_name_and_kept(queue: Queue) -> None:
    entry = queue.redis.call("XADD", queue.keys.jobs("normal"), "*", "id", "no spaces please", "prompt", "a").decode()
    assert queue.wait(f"normal-{entry}").terminal["code"] == "bad_request"
    queue.assert_settled()
    letters = [fields for _, fields in queue.redis.events(queue.keys.dead)]
    assert [letter["error"] for letter in letters if letter["source_id"] == f"normal/{entry}"] == ["bad_request"]


def test_a_job_that_nobody_can_be_waiting_for_is_kept_as_a_dead_letter(queue: Queue) -> None:
    job_id = queue.enqueue_fields([b"\xff\x00", b"\xfe" * 100_000])
    queue.wait(job_id)
    queue.assert_settled()
    raw = queue.redis.call("XREVRANGE", queue.keys.dead, "+", "-", "COUNT", 1)[0][1]
    letter = dict(zip(raw[::2], raw[1::2], strict=True))
    assert letter[b"error"] == b"bad_request"
    assert len(letter[b"\xff\x00"]) == 65536
    assert letter[b"cut"] == b"\xff\x00"


def test_an_exhausted_worker_still_answers_after_all_that(served: tuple[WorkerProcess, Queue]) -> None:
    worker, queue = served
    jobs = [queue.enqueue_fields(flat) for flat, _ in BAD_JOBS.values() for _ in range(3)]
    good = [queue.enqueue(prompt=f"good {i}", max_tokens=4, temperature=0, ignore_eos=1) for i in range(20)]
    for job_id in jobs:
        assert queue.wait(job_id).terminal["e"] == "error"
    for job_id in good:
        assert queue.wait(job_id).terminal["e"] == "end"
    queue.assert_settled()
    assert worker.get("/healthz")[0] == 200
    errors = {event["event"] for event in worker.events() if event["level"] == "error"}
    assert errors <= {"job_unanswerable", "dead_letter_lost", "key_of_wrong_type"}  # those that other tests provoke


def test_dead_letters_that_can_not_be_kept_cost_no_job_its_error(served: tuple[WorkerProcess, Queue]) -> None:
    worker, queue = served
    queue.run(max_tokens=1)  # so that there are dead letters to put aside
    queue.redis.call("RENAME", queue.keys.dead, queue.keys.prompt("away"))
    queue.redis.call("SET", queue.keys.dead, "something else")
    try:
        assert queue.run(max_tokens=3).terminal["code"] == "bad_request"
        queue.enqueue(id="lost-letter", prompt="first", max_tokens=1)
        queue.enqueue(id="lost-letter", prompt="second", max_tokens=1)
        assert queue.wait("lost-letter").terminal["e"] == "end"
        queue.assert_settled()
        lost = eventually(lambda: worker.named("dead_letter_lost"), "the log to tell")
        assert {event["key"] for event in lost} == {queue.keys.dead}
    finally:
        queue.redis.call("RENAME", queue.keys.prompt("away"), queue.keys.dead)


def test_a_reply_key_of_another_type_costs_that_job_alone(queue: Queue) -> None:
    job_id = "blocked"
    queue.redis.call("SET", queue.keys.reply(job_id), "mine", "EX", 600)
    queue.enqueue(id=job_id, prompt="nowhere to answer", max_tokens=3)
    neighbour = queue.enqueue(prompt="still served", max_tokens=3, temperature=0, ignore_eos=1)
    assert queue.wait(neighbour).terminal["e"] == "end"
    queue.assert_settled()
    letters = [fields for _, fields in queue.redis.events(queue.keys.dead) if fields.get("id") == job_id]
    assert [letter["error"] for letter in letters] == ["bad_request"]


def test_a_dead_letters_prompt_is_kept(queue: Queue) -> None:
    queue.redis.call("SET", queue.keys.prompt("book"), "Once upon a time", "EX", 600)
    job_id = queue.enqueue(prompt_ref="book", temperature="warm")
    assert queue.wait(job_id).terminal["code"] == "bad_request"
    queue.assert_settled()
    letters = [fields for _, fields in queue.redis.events(queue.keys.dead) if fields.get("prompt_ref") == "book"]
    assert len(letters) == 1
    assert queue.redis.call("EXISTS", queue.keys.prompt("book")) == 1
