"""Jobs that nobody wants any more: called off wherever they are, or left by a client that deleted the reply."""

import hashlib
import json
import random
import signal
from functools import partial
from typing import Any

import pytest

from tests.e2e.conftest import StartScripted
from tests.e2e.workers import Queue, eventually
from tests.faults.scripted import ScriptedWorker

PLAIN: dict[str, Any] = {"prompt": "abc", "temperature": 0, "ignore_eos": 1}
LONG: dict[str, Any] = PLAIN | {"max_tokens": 1500}


def state(queue: Queue, job_id: str) -> dict[str, str]:
    return queue.redis.hash(queue.keys.state(job_id))


def is_abandoned(queue: Queue, job_id: str) -> bool:
    return state(queue, job_id)["status"] == "abandoned"


def num_tokens(queue: Queue, job_id: str) -> int:
    return len(queue.reply(job_id).ids)


def details(queue: Queue, job_id: str) -> tuple[str, str]:
    terminal = queue.wait(job_id).terminal
    return terminal["code"], json.loads(terminal["details"]).get("where", "")


def test_a_job_is_called_off_wherever_it_waits(start_scripted: StartScripted, own_queue: Queue) -> None:
    """Behind a job that runs, in the middle of a lane, in another lane, and before it was sent."""
    worker = start_scripted(max_num_seqs=1)
    running = own_queue.enqueue(**LONG)
    eventually(lambda: num_tokens(own_queue, running), "tokens to come")
    jobs = [own_queue.enqueue("low" if n % 2 else "normal", **PLAIN, id=f"job{n}", max_tokens=1) for n in range(10)]
    own_queue.cancel("unborn")
    own_queue.enqueue(**PLAIN, id="unborn")
    for job_id in [jobs[7], jobs[4], "unborn"]:
        own_queue.cancel(job_id)
        assert details(own_queue, job_id) == ("cancelled", "queued")
    assert num_tokens(own_queue, running) < LONG["max_tokens"]
    own_queue.cancel(running)
    assert details(own_queue, running) == ("cancelled", "running")
    for job_id in set(jobs) - {jobs[7], jobs[4]}:
        assert own_queue.wait(job_id).terminal["e"] == "end"
    own_queue.assert_settled()
    worker.wait_until_idle()


def test_a_job_is_called_off_wherever_it_is_in_the_engine(start_scripted: StartScripted, own_queue: Queue) -> None:
    """In its prefill, in decode, in the swap space and waiting for room; one step more at most, and no block stays."""
    worker = start_scripted(
        step_ms=40, num_kv_blocks=12, num_swap_blocks=32, max_num_batched_tokens=16, max_num_seqs=16
    )
    ways = {"prefill": (1, "x" * 150, 20), "decode": (1, "x" * 20, 100), "swapped": (6, "x" * 60, 100)}
    for where, (num_jobs, prompt, max_tokens) in ways.items():
        fields = LONG | {"prompt": prompt, "max_tokens": max_tokens}
        jobs = [own_queue.enqueue(**fields, id=f"{where}{number}") for number in range(num_jobs)]
        if where == "prefill":
            eventually(lambda: worker.gauge("pagemill_sequences_running"), "the prefill to begin")
        elif where == "decode":
            eventually(lambda: num_tokens(own_queue, "decode0"), "tokens to come")
        else:
            eventually(lambda: worker.gauge("pagemill_sequences_swapped"), "somebody to be swapped out")
        for job_id in jobs:
            own_queue.cancel(job_id)
        for job_id in jobs:
            assert details(own_queue, job_id) == ("cancelled", "running")
        num_steps = worker.gauge("pagemill_steps_total")
        worker.wait_until_idle()
        # The one that was under way, and one that computes nothing: it takes the rows out of the batch.
        assert worker.gauge("pagemill_steps_total") <= num_steps + 2
        assert (num_tokens(own_queue, jobs[0]) == 0) is (where == "prefill")
        used = [line for line in worker.get("/metrics")[1].splitlines() if "_blocks{" in line and '"used"' in line]
        assert len(used) == 2
        assert {line.split()[-1] for line in used} == {"0.0"}
    own_queue.assert_settled()


