"""A worker whose steps overlap, from the queue to the reply."""

from typing import Any

from tests.e2e.conftest import StartWorker
from tests.e2e.workers import Queue, eventually

LONG: list[dict[str, Any]] = [
    {"prompt": "a long story", "max_tokens": 800, "temperature": 0, "ignore_eos": 1},
    {"prompt": "another one", "max_tokens": 800, "temperature": 1, "seed": 5, "ignore_eos": 1},
]


def test_a_killed_engine_whose_steps_overlap_is_replaced_and_what_was_in_flight_is_told_once(
    start_worker: StartWorker, own_queue: Queue
) -> None:
    """Undisturbed and one step after the other, in a worker of its own, the same jobs give the same tokens."""
    with start_worker(overlap_scheduling=False) as plain:
        plain.wait_until_ready()
        undisturbed = [own_queue.run(**fields) for fields in LONG]
    worker = start_worker(overlap_scheduling=True)
    worker.wait_until_ready()
    job_ids = [own_queue.enqueue(**fields) for fields in LONG]
    eventually(lambda: all(len(own_queue.reply(job_id).events) > 2 for job_id in job_ids), "tokens of both to come")
    worker.engine().kill()
    for job_id, expected in zip(job_ids, undisturbed, strict=True):
        reply = own_queue.wait(job_id)
        assert (len(reply.ids), reply.ids) == (800, expected.ids)
        assert reply.text == expected.text
    assert "engine_died" in [event["event"] for event in worker.events()]
    own_queue.assert_settled()
