"""Jobs by raw commands through a real worker process: what a client in any language sends and sees."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.e2e.conftest import StartWorker
from tests.e2e.workers import Queue, WorkerProcess, eventually
from worker.settings import served_name
from worker.streams.keys import LANES

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": 1}


def test_a_prompt_is_completed_and_streamed(queue: Queue) -> None:
    reply = queue.run(id="plain-1", prompt="Once upon", max_tokens=12, **GREEDY)
    assert reply.events[0][1]["e"] == "open"
    assert reply.terminal.get("finish") == "length"
    assert len(reply.ids) == 12
    assert reply.field("usage") == {
        "prompt_tokens": 9,
        "completion_tokens": 12,
        "cached_tokens": 0,
        "replayed_tokens": 0,
    }
    assert reply.field("receipt")["attempts"] == 1


def test_event_ids_are_the_attempt_and_a_count(queue: Queue) -> None:
    reply = queue.run(prompt="count", max_tokens=5, **GREEDY)
    attempt = reply.events[0][0].partition("-")[0]
    *counted, last = [entry_id for entry_id, _ in reply.events]
    assert counted == [f"{attempt}-{seq}" for seq in range(len(counted))]
    assert last == f"{attempt}-18446744073709551615"
    assert all(abs(int(fields["t"]) - int(attempt)) < 60_000 for _, fields in reply.events)


def test_the_same_job_in_every_form_gets_the_same_answer(queue: Queue) -> None:
    prompt = "naïve 東京"
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    forms: list[dict[str, Any]] = [
        {"prompt": prompt, "max_tokens": 8, **GREEDY},
        {"tokens": json.dumps(ids_of(prompt)), "max_tokens": 8, **GREEDY},
        {"payload": json.dumps(body), "encoding": "json"},
        {"payload": msgpack.packb(body), "encoding": "msgpack"},
    ]
    replies = [queue.wait(queue.enqueue(**form)) for form in forms]
    assert len({tuple(reply.ids) for reply in replies}) == 1
    assert len({reply.text for reply in replies}) == 1


def ids_of(text: str) -> list[int]:
    """What the tiny tokenizer makes of a text: one token a byte."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    shown = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
    return [alphabet.index(char) for char in shown]


def test_messages_go_through_the_chat_template(queue: Queue) -> None:
    messages = [{"role": "user", "content": "hi"}]
    chat = queue.run(messages=json.dumps(messages), max_tokens=6, **GREEDY)
    written_out = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert chat.ids == queue.run(prompt=written_out, max_tokens=6, **GREEDY).ids


def test_a_large_prompt_can_lie_in_a_key_of_its_own(queue: Queue) -> None:
    queue.redis.call("SET", queue.keys.prompt("big"), "a" * 100, "EX", 600)
    reply = queue.run(prompt_ref="big", max_tokens=4, **GREEDY)
    assert reply.field("usage")["prompt_tokens"] == 100
    eventually(lambda: not queue.redis.call("EXISTS", queue.keys.prompt("big")), "settling to remove the prompt")


def test_without_streaming_the_end_has_it_all(queue: Queue) -> None:
    streamed = queue.run(prompt="all at once", max_tokens=9, **GREEDY)
    whole = queue.run(prompt="all at once", max_tokens=9, stream=0, **GREEDY)
    assert whole.terminal["text"] == streamed.text
    assert whole.field("ids") == streamed.ids
    assert all("text" not in fields for _, fields in whole.events if fields["e"] == "token")


def test_max_tokens_left_out_means_what_is_left_of_the_context(queue: Queue) -> None:
    reply = queue.run(tokens=json.dumps([65] * 2036), **GREEDY)
    assert reply.terminal.get("finish") == "length"
    assert reply.field("usage")["completion_tokens"] == 12


