"""An engine that stands still while it has work: the worker says so, loses its jobs, and is well again afterwards."""

import json
from typing import Any

from tests.e2e.conftest import StartWorker
from tests.e2e.workers import Queue, eventually

LONG: dict[str, Any] = {"prompt": "a long story", "max_tokens": 600, "temperature": 0, "ignore_eos": 1}
HASTY: dict[str, Any] = {"watchdog_s": 1, "lease_ms": 1500, "metrics_port": 0}


def test_a_step_that_does_not_end_is_unhealthy_and_a_peer_takes_the_job(
    start_worker: StartWorker, own_queue: Queue
) -> None:
    """The limit is 60 s by default. Health is the time since the last step while there is work, and no more."""
    workers = {worker.wait_until_ready()["worker_id"]: worker for worker in [start_worker(**HASTY) for _ in "ab"]}
    job_id = own_queue.enqueue(**LONG)
    eventually(lambda: own_queue.reply(job_id).ids, "tokens to come")
    hung_id = own_queue.reply(job_id).events[0][1]["worker"]
    hung = workers.pop(hung_id)
    engine = hung.engine()
    engine.suspend()
    status, body = eventually(lambda: unhealthy(hung.get("/healthz")), "the worker to be unhealthy")
    assert status == 503
    assert json.loads(body)["reason"].startswith("no step for ")
    assert hung.get("/readyz")[0] == 503
    reply = own_queue.wait(job_id)
    assert [fields["worker"] for _, fields in reply.events if fields["e"] == "open"] == [hung_id, *workers]
    engine.resume()
    eventually(lambda: hung.get("/healthz")[0] == 200, "the worker to be well again")
    own_queue.assert_settled()
    assert own_queue.reply(job_id).events == reply.events, "who was fenced has written"
    assert reply.ids == own_queue.run(**LONG).ids


def unhealthy(answer: tuple[int, str]) -> tuple[int, str] | None:
    """The answer, once it isn't well."""
    return None if answer[0] == 200 else answer
