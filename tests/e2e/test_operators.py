"""What operators set while workers run: pause, drain, depth, log level, and limits of tenants."""

import json
import signal
from typing import Any

import pytest

from tests.e2e.conftest import StartScripted
from tests.e2e.workers import Queue, eventually
from tests.faults.scripted import ScriptedWorker

PLAIN: dict[str, Any] = {"prompt": "abc", "temperature": 0, "ignore_eos": 1}
# Of the made-up model at 2 ms a step: two seconds and more.
LONG: dict[str, Any] = PLAIN | {"max_tokens": 800}


def set_config(queue: Queue, **fields: str) -> None:
    """Set fields of the queue's config, `__` standing for a colon, and give the hint."""
    for name, value in fields.items():
        queue.redis.call("HSET", queue.keys.config, name.replace("__", ":"), value)
    queue.redis.call("XADD", queue.keys.control, "*", "op", "config")


def beats(queue: Queue) -> list[dict[str, str]]:
    """What each worker last told the registry."""
    names = queue.redis.call("ZRANGE", queue.keys.workers, 0, -1)
    return [queue.redis.hash(queue.keys.worker(name.decode())) for name in names]


def is_told_paused(queue: Queue, flag: str) -> bool:
    """Whether the registry has a worker, and all say so."""
    return {beat.get("paused") for beat in beats(queue)} == {flag}


def state(queue: Queue, job_id: str) -> dict[str, str]:
    return queue.redis.hash(queue.keys.state(job_id))


def is_begun(queue: Queue, job_id: str) -> bool:
    return len(queue.reply(job_id).events) > 1


def test_a_paused_queue_finishes_what_runs_and_begins_nothing(
    scripted: tuple[ScriptedWorker, Queue],
) -> None:
    """What is overdue or called off ends all the same."""
    _, own_queue = scripted
    running = own_queue.enqueue(**LONG)
    eventually(lambda: is_begun(own_queue, running), "tokens to come")
    set_config(own_queue, paused="1")
    eventually(lambda: is_told_paused(own_queue, "1"), "the registry to show it")
    waiting = own_queue.enqueue(**PLAIN, id="waiting", max_tokens=2)
    overdue = own_queue.enqueue(**PLAIN, ttl_ms=100)
    cancelled = own_queue.enqueue(**PLAIN, id="cancelled")
    own_queue.cancel(cancelled)
    assert own_queue.wait(running).terminal["finish"] == "length"
    assert own_queue.wait(overdue).field("details") == {"where": "queued"}
    assert own_queue.wait(cancelled).terminal["code"] == "cancelled"
    assert own_queue.reply(waiting).events == []
    set_config(own_queue, paused="0")
    assert own_queue.wait(waiting).terminal["finish"] == "length"
    assert state(own_queue, waiting)["crashes"] == "0"
    own_queue.assert_settled()


def test_a_job_that_a_waiting_read_brings_into_a_paused_queue_is_put_back(
    scripted: tuple[ScriptedWorker, Queue],
) -> None:
    """The read was sent before the pause; the job begins after it."""
    _, own_queue = scripted
    for number in range(3):
        set_config(own_queue, paused="1")
        eventually(lambda: is_told_paused(own_queue, "1"), "the pause")
        job_id = own_queue.enqueue(**PLAIN, id=f"job{number}", max_tokens=1)
        assert state(own_queue, job_id) == {}
        set_config(own_queue, paused="0")
        own_queue.wait(job_id)


def test_a_worker_that_comes_to_a_paused_queue_begins_nothing(start_scripted: StartScripted, own_queue: Queue) -> None:
    set_config(own_queue, paused="1")
    jobs = [own_queue.enqueue(**PLAIN, id=f"job{number}", max_tokens=1) for number in range(20)]
    own_queue.cancel(jobs[5])
    start_scripted()
    assert own_queue.wait(jobs[5]).terminal["code"] == "cancelled"
    eventually(lambda: own_queue.num_queued() == 19, "it to be settled")
    assert [job_id for job_id in jobs if state(own_queue, job_id)] == [jobs[5]]
    set_config(own_queue, paused="0")
    own_queue.assert_settled()