def test_a_seed_gives_the_same_text_alone_and_in_a_crowd(queue: Queue) -> None:
    job: dict[str, Any] = {
        "prompt": "seeded",
        "max_tokens": 16,
        "temperature": 1.5,
        "top_p": 0.9,
        "seed": 7,
        "ignore_eos": 1,
    }
    alone = queue.run(**job)
    ids = [queue.enqueue(**job)] + [queue.enqueue(prompt=f"crowd {i}", max_tokens=16) for i in range(6)]
    ids.append(queue.enqueue(**job))
    crowd = [queue.wait(job_id) for job_id in ids]
    assert crowd[0].ids == crowd[-1].ids == alone.ids
    assert "seed" not in alone.events[1][1]


def test_a_drawn_seed_is_told_and_gives_the_same_text_again(queue: Queue) -> None:
    first = queue.run(prompt="draw", max_tokens=16, temperature=2, ignore_eos=1)
    seed = first.events[1][1]["seed"]
    assert first.field("receipt")["seed"] == int(seed)
    assert queue.run(prompt="draw", max_tokens=16, temperature=2, ignore_eos=1, seed=seed).ids == first.ids


def test_a_stop_string_ends_the_text_before_it(queue: Queue) -> None:
    free = queue.run(prompt="stop here", max_tokens=30, **GREEDY)
    stop = next(char for char in free.text[3:] if char.isascii())
    cut = queue.run(prompt="stop here", max_tokens=30, stop=stop, **GREEDY)
    assert cut.terminal.get("finish") == "stop"
    assert cut.text == free.text[: free.text.index(stop)]
    kept = queue.run(prompt="stop here", max_tokens=30, stop=json.dumps([stop]), include_stop=1, **GREEDY)
    assert kept.text == free.text[: free.text.index(stop) + 1]


def test_a_stop_token_ends_the_reply(queue: Queue) -> None:
    free = queue.run(prompt="halt", max_tokens=20, **GREEDY)
    wanted = free.ids[4]
    cut = queue.run(prompt="halt", max_tokens=20, stop_token_ids=json.dumps([wanted]), **GREEDY)
    assert cut.terminal.get("finish") == "stop"
    assert cut.ids == free.ids[: free.ids.index(wanted) + 1]


def test_meta_comes_back_and_the_record_is_kept(queue: Queue) -> None:
    reply = queue.run(id="meta-1", prompt="x", max_tokens=2, meta='{"order": 5}', **GREEDY)
    assert reply.terminal["meta"] == '{"order": 5}'
    queue.assert_settled()
    state = queue.redis.hash(queue.keys.state("meta-1"))
    assert state["status"] == "done"
    assert json.loads(state["usage"]) == reply.field("usage")
    assert 0 < queue.redis.call("PTTL", queue.keys.reply("meta-1")) <= 600_000


def test_chunks_gather_tokens(queue: Queue) -> None:
    reply = queue.run(prompt="in pieces", max_tokens=40, chunk_ms=200, **GREEDY)
    assert len(reply.ids) == 40
    assert len(reply.events) < 20


@pytest.mark.parametrize("lane", LANES)
def test_every_lane_is_served(queue: Queue, lane: str) -> None:
    assert queue.wait(queue.enqueue(lane, prompt=lane, max_tokens=2, **GREEDY)).terminal["e"] == "end"


def test_a_running_job_is_cancelled(queue: Queue) -> None:
    job_id = queue.enqueue(id="cancel-me", prompt="long", max_tokens=2000, **GREEDY)
    eventually(lambda: len(queue.reply(job_id).events) > 2, "tokens to come")
    started = time.monotonic()
    queue.cancel(job_id)
    reply = queue.wait(job_id)
    assert reply.terminal["code"] == "cancelled"
    assert reply.terminal["message"].startswith("called off: user left. If it is wanted")
    assert json.loads(reply.terminal["details"]) == {"where": "running"}
    assert time.monotonic() - started < 5
    queue.assert_settled()
    assert not queue.redis.call("EXISTS", queue.keys.cancel(job_id))


