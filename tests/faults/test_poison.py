"""Jobs that kill whatever computes them: they alone end by it, and their fellows say what they would have said."""

import contextlib
import itertools
import json
import random
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.workers import Queue, Reply, eventually
from tests.faults.scripted_process import ScriptedProcess
from tests.unit.scheduler.fake_runner import generate
from worker.streams.keys import QueueKeys

Start = Callable[..., ScriptedProcess]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": 1}


@pytest.fixture
def queue(valkey_url: str) -> Iterator[Queue]:
    """A queue of the test's own."""
    queue = Queue(valkey_url, QueueKeys(f"q{uuid.uuid4().hex[:12]}"))
    yield queue
    queue.close()


@pytest.fixture
def start(valkey_url: str, queue: Queue, tiny_model: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts workers of that queue; they are stopped at the end."""
    with contextlib.ExitStack() as workers:

        def start(**settings: Any) -> ScriptedProcess:
            worker = ScriptedProcess(tiny_model, valkey_url, queue.keys.queue, tmp_path, **settings)
            return workers.enter_context(worker)

        yield start


def job(job_id: str, num_tokens: int = 60) -> dict[str, Any]:
    """The fields of a job whose prompt is its id, byte by byte."""
    return {"id": job_id, "tokens": json.dumps(list(job_id.encode())), "max_tokens": num_tokens, **GREEDY}


def send_batch(queue: Queue, job_ids: list[str], num_tokens: int = 60) -> None:
    """All at once."""
    entries = [[part for pair in job(job_id, num_tokens).items() for part in pair] for job_id in job_ids]
    queue.redis.pipeline(*(("XADD", queue.keys.jobs("normal"), "*", *flat) for flat in entries))


def check_good(queue: Queue, job_id: str, num_tokens: int = 60) -> Reply:
    """The reply of a good job is what it would be without any death, each token once."""
    reply = queue.wait(job_id)
    assert reply.terminal["e"] == "end", reply.terminal
    assert reply.ids == generate("", job_id.encode(), num_tokens)
    return reply


def check_poison(queue: Queue, job_id: str) -> dict[str, str]:
    """The reply of a poison ends by it, and its entry is kept; answers the dead letter."""
    terminal = queue.wait(job_id).terminal
    assert (terminal["e"], terminal["code"], terminal["retryable"]) == ("error", "poison", "0")
    assert json.loads(terminal["details"])["solo"] == 2
    letters = [letter for letter in dead_letters(queue) if letter["id"] == job_id]
    assert [letter["error"] for letter in letters] == ["poison"]
    return letters[0]


def dead_letters(queue: Queue) -> list[dict[str, str]]:
    return [fields for _, fields in queue.redis.events(queue.keys.dead)]


def record(queue: Queue, job_id: str) -> dict[str, str]:
    return queue.redis.hash(queue.keys.state(job_id))


@pytest.mark.parametrize("deed", ["engine-at-7", "abort-at-0"])
def test_fifteen_good_jobs_finish_and_the_poison_among_them_kills_three_engines(
    start: Start, queue: Queue, deed: str
) -> None:
    worker = start(metrics_port=0, step_ms=20)
    info = worker.wait_until_ready()
    good, poison = [f"good-{number}" for number in range(15)], f"{deed}-x"
    send_batch(queue, [*good[:8], poison, *good[8:]])
    letter = check_poison(queue, poison)
    for job_id in good:
        check_good(queue, job_id)
    queue.assert_settled()
    deaths = worker.named("engine_died")
    assert [death["end"] for death in deaths] == ["signal"] * 3
    assert ("SIGABRT" if deed.startswith("abort") else "SIGKILL") in deaths[0]["error"]
    assert [record["id"] for record in dead_letters(queue)] == [poison]
    assert letter["source_id"].startswith("normal/")
    assert (letter["deliveries"], letter["workers"]) == ("1", info["worker_id"])
    assert record(queue, poison)["status"] == "poison"
    assert record(queue, poison)["crashes"] == "3"
    assert all(record(queue, job_id)["crashes"] in ("0", "1") for job_id in good), "blamed for what it had no part in"
    page = worker.get("/metrics")[1]
    assert 'pagemill_engine_deaths_total{end="signal"} 3.0' in page
    assert "pagemill_engine_restarts_total 3.0" in page
    assert "pagemill_jobs_suspect 0.0" in page


def test_several_poisons_of_all_kinds_at_once(start: Start, queue: Queue) -> None:
    worker = start(step_ms=20)
    worker.wait_until_ready()
    good = [f"good-{number}" for number in range(10)]
    poisons = ["exit-at-3-a", "error-at-12-b", "engine-at-1-c"]
    send_batch(queue, [*good[:5], *poisons, *good[5:]])
    for job_id in poisons:
        check_poison(queue, job_id)
    for job_id in good:
        check_good(queue, job_id)
    queue.assert_settled()
    assert sorted(letter["id"] for letter in dead_letters(queue)) == sorted(poisons)
    assert len(worker.named("engine_died")) <= 3 * len(poisons)
    assert {"exit", "error", "signal"} <= {death["end"] for death in worker.named("engine_died")}


def test_jobs_that_only_waited_have_no_crash(start: Start, queue: Queue) -> None:
    """The engine says whom it computes: the pool is too small for all of them at a time."""
    worker = start(step_ms=10, num_kv_blocks=12)
    worker.wait_until_ready()
    queue.enqueue(**job("long", 150))
    eventually(lambda: queue.reply("long").ids, "tokens to come")
    queue.enqueue(**job("waits", 150))
    eventually(lambda: record(queue, "waits"), "the other job to be taken")
    worker.engine().kill()
    check_good(queue, "long", 150)
    check_good(queue, "waits", 150)
    assert [entry["request_id"] for entry in worker.named("job_blamed")] == ["long"]


def test_new_jobs_are_served_while_suspects_wait_for_their_turns(start: Start, queue: Queue) -> None:
    worker = start(step_ms=20)
    worker.wait_until_ready()
    send_batch(queue, [*(f"good-{number}" for number in range(6)), "engine-at-2-x"])
    eventually(lambda: worker.named("engine_died"), "the first death")
    for number in itertools.count():
        queue.enqueue(**job(f"new-{number}", 5))
        check_good(queue, f"new-{number}", 5)
        if queue.reply("engine-at-2-x").events[-1][1]["e"] == "error":
            break
    check_poison(queue, "engine-at-2-x")
    for number in range(6):
        check_good(queue, f"good-{number}")
    assert len(worker.named("engine_died")) == 3


def test_a_poison_that_takes_its_worker_along_is_found_across_workers(start: Start, queue: Queue) -> None:
    """Each is killed whole. Whoever is left to serve the rest sees it in the record."""
    good, poison = [f"good-{number}" for number in range(5)], "worker-at-3-x"
    send_batch(queue, [*good[:3], poison, *good[3:]], num_tokens=30)
    workers: list[ScriptedProcess] = []
    while not queue.reply(poison).events or queue.reply(poison).events[-1][1]["e"] != "error":
        living = [worker for worker in workers if worker.process.poll() is None]
        if len(living) < 2:
            workers.append(start(step_ms=20, lease_ms=500))
        time.sleep(0.02)
    letter = check_poison(queue, poison)
    for job_id in good:
        check_good(queue, job_id, 30)
    queue.assert_settled()
    killed = [worker for worker in workers if worker.process.poll() == -signal.SIGKILL]
    assert len(killed) == 3
    names = {worker.wait_until_ready()["worker_id"] if worker not in killed else None for worker in workers} - {None}
    assert int(letter["deliveries"]) == 4
    assert len(letter["workers"].split(",")) == 4
    assert letter["workers"].split(",")[-1] in names
    assert [found["id"] for found in dead_letters(queue)] == [poison]


def test_a_poison_that_hangs_is_found_by_the_watchdogs_of_two_workers(start: Start, queue: Queue) -> None:
    """Its fellows are a peer's meanwhile, and a worker whose engine hung is as good as new."""
    workers = [start(step_ms=10, watchdog_s=1, lease_ms=5000) for _ in "ab"]
    for worker in workers:
        worker.wait_until_ready()
    good, poison = [f"good-{number}" for number in range(6)], "hang-at-2-x"
    send_batch(queue, [*good[:3], poison, *good[3:]])
    check_poison(queue, poison)
    for job_id in good:
        check_good(queue, job_id)
    queue.assert_settled()
    deaths = [death for worker in workers for death in worker.named("engine_died")]
    assert [death["end"] for death in deaths] == ["hung"] * 3
    assert all(len(worker.named("engine_hung")) == len(worker.named("engine_died")) for worker in workers)
    eventually(lambda: all(worker.engine() for worker in workers), "both to be well again")


def test_nobody_is_convicted_where_engines_are_killed_from_outside(start: Start, queue: Queue) -> None:
    """At random, but not as fast as an engine starts: so many jobs are innocent of as many deaths."""
    seed = random.randrange(10**6)
    sys.stdout.write(f"seed {seed}\n")
    rng = random.Random(seed)
    workers = [start(step_ms=rng.choice((5, 15))) for _ in "ab"]
    for worker in workers:
        worker.wait_until_ready()
    good = [f"good-{number}" for number in range(40)]
    send_batch(queue, good, num_tokens=100)
    for _ in range(6):
        time.sleep(rng.uniform(0.2, 0.6))
        victim = rng.choice(workers)
        with contextlib.suppress(StopIteration, psutil.NoSuchProcess):
            victim.engine().kill()
    for job_id in good:
        check_good(queue, job_id, 100)
    queue.assert_settled()
    assert dead_letters(queue) == []
    assert sum(len(worker.named("engine_died")) for worker in workers) >= 2
