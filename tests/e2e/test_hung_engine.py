"""An engine that stands still while it has work: its jobs go to a peer, and the worker gets another engine."""

from typing import Any

from tests.e2e.conftest import StartWorker
from tests.e2e.workers import Queue, eventually

LONG: dict[str, Any] = {"prompt": "a long story", "max_tokens": 600, "temperature": 0, "ignore_eos": 1}
# A peer that has just connected claims nothing for a third of a lease.
HASTY: dict[str, Any] = {"watchdog_s": 2, "lease_ms": 3000, "metrics_port": 0}


def test_a_step_that_does_not_end_costs_the_engine_its_life_and_a_peer_takes_the_job(
    start_worker: StartWorker, own_queue: Queue
) -> None:
    """The limit is 60 s by default: the time since the last step while there is work, and no more."""
    workers = {worker.wait_until_ready()["worker_id"]: worker for worker in [start_worker(**HASTY) for _ in "ab"]}
    job_id = own_queue.enqueue(**LONG)
    eventually(lambda: own_queue.reply(job_id).ids, "tokens to come")
    hung_id = own_queue.reply(job_id).events[0][1]["worker"]
    hung = workers.pop(hung_id)
    engine = hung.engine()
    engine.suspend()
    eventually(lambda: hung.get("/readyz")[0] == 503, "the worker to be without an engine")
    reply = own_queue.wait(job_id)
    assert [fields["worker"] for _, fields in reply.events if fields["e"] == "open"] == [hung_id, *workers]
    assert own_queue.redis.hash(own_queue.keys.state(job_id))["crashes"] == "1"
    eventually(lambda: hung.get("/readyz")[0] == 200, "the worker to be well again")
    assert not engine.is_running()
    assert [event["event"] for event in hung.events() if event["event"].startswith("engine_")] == [
        "engine_hung",
        "engine_died",
        "engine_restarted",
    ]
    own_queue.assert_settled()
    assert own_queue.reply(job_id).events == reply.events, "who was fenced has written"
    assert reply.ids == own_queue.run(**LONG).ids