def test_a_job_cancelled_before_it_was_sent_never_runs(queue: Queue) -> None:
    queue.cancel("born-dead")
    reply = queue.run(id="born-dead", prompt="x", max_tokens=5)
    assert reply.terminal["code"] == "cancelled"
    assert reply.ids == []


def test_a_job_that_waited_past_its_deadline_costs_no_token(queue: Queue) -> None:
    past = int(queue.redis.call("TIME")[0]) * 1000 - 5000
    reply = queue.run(prompt="too late", deadline_ms=past)
    assert reply.terminal["code"] == "deadline_exceeded"
    assert json.loads(reply.terminal["details"]) == {"where": "queued"}
    assert reply.ids == []


def test_a_resend_of_a_job_is_dropped_and_a_misuse_of_its_id_is_kept(queue: Queue) -> None:
    first = queue.run(id="twice", prompt="once", max_tokens=3, **GREEDY)
    queue.enqueue(id="twice", prompt="once", max_tokens=3, **GREEDY)
    queue.enqueue(id="twice", prompt="something else", max_tokens=3, **GREEDY)
    queue.assert_settled()
    assert queue.reply("twice").events == first.events
    letters = [fields for _, fields in queue.redis.events(queue.keys.dead) if fields["error"] == "id_conflict"]
    assert [letter["prompt"] for letter in letters] == ["something else"]


def test_a_deleted_reply_stops_the_work(served: tuple[WorkerProcess, Queue]) -> None:
    worker, queue = served
    job_id = queue.enqueue(id="walked-away", prompt="gone", max_tokens=2000, **GREEDY)
    eventually(lambda: len(queue.reply(job_id).events) > 2, "tokens to come")
    queue.redis.call("DEL", queue.keys.reply(job_id))
    queue.assert_settled()
    assert queue.redis.hash(queue.keys.state(job_id))["status"] == "abandoned"
    eventually(lambda: running(worker) == 0, "the sequence to leave the engine")


@pytest.mark.parametrize(
    "command",
    [
        ("DEL", "LANE"),
        ("XGROUP", "DESTROY", "LANE", "workers"),
        ("SET", "LANE", "something else", "PX", "300"),
    ],
    ids=["deleted", "without its group", "overwritten for a while"],
)
def test_a_job_whose_lane_is_lost_while_it_runs_ends_once(queue: Queue, command: tuple[str, ...]) -> None:
    job_id = queue.enqueue(prompt="long", max_tokens=600, **GREEDY)
    eventually(lambda: len(queue.reply(job_id).events) > 2, "tokens to come")
    queue.redis.call(*(queue.keys.jobs("normal") if word == "LANE" else word for word in command))
    other = queue.enqueue("high", prompt="in another lane", max_tokens=3, **GREEDY)
    assert queue.wait(other).terminal["e"] == "end"
    reply = queue.wait(job_id)
    assert reply.terminal["e"] == "end"
    assert len(reply.ids) == 600
    eventually(lambda: queue.redis.hash(queue.keys.state(job_id))["status"] == "done", "the outcome to be recorded")
    assert queue.wait(queue_once_it_is_a_lane(queue)).terminal["e"] == "end"
    queue.assert_settled()
    assert queue.reply(job_id).events == reply.events


def queue_once_it_is_a_lane(queue: Queue) -> str:
    """Sends a job to the normal lane as soon as its key takes one."""
    key = queue.keys.jobs("normal")
    eventually(lambda: queue.redis.call("TYPE", key) != b"string", "the lane's key to be free again")
    return queue.enqueue(prompt="in the same lane", max_tokens=3, **GREEDY)