def test_a_job_is_called_off_between_two_owners(start_scripted: StartScripted, own_queue: Queue) -> None:
    """Handed over by one that stops, while the other has no room for it."""
    first = start_scripted(max_num_seqs=1, shutdown_grace_s=0)
    between = own_queue.enqueue(**LONG)
    eventually(lambda: num_tokens(own_queue, between), "tokens to come")
    start_scripted(max_num_seqs=1)
    running = own_queue.enqueue(**LONG)
    eventually(lambda: num_tokens(own_queue, running), "tokens to come")
    first.signal(signal.SIGTERM)
    assert first.wait() == 0
    assert state(own_queue, between)["status"] == "queued"
    own_queue.cancel(between)
    assert details(own_queue, between) == ("cancelled", "queued")
    assert state(own_queue, between)["crashes"] == "0"
    own_queue.cancel(running)
    own_queue.assert_settled()


@pytest.mark.slow
def test_the_lag_stays_a_number_after_a_thousand_random_cancels(
    start_scripted: StartScripted, own_queue: Queue
) -> None:
    """While a job runs that was sent before all of them, and others wait."""
    start_scripted(max_num_seqs=1, step_ms=20)
    running = own_queue.enqueue(**LONG)
    eventually(lambda: num_tokens(own_queue, running), "tokens to come")
    key = own_queue.keys.jobs("normal")
    fields = [str(part) for pair in (PLAIN | {"max_tokens": 1}).items() for part in pair]
    ids = [f"job{number}" for number in range(1050)]
    own_queue.redis.pipeline(*[("XADD", key, "*", "id", job_id, *fields) for job_id in ids])
    cancelled = random.Random(1000).sample(ids, 1000)
    for start in range(0, 1000, 100):
        some = cancelled[start : start + 100]
        own_queue.redis.pipeline(
            *[("SET", own_queue.keys.cancel(job_id), "user left", "EX", 86400) for job_id in some],
            *[("XADD", own_queue.keys.control, "*", "op", "cancel", "id", job_id) for job_id in some],
        )
        assert isinstance(own_queue.redis.group(key)["lag"], int)
    eventually(lambda: own_queue.num_queued() == 51, "the cancelled ones to end")
    assert isinstance(own_queue.redis.group(key)["lag"], int)
    assert state(own_queue, running)["status"] == "running"
    own_queue.cancel(running)
    eventually(lambda: own_queue.num_queued() == 0, "all to end")
    statuses = own_queue.redis.pipeline(*[("HGET", own_queue.keys.state(job_id), "status") for job_id in ids])
    assert {job_id for job_id, status in zip(ids, statuses, strict=True) if status == b"cancelled"} == set(cancelled)
    assert own_queue.redis.group(key)["lag"] == 0


@pytest.mark.parametrize("policy", ["stop", "finish"])
def test_a_client_that_deletes_its_reply_stops_the_work_or_lets_it_finish(
    start_scripted: StartScripted, own_queue: Queue, policy: str
) -> None:
    """While it runs, and while nobody has it."""
    first = start_scripted(on_client_gone=policy, lease_ms=600)
    length = 150
    fields = PLAIN | {"max_tokens": length}

    def check(job_id: str) -> None:
        eventually(lambda: state(own_queue, job_id)["status"] == "abandoned", "it to be settled", 30)
        usage = json.loads(state(own_queue, job_id)["usage"])
        assert usage["prompt_tokens"] == 3
        if policy == "finish":
            assert usage["completion_tokens"] == length
        else:
            assert usage["completion_tokens"] < length
        assert own_queue.redis.call("EXISTS", own_queue.keys.reply(job_id)) == 0

    job_id = own_queue.enqueue(**fields)
    eventually(lambda: num_tokens(own_queue, job_id), "tokens to come")
    own_queue.redis.call("DEL", own_queue.keys.reply(job_id))
    check(job_id)
    first.wait_until_idle()
    between = own_queue.enqueue(**fields)
    eventually(lambda: num_tokens(own_queue, between), "tokens to come")
    first.signal(signal.SIGKILL)
    first.wait()
    own_queue.redis.call("DEL", own_queue.keys.reply(between))
    second = start_scripted(on_client_gone=policy, lease_ms=600)
    check(between)
    assert state(own_queue, between)["crashes"] == "1"
    second.wait_until_idle()
    own_queue.assert_settled()