def test_a_drained_worker_hands_over_and_ends_with_0_and_no_other_does(
    start_scripted: StartScripted, own_queue: Queue
) -> None:
    first = start_scripted(shutdown_grace_s=0.2, step_ms=50, lease_ms=1500)
    job_id = own_queue.enqueue(**LONG | {"max_tokens": 300})
    eventually(lambda: is_begun(own_queue, job_id), "tokens to come")
    first_id = state(own_queue, job_id)["worker"]
    second = start_scripted(step_ms=1, lease_ms=1500)
    set_config(own_queue, **{f"drain__{first_id}": "1"})
    assert first.wait() == 0
    reply = own_queue.wait(job_id)
    assert len(reply.ids) == 300
    assert state(own_queue, job_id)["crashes"] == "0"
    assert state(own_queue, job_id)["worker"] != first_id
    assert own_queue.redis.hash(own_queue.keys.config) == {}, "no other worker has this name"
    assert second.process.poll() is None


def test_a_drain_hurries_no_stop_that_came_before(start_scripted: StartScripted, own_queue: Queue) -> None:
    worker = start_scripted(shutdown_grace_s=30, step_ms=10)
    job_id = own_queue.enqueue(**LONG | {"max_tokens": 150})
    eventually(lambda: is_begun(own_queue, job_id), "tokens to come")
    worker.signal(signal.SIGTERM)
    eventually(lambda: "worker_stopping" in [event["event"] for event in worker.events()], "the stop")
    set_config(own_queue, **{f"drain__{state(own_queue, job_id)['worker']}": "1"})
    assert worker.wait() == 0
    assert own_queue.reply(job_id).terminal["finish"] == "length"


def test_the_log_level_changes_while_the_worker_runs(scripted: tuple[ScriptedWorker, Queue]) -> None:
    worker, own_queue = scripted

    def num_debug() -> int:
        return sum(event.get("level") == "debug" for event in worker.events())

    own_queue.run(**PLAIN, max_tokens=1)
    assert num_debug() == 0
    set_config(own_queue, log_level="debug")
    eventually(lambda: bool(own_queue.run(**PLAIN, max_tokens=1)) and num_debug(), "debug events")
    own_queue.redis.call("HDEL", own_queue.keys.config, "log_level")
    set_config(own_queue, paused="1")
    eventually(lambda: is_told_paused(own_queue, "1"), "the config to be read")
    set_config(own_queue, paused="0")
    before = num_debug()
    own_queue.run(**PLAIN, max_tokens=1)
    assert num_debug() == before


def test_a_field_that_means_nothing_is_named_once(scripted: tuple[ScriptedWorker, Queue]) -> None:
    worker, own_queue = scripted
    set_config(own_queue, max_depth="many", pause="1")
    set_config(own_queue, paused="1")
    eventually(lambda: is_told_paused(own_queue, "1"), "the config to be read")
    # Another test may have left it paused: so the lines are waited for, too.
    eventually(lambda: len(worker.named("queue_config_ignored")) >= 2, "the fields to be named")
    set_config(own_queue, paused="0")
    eventually(lambda: is_told_paused(own_queue, "0"), "the config to be read again")
    told = worker.named("queue_config_ignored")
    assert sorted((event["field"], event["value"]) for event in told) == [("max_depth", "many"), ("pause", "1")]
    own_queue.redis.call("DEL", own_queue.keys.config)
    set_config(own_queue, paused="0")
    eventually(lambda: is_told_paused(own_queue, "0"), "the config to be read")


