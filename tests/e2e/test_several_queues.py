"""Worker processes that serve several queues with one engine, whose model is a made-up one that starts at once."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from model.tokenizer import Tokenizer
from tests.e2e.workers import Queue, Reply, WorkerProcess, eventually, fresh_keys
from tests.faults.scripted import ScriptedWorker
from tests.faults.scripted_worker import make_engine
from tests.unit.scheduler.fake_runner import generate
from worker.service import Service
from worker.settings import load_settings, served_name
from worker.streams.keys import LANES, QueueKeys

# A step so slow that a long job is not done before its worker is stopped.
SLOW_MS = 100
Start = Callable[..., WorkerProcess]


@pytest.fixture
def queues(valkey_url: str) -> Iterator[list[Queue]]:
    """Clients of three queues that no other test uses."""
    prefix = fresh_keys().queue
    clients = [Queue(valkey_url, QueueKeys(f"{prefix}.{number}")) for number in range(3)]
    yield clients
    for client in clients:
        client.close()


@pytest.fixture
def start(tiny_model: Path, valkey_url: str, queues: list[Queue], tmp_path: Path) -> Iterator[Start]:
    """Starts workers of the first so many queues; all are stopped at the end."""
    workers: list[WorkerProcess] = []

    def start(num_queues: int, step_ms: int = 5) -> WorkerProcess:
        worker = ScriptedWorker(
            *(tiny_model, valkey_url, ",".join(queue.keys.queue for queue in queues[:num_queues]), tmp_path),
            step_ms=step_ms,
            lease_ms=1000,
            heartbeat_ms=500,
            shutdown_grace_s=0.2,
            metrics_port=0,
        )
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        worker.__exit__(None, None, None)


def assert_exact(reply: Reply, tiny_model: Path, prompt: str, num_tokens: int) -> None:
    """The reply is what the made-up model says to the prompt, token for token."""
    tokenizer = Tokenizer.from_checkpoint(tiny_model)
    expected = generate("", tokenizer.encode(prompt), num_tokens)
    assert reply.terminal["e"] == "end", reply.terminal
    assert reply.ids == expected
    assert reply.text == tokenizer.decode(expected)


def enqueue(queue: Queue, lane: str = "normal", num_tokens: int = 12, **fields: str) -> str:
    job = {"temperature": 0, "max_tokens": num_tokens, "ignore_eos": 1} | fields
    return queue.enqueue(lane, **job)


def test_one_worker_serves_three_queues_with_one_engine(start: Start, queues: list[Queue], tiny_model: Path) -> None:
    """The same ids in each. One lane of the first queue is no stream, which concerns nobody else."""
    queues[0].redis.call("SET", queues[0].keys.jobs("high"), "no stream")
    worker = start(3)
    for number, queue in enumerate(queues):
        for lane in LANES:
            if queue.redis.call("TYPE", queue.keys.jobs(lane)) != b"string":
                enqueue(queue, lane, id=f"same-{lane}", prompt=f"{lane} of {number}")
    for number, queue in enumerate(queues):
        for lane in LANES[number == 0 :]:
            assert_exact(queue.wait(f"same-{lane}"), tiny_model, f"{lane} of {number}", 12)
    assert worker.wait_until_ready()["queue"] == ",".join(queue.keys.queue for queue in queues)
    assert len({event["engine_pid"] for event in worker.events() if "engine_pid" in event}) == 1
    queues[0].redis.call("DEL", queues[0].keys.jobs("high"))
    assert_exact(queues[0].wait(enqueue(queues[0], "high", prompt="put right")), tiny_model, "put right", 12)
    for queue in queues:
        queue.assert_settled()
    assert_each_queue_is_told_of(worker, queues)
    assert_names_of_the_model(queues, tiny_model)


def assert_each_queue_is_told_of(worker: WorkerProcess, queues: list[Queue]) -> None:
    """In the registry, in the metrics and in the log."""
    names = [queue.keys.queue for queue in queues]
    for queue in queues:
        done = f'pagemill_jobs_total{{outcome="done",queue="{queue.keys.queue}"}} 3.0'
        # The server knows that a job is settled before the worker hears so, and counts it.
        eventually(lambda done=done: done in worker.get("/metrics")[1], "the jobs to be counted")  # type: ignore[misc]
    settled = worker.named("job_settled")
    for queue in queues:
        (worker_id,) = queue.redis.call("ZRANGE", queue.keys.workers, 0, -1)
        assert queue.redis.hash(queue.keys.worker(worker_id.decode()))["queues"] == ",".join(names)
        ids = {event["request_id"] for event in settled if event["queue"] == queue.keys.queue}
        assert {"same-normal", "same-low"} <= ids


def assert_names_of_the_model(queues: list[Queue], tiny_model: Path) -> None:
    """Each queue answers to the model's name and to its own, and to no other's."""
    for queue in queues:
        for name in (served_name(str(tiny_model)), queue.keys.queue):
            assert queue.wait(enqueue(queue, prompt="x", model=name)).terminal["e"] == "end"
    wrong = enqueue(queues[0], prompt="x", model=queues[1].keys.queue)
    assert queues[0].wait(wrong).terminal["code"] == "model_not_found"


async def test_a_queue_of_another_name_answers_to_the_name_that_the_model_was_asked_for_by(
    queues: list[Queue], tiny_model: Path, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to that of the file, which is somewhere in a cache where the model had to be fetched."""
    monkeypatch.setenv("PAGEMILL_STEP_MS", "0")
    queue = queues[0]
    settings = load_settings({"model": "smollm2", "queue": queue.keys.queue, "redis_url": valkey_url})
    service = Service(settings, model_path=tiny_model, make_engine=make_engine)
    serving = asyncio.create_task(service.run())
    for name, kind in (("smollm2", "end"), (queue.keys.queue, "end"), (tiny_model.name, "error")):
        reply = await asyncio.to_thread(queue.wait, enqueue(queue, prompt="x", model=name))
        assert reply.terminal["e"] == kind
        assert reply.events[0][1]["model"] == "smollm2"
    service.stop()
    await serving


def test_two_workers_of_two_queues_take_over_from_each_other(
    start: Start, queues: list[Queue], tiny_model: Path
) -> None:
    """The first hands over the jobs of both queues when it is told to stop; the second is killed."""
    num_tokens, pair = 150, queues[:2]
    first = start(2, SLOW_MS)
    first.wait_until_ready()
    for number, queue in enumerate(pair):
        enqueue(queue, id="long", prompt=f"long of {number}", num_tokens=num_tokens)
    wait_for_attempts(pair, 1)
    second = start(2, SLOW_MS)
    second.wait_until_ready()
    first.signal(signal.SIGTERM)
    assert first.wait() == 0
    handed = [event["queue"] for event in first.named("job_handed_over")]
    assert sorted(handed) == [queue.keys.queue for queue in pair]
    wait_for_attempts(pair, 2)
    third = start(2)
    third.wait_until_ready()
    second.signal(signal.SIGKILL)
    second.wait()
    for number, queue in enumerate(pair):
        reply = queue.wait("long")
        assert_exact(reply, tiny_model, f"long of {number}", num_tokens)
        assert reply.field("receipt")["attempts"] == 3
        queue.assert_settled()


def wait_for_attempts(queues: list[Queue], num: int) -> None:
    """Until the last of so many attempts has brought a token in each queue."""

    def is_under_way(queue: Queue) -> bool:
        kinds = [fields["e"] for _, fields in queue.reply("long").events]
        return kinds.count("open") == num and kinds[-1] == "token"

    eventually(lambda: all(map(is_under_way, queues)), f"{num} attempts")