def test_a_job_that_no_peer_can_take_over_ends_with_its_worker(start_worker: StartWorker, own_queue: Queue) -> None:
    worker = start_worker()
    worker.wait_until_ready()
    job_id = own_queue.enqueue(prompt="long", max_tokens=1500, **GREEDY)
    eventually(lambda: len(own_queue.reply(job_id).events) > 2, "tokens to come")
    worker.engine().suspend()
    own_queue.redis.call("DEL", own_queue.keys.jobs("normal"))
    for _ in range(2):
        worker.signal(signal.SIGTERM)
        eventually(lambda: "worker_stopping" in [event["event"] for event in worker.events()], "the signal to be seen")
    assert worker.wait() == 0
    terminal = own_queue.reply(job_id).terminal
    assert (terminal["code"], terminal["retryable"]) == ("draining", "1")
    assert own_queue.redis.hash(own_queue.keys.state(job_id))["status"] == "draining"


def running(worker: WorkerProcess) -> float:
    """The gauge of running sequences."""
    body = worker.get("/metrics")[1]
    return float(next(line.split()[1] for line in body.splitlines() if line.startswith("pagemill_sequences_running")))


def test_the_registry_names_the_worker(served: tuple[WorkerProcess, Queue], tiny_model: Path) -> None:
    worker, queue = served
    worker_id = worker.wait_until_ready()["worker_id"]
    assert worker_id.encode() in queue.redis.call("ZRANGE", queue.keys.workers, 0, -1)
    record = queue.redis.hash(queue.keys.worker(worker_id))
    assert record["model"] == served_name(str(tiny_model))
    assert record["slots"] == "16"
    assert 0 < queue.redis.call("PTTL", queue.keys.worker(worker_id)) <= 15_000


def test_metrics_and_health_are_served(served: tuple[WorkerProcess, Queue]) -> None:
    worker, queue = served
    queue.run(prompt="count me", max_tokens=3, **GREEDY)
    queue.assert_settled()
    status, body = worker.get("/metrics")
    assert status == 200
    for name in ("sequences_running", "sequences_waiting", "kv_usage_ratio", "preemptions_total", "tokens_total"):
        assert f"pagemill_{name}" in body
    assert float(next(line.split()[-1] for line in body.splitlines() if 'outcome="done"' in line)) >= 1
    assert worker.get("/healthz")[0] == 200
    assert worker.get("/readyz")[0] == 200


def test_logs_have_ids_and_no_text(served: tuple[WorkerProcess, Queue]) -> None:
    worker, queue = served
    queue.run(id="secret-1", prompt="xyzzy-plugh", max_tokens=3, meta="quux-meta")
    queue.assert_settled()
    settled = eventually(
        lambda: [e for e in worker.named("job_settled") if e["request_id"] == "secret-1"],
        "the log to tell of the job",
    )
    assert settled[0]["worker_id"] == worker.wait_until_ready()["worker_id"]
    log = worker.log_path.read_text()
    assert "xyzzy" not in log
    assert "quux" not in log


def test_a_paused_queue_takes_no_jobs_until_it_is_resumed(queue: Queue) -> None:
    """A read that is under way when the pause comes may still bring a job, so this sends until one is left waiting."""
    configure(queue, paused=1)
    try:
        job_id = eventually(lambda: untaken(queue), "a job that is not taken")
        assert queue.redis.call("XLEN", queue.keys.jobs("normal")) == 1
    finally:
        configure(queue, paused=0)
    assert queue.wait(job_id).terminal["e"] == "end"


def untaken(queue: Queue) -> str | None:
    """Sends a job; answers its id if nobody opened it within three times the longest blocking read."""
    job_id = queue.enqueue(prompt="anyone?", max_tokens=1)
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        if queue.reply(job_id).events:
            queue.wait(job_id)
            return None
        time.sleep(0.02)
    return job_id


def configure(queue: Queue, **config: int) -> None:
    """What an operator does."""
    for name, value in config.items():
        queue.redis.call("HSET", queue.keys.config, name, value)
    queue.redis.call("XADD", queue.keys.control, "*", "op", "config")
