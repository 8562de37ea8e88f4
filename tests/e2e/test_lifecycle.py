"""Start, stop and sudden death of a worker: nothing is lost, and nothing is left running."""

import contextlib
import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import StartWorker
from tests.e2e.workers import PAGEMILL, Queue, WorkerProcess, assert_gone, eventually

# Penalties look back over all that was said: whoever goes on has to know it, the prompt apart from the reply.
PENALTIES = {"repetition_penalty": 1.2, "frequency_penalty": 0.1, "presence_penalty": 0.4}
LONG: dict[str, Any] = {"prompt": "a long story", "max_tokens": 1500, "temperature": 0, "ignore_eos": 1, **PENALTIES}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_jobs_finish(start_worker: StartWorker, own_queue: Queue, number: int) -> None:
    worker = start_worker()
    worker.wait_until_ready()
    job_id = own_queue.enqueue(**LONG)
    eventually(lambda: len(own_queue.reply(job_id).events) > 2, "tokens to come")
    worker.signal(number)
    assert worker.wait() == 0
    assert own_queue.reply(job_id).terminal["finish"] == "length"
    own_queue.assert_settled()
    assert own_queue.redis.call("ZCARD", own_queue.keys.workers) == 0
    worker.assert_gone()


def test_a_second_signal_hands_the_job_to_a_peer_which_goes_on_where_it_was(
    start_worker: StartWorker, own_queue: Queue
) -> None:
    first = start_worker()
    first.wait_until_ready()
    job_id = own_queue.enqueue(**LONG)
    eventually(lambda: len(own_queue.reply(job_id).events) > 2, "tokens to come")
    first.engine().suspend()  # so that it can't finish the job in between
    first.signal(signal.SIGTERM)
    eventually(lambda: "worker_stopping" in [event["event"] for event in first.events()], "the first signal to be seen")
    first.signal(signal.SIGTERM)
    assert first.wait() == 0
    start_worker().wait_until_ready()
    reply = own_queue.wait(job_id)
    check_resumed(own_queue, job_id)
    assert own_queue.redis.hash(own_queue.keys.state(job_id))["crashes"] == "0"
    assert reply.field("receipt")["attempts"] == 2
    own_queue.assert_settled()


def check_resumed(queue: Queue, job_id: str) -> None:
    """No token twice, none missing, and what a run without the interruption gives."""
    reply = queue.reply(job_id)
    opens = [int(fields["from"]) for _, fields in reply.events if fields["e"] == "open"]
    assert len(opens) == 2
    assert opens[1] > 0
    assert len(reply.ids) == 1500
    usage = reply.field("usage")
    assert usage["replayed_tokens"] == opens[1]
    undisturbed = queue.run(**LONG)
    assert reply.ids == undisturbed.ids
    assert reply.text == undisturbed.text


def test_a_killed_workers_job_goes_on_at_a_peer(start_worker: StartWorker, own_queue: Queue) -> None:
    first = start_worker(lease_ms=1500)
    first.wait_until_ready()
    job_id = own_queue.enqueue(**LONG)
    eventually(lambda: len(own_queue.reply(job_id).events) > 2, "tokens to come")
    first.signal(signal.SIGKILL)
    first.wait()
    first.assert_gone()
    start_worker(lease_ms=1500).wait_until_ready()
    own_queue.wait(job_id)
    check_resumed(own_queue, job_id)
    assert own_queue.redis.hash(own_queue.keys.state(job_id))["crashes"] == "1"


def test_a_killed_engine_is_replaced_and_its_jobs_go_on(start_worker: StartWorker, own_queue: Queue) -> None:
    worker = start_worker(metrics_port=0)
    worker.wait_until_ready()
    undisturbed = own_queue.run(**LONG)
    job_id = own_queue.enqueue(**LONG)
    eventually(lambda: len(own_queue.reply(job_id).events) > 2, "tokens to come")
    worker.engine().kill()
    reply = own_queue.wait(job_id)
    assert reply.ids == undisturbed.ids
    assert reply.text == undisturbed.text
    assert "engine_died" in [event["event"] for event in worker.events()]
    assert worker.get("/readyz")[0] == 200


def test_the_embedded_server_and_its_jobs_survive_a_kill_of_everything(tiny_model: Path, tmp_path: Path) -> None:
    """Started without a Redis; killed with SIGKILL; nothing is left running, and the next start has the jobs."""
    arguments: list[str | Path] = [
        PAGEMILL,
        "serve",
        "--model",
        tiny_model,
        "--data-dir",
        tmp_path,
        "--queue",
        "q",
        "--num-threads",
        "1",
    ]
    arguments += ["--num-kv-blocks", "64", "--log-format", "json", "--max-num-seqs", "4"]
    arguments += ["--lease-ms", "2000"]
    family = start_and_wait(arguments, tmp_path)
    killed = family[0]
    url = (tmp_path / "redis.url").read_text().strip()
    enqueue: list[str | Path] = [
        PAGEMILL,
        "redis",
        "--redis-url",
        url,
        "XADD",
        "pagemill:{q}:jobs:normal",
        "*",
        "id",
        "kept",
    ]
    killed.suspend()  # so that the job is not done when everything dies
    subprocess.run([*enqueue, "prompt", "abc", "max_tokens", "3"], check=True, capture_output=True, timeout=30)
    eventually(lambda: aof_holds(tmp_path, b"kept"), "the job to be on disk")
    killed.kill()
    killed.wait()
    assert_gone(family)
    family = start_and_wait(arguments, tmp_path)
    url = (tmp_path / "redis.url").read_text().strip()
    read: list[str | Path] = [PAGEMILL, "redis", "--redis-url", url, "XRANGE", "pagemill:{q}:reply:kept", "-", "+"]
    eventually(lambda: b"length" in subprocess.run(read, check=True, capture_output=True).stdout, "the job to end")
    family[0].terminate()
    family[0].wait()
    assert_gone(family)