@pytest.mark.parametrize("by_config", [True, False])
def test_a_lane_that_is_too_long_is_shed_and_says_when_to_come_back(
    start_scripted: StartScripted, own_queue: Queue, by_config: bool
) -> None:
    start_scripted(max_num_seqs=1, max_queue_depth=1000 if by_config else 3)
    for _ in range(3):
        own_queue.run(**PLAIN, max_tokens=1)
    if by_config:
        set_config(own_queue, max_depth="3")
    running = own_queue.enqueue(**LONG)
    eventually(lambda: is_begun(own_queue, running), "tokens to come")
    waiting = [own_queue.enqueue(**PLAIN, id=f"job{number}", max_tokens=1) for number in range(5)]
    for job_id in waiting[:3]:
        terminal = own_queue.wait(job_id).terminal
        assert (terminal["code"], terminal["retryable"]) == ("overloaded", "1")
        details = json.loads(terminal["details"])
        assert details.keys() == {"retry_after_ms", "depth", "max_depth"}
        assert details["depth"] > details["max_depth"] == 3
        assert 1000 <= details["retry_after_ms"] <= 600_000
        assert "send it again" in terminal["message"]
    own_queue.cancel(running)
    for job_id in waiting[3:]:
        assert own_queue.wait(job_id).terminal["e"] == "end"
    own_queue.assert_settled()


def test_a_flood_of_one_tenant_keeps_no_other_waiting(scripted: tuple[ScriptedWorker, Queue]) -> None:
    _, own_queue = scripted
    command = ("XADD", own_queue.keys.jobs("normal"), "*", *_flat(PLAIN | {"max_tokens": 4, "tenant": "a"}))
    entries = own_queue.redis.pipeline(*[command] * 300)
    flood = [f"normal-{entry.decode()}" for entry in entries]
    eventually(lambda: state(own_queue, flood[8]), "some to have begun")
    job_id = own_queue.enqueue(**PLAIN, max_tokens=4, tenant="b")
    own_queue.wait(job_id)
    sent, opened = int(job_id.split("-")[1]), int(state(own_queue, job_id)["opened"])
    finished = [int(found["finished"]) for found in (state(own_queue, each) for each in flood) if "finished" in found]
    assert sum(sent < at < opened for at in finished) <= 2 * 4
    eventually(lambda: own_queue.num_queued() == 0, "all to be served")
    assert {state(own_queue, each)["status"] for each in flood} == {"done"}
    assert {state(own_queue, each)["crashes"] for each in flood} == {"0"}


def _flat(fields: dict[str, Any]) -> list[str]:
    return [str(part) for pair in fields.items() for part in pair]


def spans(queue: Queue, job_ids: list[str]) -> list[tuple[int, int]]:
    """From when to when each job ran, by the server's clock."""
    found = [state(queue, job_id) for job_id in job_ids]
    return [(int(each["opened"]), int(each["finished"])) for each in found]


def most_at_once(times: list[tuple[int, int]]) -> int:
    return max(sum(start <= at < end for start, end in times) for at, _ in times)


@pytest.mark.slow
def test_a_tenants_jobs_at_a_time_are_limited_over_all_workers(start_scripted: StartScripted, own_queue: Queue) -> None:
    """They wait and are not failed; others pass; none counts as a crash, though a worker is killed on the way."""
    set_config(own_queue, tenant__a__concurrency="2")
    first = start_scripted(lease_ms=600)
    start_scripted(lease_ms=600)
    job_ids = [own_queue.enqueue(**PLAIN, id=f"a{n}", max_tokens=40, tenant="a") for n in range(12)]
    free = [own_queue.enqueue(**PLAIN, id=f"b{n}", max_tokens=40, tenant="b") for n in range(6)]
    eventually(lambda: all("finished" in state(own_queue, job_id) for job_id in free), "the others to end")
    assert any(not state(own_queue, job_id) for job_id in job_ids), "the others passed"
    assert most_at_once(spans(own_queue, free)) > 2
    eventually(lambda: sum("finished" in state(own_queue, job_id) for job_id in job_ids) >= 2, "some to end")
    first.signal(signal.SIGKILL)
    for job_id in job_ids:
        assert own_queue.wait(job_id).terminal["e"] == "end"
    own_queue.assert_settled()
    undisturbed = [job_id for job_id in job_ids if state(own_queue, job_id)["crashes"] == "0"]
    assert len(undisturbed) >= 10, "two at most were with the worker that died"
    known = [job_id for job_id in undisturbed if "finished" in state(own_queue, job_id)]
    assert most_at_once(spans(own_queue, known)) <= 2


