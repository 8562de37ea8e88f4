"""A worker whose KV cache has 50 blocks of 16: who is refused, who is swapped, and what shows of it from outside."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.workers import Queue, Reply, WorkerProcess, eventually, fresh_keys

NUM_BLOCKS = 50
# Two such jobs begin side by side, and half way there is room for one of them only: the second gives way.
NUM_NEW_TOKENS = 740
# Penalties follow from all tokens of a job, so a swap must not change them.
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": 1, "repetition_penalty": 1.2, "frequency_penalty": 0.1}


@pytest.fixture(scope="module")
def served(
    tiny_model: Path, start_server: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[WorkerProcess, Queue]]:
    """A worker that swaps, and its queue: shared by the tests of this module."""
    url = start_server("valkey-9.1")
    queue = Queue(url, fresh_keys())
    settings = {"num_kv_blocks": NUM_BLOCKS, "num_swap_blocks": NUM_BLOCKS, "preemption_mode": "swap"}
    logs = tmp_path_factory.mktemp("logs")
    with WorkerProcess(tiny_model, url, queue.keys.queue, logs, metrics_port=0, **settings) as worker:
        worker.wait_until_ready()
        yield worker, queue
    queue.close()


def prompt_of(seed: int, num_tokens: int) -> str:
    """Random token ids, as the field `tokens` has them."""
    rng = random.Random(seed)
    return json.dumps([rng.randrange(256) for _ in range(num_tokens)])


LONG: dict[str, Any] = {"tokens": prompt_of(1, 40), "max_tokens": NUM_NEW_TOKENS, **GREEDY}


@pytest.fixture(scope="module")
def undisturbed(served: tuple[WorkerProcess, Queue]) -> Reply:
    """What LONG gives on its own."""
    return served[1].run(**LONG)


def enough_ms(undisturbed: Reply) -> int:
    """A time in which LONG is half done and swapped, however busy the machine is."""
    return 4 * int(undisturbed.field("receipt")["decode_ms"])


def metric(worker: WorkerProcess, name: str) -> float:
    """The value of one series."""
    lines = worker.get("/metrics")[1].splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(name)))


def expect_nothing_left(worker: WorkerProcess, queue: Queue) -> None:
    """The queue is settled, and both tiers have their blocks back."""
    queue.assert_settled()
    names = ('pagemill_kv_blocks{state="used"}', 'pagemill_swap_blocks{state="used"}')
    eventually(lambda: [metric(worker, name) for name in names] == [0, 0], "all blocks of both tiers to be free")


class Pair:
    """LONG and another job, which has been swapped; and an engine that stands still since then."""

    def __init__(self, worker: WorkerProcess, queue: Queue, **second: Any) -> None:
        self.queue = queue
        self.first = queue.enqueue(**LONG)
        eventually(lambda: queue.reply(self.first).ids, "the first tokens")
        self.second = queue.enqueue(tokens=prompt_of(2, 20), max_tokens=NUM_NEW_TOKENS, **GREEDY, **second)
        eventually(lambda: metric(worker, "pagemill_sequences_swapped") == 1, "the second to be swapped")
        self.engine: psutil.Process = worker.engine()
        self.engine.suspend()
        assert queue.reply(self.first).events[-1][1]["e"] == "token", "the first ended before the engine stood still"

    def finish(self) -> Reply:
        """The engine goes on; the reply of the first job."""
        self.engine.resume()
        return self.queue.wait(self.first)


def test_prompts_that_can_never_fit_are_refused_by_name_and_the_worker_serves_on(
    served: tuple[WorkerProcess, Queue],
) -> None:
    """Five prompts of 1,002 tokens, 63 blocks each; and one whose reply would outgrow the pool on its own."""
    worker, queue = served
    jobs = [queue.enqueue(tokens=prompt_of(number, 1002), max_tokens=1) for number in range(5)]
    jobs.append(queue.enqueue(tokens=prompt_of(5, 700), max_tokens=101))
    for job_id in jobs:
        terminal = queue.wait(job_id).terminal
        assert (terminal["e"], terminal["code"]) == ("error", "context_too_long")
    assert len(queue.run(tokens=prompt_of(6, 700), max_tokens=100, **GREEDY).ids) == 100
    expect_nothing_left(worker, queue)


def test_a_swapped_job_is_cancelled(served: tuple[WorkerProcess, Queue], undisturbed: Reply) -> None:
    worker, queue = served
    pair = Pair(worker, queue)
    queue.cancel(pair.second)
    reply = queue.wait(pair.second)
    assert (reply.terminal["code"], json.loads(reply.terminal["details"])) == ("cancelled", {"where": "running"})
    assert 0 < len(reply.ids) < NUM_NEW_TOKENS
    assert pair.finish().ids == undisturbed.ids
    expect_nothing_left(worker, queue)


def test_a_swapped_job_ends_at_its_deadline(served: tuple[WorkerProcess, Queue], undisturbed: Reply) -> None:
    worker, queue = served
    pair = Pair(worker, queue, ttl_ms=enough_ms(undisturbed))
    reply = queue.wait(pair.second)
    assert reply.terminal["code"] == "deadline_exceeded"
    assert json.loads(reply.terminal["details"]) == {"where": "running"}
    assert 0 < len(reply.ids) < NUM_NEW_TOKENS
    assert pair.finish().ids == undisturbed.ids
    expect_nothing_left(worker, queue)


def test_a_job_that_decodes_ends_at_its_deadline_and_what_it_has_told_stands(
    served: tuple[WorkerProcess, Queue], undisturbed: Reply
) -> None:
    worker, queue = served
    job_id = queue.enqueue(**LONG, ttl_ms=enough_ms(undisturbed))
    eventually(lambda: queue.reply(job_id).ids, "tokens to come")
    engine = worker.engine()
    engine.suspend()
    reply = queue.wait(job_id)
    engine.resume()
    assert reply.terminal["code"] == "deadline_exceeded"
    assert json.loads(reply.terminal["details"]) == {"where": "running"}
    assert 0 < len(reply.ids) < NUM_NEW_TOKENS
    assert reply.ids == undisturbed.ids[: len(reply.ids)]
    expect_nothing_left(worker, queue)


def test_a_preemption_shows_in_the_log_in_the_metrics_and_in_the_receipt(served: tuple[WorkerProcess, Queue]) -> None:
    worker, queue = served
    before = metric(worker, 'pagemill_preemptions_total{mode="swap"}')
    num_lines = len(told(worker))
    pair = Pair(worker, queue)
    assert pair.finish().field("receipt")["preemptions"] == 0
    receipt = queue.wait(pair.second).field("receipt")
    assert receipt["preemptions"] > 0
    assert receipt["swapped_bytes"] > 0
    assert receipt["recomputed_tokens"] == 0
    num_swapped = metric(worker, 'pagemill_preemptions_total{mode="swap"}') - before
    assert num_swapped == receipt["preemptions"]
    lines = told(worker)[num_lines:]
    assert [(line["num_swapped"], line["num_recomputed"]) for line in lines] == [(1, 0)] * int(num_swapped)


def told(worker: WorkerProcess) -> list[dict[str, Any]]:
    """The log's lines about preemptions."""
    return worker.named("sequences_preempted")


def test_cached_tokens_are_told_and_another_tenant_has_none(served: tuple[WorkerProcess, Queue]) -> None:
    _, queue = served
    job = {"tokens": prompt_of(7, 100), "max_tokens": 3, **GREEDY}
    cached = [
        queue.run(**job, **tenant).field("usage")["cached_tokens"]
        for tenant in ({"tenant": "a"}, {"tenant": "a"}, {"tenant": "b"}, {"tenant": "b"}, {})
    ]
    assert cached == [0, 96, 0, 96, 0]