def aof_holds(folder: Path, word: bytes) -> bool:
    """Whether the append-only file has it: fsync is every second, the write itself at once."""
    return any(word in path.read_bytes() for path in folder.rglob("*.aof"))


def start_and_wait(arguments: list[str | Path], folder: Path) -> list[psutil.Process]:
    """Start a worker with an embedded server; answers its whole family once it takes jobs."""
    log_path = folder / "worker.log"
    with log_path.open("wb") as log:
        process = psutil.Popen(arguments, stdout=log, stderr=log)
    eventually(lambda: b"worker_ready" in log_path.read_bytes(), "the worker to be ready")
    return [process, *process.children(recursive=True)]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "/nowhere/model"], "/nowhere/model"),
        (["--redis-url", "redis://127.0.0.1:1/0"], "127.0.0.1:1"),
        (["--redis-url", "http://example"], "redis://"),
        (["--num-kv-blocks", "1000000000"], "num_kv_blocks"),
        (["--max-model-len", "100000"], "max_model_len"),
        (["--metrics-host", "256.0.0.1", "--metrics-port", "0"], "256.0.0.1"),
    ],
)
def test_a_start_that_fails_says_one_line_and_exits_with_2(
    flags: list[str], words: str, tiny_model: Path, valkey_url: str, tmp_path: Path
) -> None:
    base = {"--model": str(tiny_model), "--redis-url": valkey_url, "--queue": "q", "--data-dir": str(tmp_path)}
    settings = base | dict(zip(flags[::2], flags[1::2], strict=True))
    arguments = [part for pair in settings.items() for part in pair]
    assert words in refusal(*arguments)


def test_a_corrupt_checkpoint_is_one_line(tiny_model: Path, valkey_url: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(range(200)))
    assert "broken.gguf" in refusal("--model", broken, "--redis-url", valkey_url)


def test_a_taken_metrics_port_is_one_line(start_worker: StartWorker, tiny_model: Path, valkey_url: str) -> None:
    worker = start_worker(metrics_port=0)
    port = worker.wait_until_ready()["metrics_url"].rpartition(":")[2]
    assert port in refusal("--model", tiny_model, "--redis-url", valkey_url, "--metrics-port", port)


def refusal(*arguments: str | Path) -> str:
    """The one line with which a worker that can't start ends."""
    ran = subprocess.run([PAGEMILL, "serve", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr
    (line,) = [line for line in ran.stderr.splitlines() if line.startswith("pagemill: ")]
    return line


def test_the_job_of_a_cli_client_is_streamed(start_worker: StartWorker, own_queue: Queue, valkey_url: str) -> None:
    start_worker().wait_until_ready()
    ran = subprocess.run(
        [PAGEMILL, "enqueue", "--redis-url", valkey_url, "--queue", own_queue.keys.queue, "--max-tokens", "5", "hello"],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0
    own_queue.assert_settled()
    (state_key,) = own_queue.redis.call("KEYS", "pagemill:{" + own_queue.keys.queue + "}:state:*")
    assert own_queue.redis.hash(state_key.decode())["status"] == "done"
    reply = own_queue.reply(state_key.decode().rpartition(":")[2])
    assert ran.stdout.decode().rstrip("\n") == reply.text.rstrip("\n")
    assert json.loads(reply.terminal["usage"])["completion_tokens"] <= 5


def test_jobs_that_come_while_the_engine_restarts_are_served(start_worker: StartWorker, own_queue: Queue) -> None:
    worker = start_worker()
    worker.wait_until_ready()
    worker.engine().kill()
    eventually(lambda: "engine_died" in [event["event"] for event in worker.events()], "the death to be seen")
    job_ids: list[str] = []
    while "engine_restarted" not in [event["event"] for event in worker.events()]:
        job_ids.append(own_queue.enqueue(prompt="meanwhile", max_tokens=3, temperature=0, ignore_eos=1))
        time.sleep(0.05)
    assert job_ids
    for job_id in job_ids:
        assert own_queue.wait(job_id).terminal["e"] == "end"


def test_an_engine_that_is_killed_while_it_starts_again_is_replaced(
    start_worker: StartWorker, own_queue: Queue
) -> None:
    worker = start_worker()
    worker.wait_until_ready()
    first = worker.engine()
    first.kill()
    second = eventually(lambda: successor(worker, first), "the second engine to begin")
    second.kill()
    assert own_queue.run(prompt="third time", max_tokens=3, temperature=0, ignore_eos=1).terminal["e"] == "end"
    assert "engine_died_at_start" in [event["event"] for event in worker.events()]


def successor(worker: WorkerProcess, first: psutil.Process) -> psutil.Process | None:
    """The engine process that came after `first`."""
    with contextlib.suppress(StopIteration, psutil.NoSuchProcess):
        engine = worker.engine()
        return engine if engine.pid != first.pid else None
    return None


def test_a_worker_whose_grace_is_over_ends(start_worker: StartWorker, own_queue: Queue) -> None:
    """Handing over wakes the very read that is cancelled next: a cancellation that is lost there must not hang it."""
    worker = start_worker(shutdown_grace_s=0.3)
    worker.wait_until_ready()
    job_id = own_queue.enqueue(id="unfinished", **LONG)
    eventually(lambda: len(own_queue.reply(job_id).events) > 2, "tokens to come")
    worker.engine().suspend()  # so that the job can't finish within the grace
    worker.signal(signal.SIGINT)
    assert worker.wait() == 0
    worker.assert_gone()