@pytest.mark.slow
def test_a_tenants_rate_is_kept_over_all_workers(start_scripted: StartScripted, own_queue: Queue) -> None:
    set_config(own_queue, tenant__a__rate="4")
    start_scripted()
    start_scripted()
    job_ids = [own_queue.enqueue(**PLAIN, id=f"a{n}", max_tokens=1, tenant="a") for n in range(9)]
    for job_id in job_ids:
        assert own_queue.wait(job_id).terminal["e"] == "end"
    own_queue.assert_settled()
    begun = sorted(start for start, _ in spans(own_queue, job_ids))
    for number, start_ms in enumerate(begun):
        # A second's worth at once, and one each 250 ms from then on.
        assert start_ms - begun[0] >= 250 * (number - 4) - 20


def test_a_tenant_beyond_its_limit_is_rejected_where_operators_say_so(
    scripted: tuple[ScriptedWorker, Queue],
) -> None:
    _, own_queue = scripted
    set_config(own_queue, tenant__r__concurrency="1", tenant__r__over="reject", paused="1")
    eventually(lambda: is_told_paused(own_queue, "1"), "the config to be read")
    set_config(own_queue, paused="0")
    running = own_queue.enqueue(**LONG, tenant="r")
    eventually(lambda: is_begun(own_queue, running), "tokens to come")
    terminal = own_queue.run(**PLAIN, max_tokens=1, tenant="r").terminal
    assert (terminal["code"], terminal["retryable"]) == ("rate_limited", "1")
    assert json.loads(terminal["details"]) == {"retry_after_ms": 1000, "limit": "concurrency", "tenant": "r"}
    assert own_queue.run(**PLAIN, max_tokens=1, tenant="b").terminal["e"] == "end"
    own_queue.cancel(running)
    own_queue.assert_settled()


def test_a_tenants_waiting_jobs_can_be_called_off_and_run_out_of_time(
    start_scripted: StartScripted, own_queue: Queue
) -> None:
    set_config(own_queue, tenant__a__concurrency="1")
    worker = start_scripted()
    running = own_queue.enqueue(**LONG, tenant="a")
    eventually(lambda: is_begun(own_queue, running), "tokens to come")
    own_queue.enqueue(**PLAIN, id="first", max_tokens=1, tenant="a")
    cancelled = own_queue.enqueue(**PLAIN, id="cancelled", tenant="a")
    overdue = own_queue.enqueue(**PLAIN, id="overdue", tenant="a", ttl_ms=300)
    assert own_queue.wait(overdue).field("details") == {"where": "queued"}
    own_queue.cancel(cancelled)
    assert own_queue.wait(cancelled).field("details") == {"where": "queued"}
    assert state(own_queue, "first") == {}
    own_queue.cancel(running)
    assert own_queue.wait("first").terminal["e"] == "end"
    own_queue.assert_settled()
    worker.wait_until_idle()


def test_a_wrong_clock_of_a_workers_machine_changes_nothing(start_scripted: StartScripted, own_queue: Queue) -> None:
    """Neither in time limits nor in the registry, the times of events or a tenant's rate."""
    set_config(own_queue, tenant__a__rate="100")
    start_scripted(clock_s=3600, lease_ms=1000)
    start_scripted(clock_s=-3600, lease_ms=1000)
    job_ids = [own_queue.enqueue(**PLAIN, max_tokens=3, ttl_ms=30_000, tenant="a") for _ in range(8)]
    for job_id in job_ids:
        reply = own_queue.wait(job_id)
        assert reply.terminal["e"] == "end"
        now_ms = int(own_queue.redis.call("TIME")[0]) * 1000
        for event_id, fields in reply.events:
            assert abs(int(fields["t"]) - now_ms) < 60_000
            assert abs(int(event_id.split("-")[0]) - now_ms) < 60_000
        assert 0 <= reply.field("receipt")["queue_ms"] < 60_000
    past = int(own_queue.redis.call("TIME")[0]) * 1000 - 1000
    assert own_queue.run(**PLAIN, deadline_ms=past).terminal["code"] == "deadline_exceeded"
    now_ms = int(own_queue.redis.call("TIME")[0]) * 1000
    assert len(beats(own_queue)) == 2
    for beat in beats(own_queue):
        assert abs(int(beat["started"]) - now_ms) < 60_000
