"""Jobs that kill whatever computes them: they alone end by it, and their fellows say what they would have said."""

import contextlib
import itertools
import json
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.workers import Queue, Reply, eventually
from tests.faults.scripted import ScriptedWorker
from tests.faults.scripted_worker import READER_ENDS
from tests.unit.scheduler.fake_runner import generate

Start = Callable[..., ScriptedWorker]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": 1}
SETTINGS: dict[str, Any] = {"num_kv_blocks": 256, "lease_ms": 1000, "heartbeat_ms": 500}


@pytest.fixture
def start(valkey_url: str, queue: Queue, tiny_model: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts workers of that queue; they are stopped at the end."""
    with contextlib.ExitStack() as workers:

        def start(**settings: Any) -> ScriptedWorker:
            worker = ScriptedWorker(tiny_model, valkey_url, queue.keys.queue, tmp_path, **SETTINGS | settings)
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


def test_fifteen_good_jobs_finish_and_the_poison_among_them_kills_three_engines(start: Start, queue: Queue) -> None:
    worker = start(metrics_port=0, step_ms=20)
    info = worker.wait_until_ready()
    good, poison = [f"good-{number}" for number in range(15)], "engine-at-7-x"
    send_batch(queue, [*good[:8], poison, *good[8:]])
    letter = check_poison(queue, poison)
    for job_id in good:
        check_good(queue, job_id)
    queue.assert_settled()
    deaths = worker.named("engine_died")
    assert [death["end"] for death in deaths] == ["signal"] * 3
    assert deaths[0]["error"].startswith("the engine process was ended by signal 9 (SIGKILL)")
    assert [found["id"] for found in dead_letters(queue)] == [poison]
    assert letter["source_id"].startswith("normal/")
    assert (letter["deliveries"], letter["workers"]) == ("1", info["worker_id"])
    assert record(queue, poison)["status"] == "poison"
    assert record(queue, poison)["crashes"] == "3"
    assert all(record(queue, job_id)["crashes"] in ("0", "1") for job_id in good), "blamed for what it had no part in"
    restarts = "pagemill_engine_restarts_total 3.0"
    eventually(lambda: restarts in worker.get("/metrics")[1], "the last engine to stand")
    page = worker.get("/metrics")[1]
    assert 'pagemill_engine_deaths_total{end="signal"} 3.0' in page
    assert "pagemill_jobs_suspect 0.0" in page


def test_several_poisons_of_all_kinds_at_once(start: Start, queue: Queue) -> None:
    worker = start(step_ms=20)
    worker.wait_until_ready()
    good = [f"good-{number}" for number in range(10)]
    poisons = ["exit-at-3-a", "error-at-12-b", "abort-at-0-c"]
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
    """The engine says whom it computes. Here the pool has no room for a second prompt while the first job runs."""
    worker = start(step_ms=20, num_kv_blocks=12, heartbeat_ms=100)
    worker_id = worker.wait_until_ready()["worker_id"]
    queue.enqueue(**job("long", 150))
    eventually(lambda: len(queue.reply("long").ids) > 40, "half the pool to be taken")
    prompt = list(range(150))
    queue.enqueue(**job("waits", 20) | {"tokens": json.dumps(prompt)})
    eventually(lambda: queue.redis.hash(queue.keys.worker(worker_id))["waiting"] == "1", "the second to wait")
    worker.engine().kill()
    check_good(queue, "long", 150)
    assert queue.wait("waits").ids == generate("", prompt, 20)
    assert [entry["request_id"] for entry in worker.named("job_blamed")] == ["long"]
    assert record(queue, "waits")["crashes"] == "0"


@pytest.mark.slow
def test_new_jobs_are_served_while_suspects_wait_for_their_turns(start: Start, queue: Queue) -> None:
    worker = start(step_ms=20)
    worker.wait_until_ready()
    send_batch(queue, [*(f"good-{number}" for number in range(6)), "engine-at-2-x"])
    eventually(lambda: worker.named("engine_died"), "the first death")
    for number in itertools.count():
        queue.enqueue(**job(f"new-{number}", 5))
        check_good(queue, f"new-{number}", 5)
        if has_ended(queue, "engine-at-2-x"):
            break
    check_poison(queue, "engine-at-2-x")
    for number in range(6):
        check_good(queue, f"good-{number}")
    assert len(worker.named("engine_died")) == 3


def test_a_poison_that_takes_its_worker_along_is_found_across_workers(start: Start, queue: Queue) -> None:
    """Each is killed whole. Whoever is left to serve the rest sees it in the record."""
    good, poison = [f"good-{number}" for number in range(5)], "worker-at-3-x"
    send_batch(queue, [*good[:3], poison, *good[3:]], num_tokens=30)
    workers = serve_until_ended(start, queue, poison, num_living=2)
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


@pytest.mark.slow
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
    eventually(lambda: all(engine_of(worker) for worker in workers), "both to be well again")


def test_leases_live_on_while_an_engine_starts_again_for_longer_than_the_watchdog_waits(
    start: Start, queue: Queue
) -> None:
    """A peer that is idle all the time never gets the job."""
    workers = [start(step_ms=20, start_ms=1500, watchdog_s=0.5, lease_ms=500) for _ in "ab"]
    for worker in workers:
        worker.wait_until_ready()
    queue.enqueue(**job("long", 50))
    eventually(lambda: queue.reply("long").ids, "tokens to come")
    holder = next(worker for worker in workers if holds(queue, worker, "long"))
    holder.engine().kill()
    reply = check_good(queue, "long", 50)
    assert [fields["e"] for _, fields in reply.events].count("open") == 1
    assert [death["end"] for death in holder.named("engine_died")] == ["signal"]
    assert holder.named("engine_hung") == []


def holds(queue: Queue, worker: ScriptedWorker, job_id: str) -> bool:
    """Whether the job's record names that worker."""
    return bool(record(queue, job_id)["worker"] == worker.wait_until_ready()["worker_id"])


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
        if (engine := engine_of(victim)) is not None:
            engine.kill()
    for job_id in good:
        check_good(queue, job_id, 100)
    queue.assert_settled()
    assert dead_letters(queue) == []
    assert sum(len(worker.named("engine_died")) for worker in workers) >= 2


@pytest.mark.slow
def test_a_prompt_that_ends_whoever_reads_it_is_found_too(start: Start, queue: Queue) -> None:
    """It never gets as far as an engine. A suspect is alone from before it is looked at."""
    poison = queue.enqueue(id="unreadable", prompt=READER_ENDS, max_tokens=5, **GREEDY)
    good = [f"good-{number}" for number in range(4)]
    send_batch(queue, good, num_tokens=30)
    workers = serve_until_ended(start, queue, poison, num_living=1)
    letter = check_poison(queue, poison)
    for job_id in good:
        check_good(queue, job_id, 30)
    queue.assert_settled()
    assert [worker.process.poll() for worker in workers] == [-signal.SIGKILL] * 3 + [None]
    assert int(letter["deliveries"]) == 4


@pytest.mark.parametrize(("deliveries", "code"), [(9, None), (10, "poison")])
def test_an_entry_that_ten_workers_were_given_and_nobody_opened_is_kept_and_not_run(
    start: Start, queue: Queue, deliveries: int, code: str | None
) -> None:
    """What merely reads it may end by it, before anybody could count."""
    lane = queue.keys.jobs("normal")
    job_id = queue.enqueue(**job("often", 5))
    queue.redis.call("XGROUP", "CREATE", lane, "workers", "0")
    ((_, ((entry_id, _),)),) = queue.redis.call("XREADGROUP", "GROUP", "workers", "dead", "STREAMS", lane, ">")
    claim = ("XCLAIM", lane, "workers", "dead", 0, entry_id, "IDLE", 99_999, "RETRYCOUNT", deliveries)
    queue.redis.call(*claim, "JUSTID")
    start()
    assert queue.wait(job_id).terminal.get("code") == code
    queue.assert_settled()
    letters = [(letter["error"], letter["deliveries"]) for letter in dead_letters(queue)]
    assert letters == ([] if code is None else [(code, str(deliveries + 1))])


def test_suspects_that_wait_for_their_turn_are_called_off_and_handed_over_like_others(
    start: Start, queue: Queue
) -> None:
    names = [f"good-{number}" for number in range(5)]
    leave_with_a_dead_worker(queue, names, num_tokens=300, crashes=8)
    worker = start(step_ms=20)
    eventually(lambda: len(worker.named("job_suspected")) == 5, "all to be suspects")
    eventually(lambda: worker.named("job_quarantined"), "the first turn")
    first = worker.named("job_quarantined")[0]["request_id"]
    waiting = next(name for name in names if name != first)
    queue.cancel(waiting)
    assert queue.wait(waiting).terminal["code"] == "cancelled"
    assert len(worker.named("job_quarantined")) == 1, "256 events are a long turn"
    alone = [name for name in names if record(queue, name)["alone"] == "1"]
    assert alone == [first], "only who runs is alone"
    worker.signal(signal.SIGTERM)
    eventually(lambda: worker.named("worker_stopping"), "the first signal to be seen")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert queue.num_queued() == 4
    assert {record(queue, name)["crashes"] for name in names} == {"9"}, "handing over is no crash"


def leave_with_a_dead_worker(queue: Queue, job_ids: list[str], num_tokens: int, crashes: int) -> None:
    """Jobs that a worker had opened when it was lost: their leases have run out."""
    lane = queue.keys.jobs("normal")
    send_batch(queue, job_ids, num_tokens)
    queue.redis.call("XGROUP", "CREATE", lane, "workers", "0")
    ((_, entries),) = queue.redis.call("XREADGROUP", "GROUP", "workers", "dead", "STREAMS", lane, ">")
    for job_id, (entry_id, _) in zip(job_ids, entries, strict=True):
        queue.redis.call("XCLAIM", lane, "workers", "dead", 0, entry_id, "IDLE", 99_999, "JUSTID")
        opened = ("e", "open", "t", 1, "worker", "dead", "model", "m", "from", 0)
        queue.redis.call("XADD", queue.keys.reply(job_id), "1000-0", *opened)
        state: dict[str, str | int] = {
            "entry": f"normal/{entry_id.decode()}",
            "status": "running",
            "worker": "dead",
            "attempt": 1000,
        }
        state |= {"crashes": crashes, "solo": 0, "alone": 0}
        queue.redis.call("HSET", queue.keys.state(job_id), *(part for pair in state.items() for part in pair))


def engine_of(worker: ScriptedWorker) -> psutil.Process | None:
    """Its engine; None between two."""
    with contextlib.suppress(StopIteration, psutil.NoSuchProcess):
        return worker.engine()
    return None


def serve_until_ended(start: Start, queue: Queue, job_id: str, *, num_living: int) -> list[ScriptedWorker]:
    """So many workers live until the job has ended, those that die being replaced; answers all there were."""
    workers: list[ScriptedWorker] = []
    while not has_ended(queue, job_id):
        if sum(worker.process.poll() is None for worker in workers) < num_living:
            workers.append(start(step_ms=20, lease_ms=500))
        time.sleep(0.02)
    return workers


def has_ended(queue: Queue, job_id: str) -> bool:
    """Whether its reply has its terminal event."""
    events = queue.reply(job_id).events
    return bool(events) and events[-1][1]["e"] in ("end", "error")