def test_a_job_that_nobody_hears_ends_with_its_worker_its_time_or_a_cancel(
    start_scripted: StartScripted, own_queue: Queue
) -> None:
    worker = start_scripted(on_client_gone="finish", shutdown_grace_s=0)
    jobs = {name: own_queue.enqueue(**LONG, id=name, **fields) for name, fields in _WAYS.items()}
    for job_id in jobs.values():
        eventually(partial(num_tokens, own_queue, job_id), "tokens to come")
        own_queue.redis.call("DEL", own_queue.keys.reply(job_id))
    own_queue.cancel("cancelled")
    for name in ("cancelled", "overdue"):
        eventually(partial(is_abandoned, own_queue, name), "it to be settled")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert state(own_queue, "stopped")["status"] == "abandoned"
    own_queue.assert_settled()


_WAYS: dict[str, dict[str, Any]] = {"cancelled": {}, "overdue": {"ttl_ms": 1500}, "stopped": {}}


def test_a_resend_may_change_what_does_not_make_another_job(scripted: tuple[ScriptedWorker, Queue]) -> None:
    """Whether the first one waits, runs or has ended."""
    _, queue = scripted
    fields = PLAIN | {"max_tokens": 300, "id": "twice"}
    queue.enqueue(**fields, ttl_ms=60_000)
    eventually(lambda: num_tokens(queue, "twice"), "tokens to come")
    others = {"meta": "second", "ttl_ms": 50_000, "result_ttl_ms": 5000}
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=1"}
    queue.enqueue("high", **fields, **others, **trace)
    queue.wait("twice")
    queue.enqueue("low", **fields, **trace)
    queue.assert_settled()
    assert len(queue.wait("twice").ids) == 300
    assert [fields["e"] for _, fields in queue.reply("twice").events].count("open") == 1
    assert [letter for _, letter in queue.redis.events(queue.keys.dead) if letter.get("id") == "twice"] == []


def test_an_idempotency_key_makes_one_job_of_many_and_a_conflict_of_another(
    scripted: tuple[ScriptedWorker, Queue],
) -> None:
    worker, queue = scripted
    fields = PLAIN | {"max_tokens": 3, "idempotency_key": "order-17"}
    num_before = worker.gauge("pagemill_entries_not_begun_total")
    entries = [queue.enqueue(**fields, tenant="acme"), queue.enqueue("high", **fields, tenant="acme")]
    queue.enqueue(**fields | {"max_tokens": 4}, tenant="acme")
    queue.enqueue(**fields, tenant="other")
    queue.assert_settled()
    ids = [hashlib.sha256(tenant + b"\0order-17").hexdigest()[:32] for tenant in (b"acme", b"other")]
    for job_id in ids:
        assert len(queue.wait(job_id).ids) == 3
        assert [event["e"] for _, event in queue.reply(job_id).events].count("open") == 1
    assert [queue.reply(entry).events for entry in entries] == [[], []]
    (letter,) = [letter for _, letter in queue.redis.events(queue.keys.dead) if letter["error"] == "id_conflict"]
    assert letter["max_tokens"] == "4"
    assert worker.gauge("pagemill_entries_not_begun_total") == num_before + 2
