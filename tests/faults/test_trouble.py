"""A worker and a server in trouble: it says what it waits for, is not ready meanwhile, and goes on by itself."""

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import server_command
from tests.e2e.workers import eventually, fresh_keys
from tests.faults.fleet import SETTINGS
from tests.faults.scripted import ScriptedWorker
from tests.servers.groups import ClusterGroup
from tests.servers.process import QUOTED, ServerProcess, free_port
from tests.wire.resp import RespClient, RespError
from worker.client import Client
from worker.streams.keys import GROUP, HANDOVER, QueueKeys
from worker.streams.rights import client_rule, rule_words, worker_rule

GRACE_S = 1.0
# What a stop may take beyond its grace: a last try, and the end of the processes.
END_S = 6.0


class Worker(ScriptedWorker):
    """A worker of a queue of its own. Its port answers before it is ready."""

    def __init__(self, model: Path, url: str, folder: Path) -> None:
        self.queue = fresh_keys().queue
        self.port = free_port()
        own = {"metrics_port": self.port, "shutdown_grace_s": GRACE_S}
        super().__init__(model, url, self.queue, folder, step_ms=20, **SETTINGS | own)

    def readiness(self) -> tuple[bool, str]:
        """What `/readyz` answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=10) as response:
                return True, json.load(response)["reason"]
        except urllib.error.HTTPError as error:
            return False, json.load(error)["reason"]
        except OSError as error:
            return False, str(error)

    def wait_until(self, *, is_ready: bool, words: str = "") -> None:
        """Until it is ready, or isn't, and says why."""

        def is_so() -> bool:
            assert self.process.poll() is None, self.log_path.read_text()
            ready, reason = self.readiness()
            return ready is is_ready and words in reason

        eventually(is_so, f"readiness {is_ready} {words}; now {self.readiness()}", timeout_s=30)

    def stop(self) -> float:
        """SIGTERM; answers how long it took to end."""
        began = time.monotonic()
        self.process.terminate()
        assert self.process.wait(60) == 0, self.log_path.read_text()
        return time.monotonic() - began


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(server_command("valkey-9.1"), tmp_path / "server", ["appendonly yes", "appendfsync always"])
    yield process
    process.stop()


@pytest.fixture
def worker(server: ServerProcess, tiny_model: Path, tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(tiny_model, server.url, tmp_path)
    worker.wait_until(is_ready=True)
    yield worker
    worker.process.kill()
    worker.process.wait()


def _configure(server: ServerProcess, **values: str | int) -> None:
    for name, value in values.items():
        server.call("CONFIG", "SET", name.replace("_", "-"), value)


def _fill(server: ServerProcess, _: ExitStack) -> None:
    _configure(server, maxmemory=1)


def _make_room(server: ServerProcess) -> None:
    _configure(server, maxmemory=0)


def _demand_replicas(server: ServerProcess, _: ExitStack) -> None:
    _configure(server, min_replicas_to_write=1)


def _demand_none(server: ServerProcess) -> None:
    _configure(server, min_replicas_to_write=0)


def _demote(server: ServerProcess, _: ExitStack) -> None:
    server.call("REPLICAOF", "127.0.0.1", free_port())


def _promote(server: ServerProcess) -> None:
    server.call("REPLICAOF", "NO", "ONE")


def _run_slow_script(server: ServerProcess, stack: ExitStack) -> None:
    _configure(server, lua_time_limit=10)
    client = stack.enter_context(RespClient(server.url))
    client.send(("EVAL", "while true do end", 0))


def _kill_script(server: ServerProcess) -> None:
    eventually(lambda: _tries(server, "SCRIPT", "KILL"), "the script to end")


def _take_all_connections(server: ServerProcess, stack: ExitStack) -> None:
    """Everybody is hung up on, and others are faster."""
    client = stack.enter_context(RespClient(server.url))
    client.call("CONFIG", "SET", "maxclients", 5)
    stack.callback(client.call, "CONFIG", "SET", "maxclients", 10000)
    client.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    while True:
        try:
            stack.enter_context(RespClient(server.url)).call("PING")
        except (RespError, OSError):
            return


def _give_connections_back(server: ServerProcess) -> None:
    """The caller hangs up."""


def _kill_server(server: ServerProcess, _: ExitStack) -> None:
    server.kill()


def _start_server(server: ServerProcess) -> None:
    server.start()


def _tries(server: ServerProcess, *words: str) -> bool:
    try:
        server.call(*words)
    except RespError as error:
        return str(error).startswith("NOTBUSY")
    return True


TROUBLES: dict[str, tuple[Callable[[ServerProcess, ExitStack], None], Callable[[ServerProcess], None], str]] = {
    "full": (_fill, _make_room, "memory is full"),
    "no replicas": (_demand_replicas, _demand_none, "min-replicas-to-write"),
    "replica": (_demote, _promote, "replica"),
    "busy": (_run_slow_script, _kill_script, "slow script"),
    "max clients": (_take_all_connections, _give_connections_back, "max number of clients"),
    "down": (_kill_server, _start_server, "can't be reached"),
}


def test_whatever_troubles_the_server_is_said_once_and_waited_out(worker: Worker, server: ServerProcess) -> None:
    """One trouble after another; a job that is under way when it begins ends as it should."""
    with Client(server.url, worker.queue, retry_s=60) as client:
        for name, (begin, end, words) in TROUBLES.items():
            job_id = client.submit("hello", max_tokens=60, temperature=0, ignore_eos=1)
            first = next(event for event in client.stream(job_id) if event.kind == "token")
            assert first.text is not None
            with ExitStack() as stack:
                begin(server, stack)
                worker.wait_until(is_ready=False, words=words)
                before = time.monotonic()
                end(server)
            worker.wait_until(is_ready=True)
            reply = client.result(job_id)
            assert (reply.error, len(reply.ids)) == (None, 60), name
            assert time.monotonic() - before < 30
        _bring_down_a_storm(worker, server, client)
    told = worker.named("redis_waited_for")
    reasons = [event["reason"] for event in told]
    for _, _, words in TROUBLES.values():
        assert any(words in reason for reason in reasons), (words, reasons)
    # A line for each kind of trouble, not for each try.
    assert len(told) <= 3 * len(TROUBLES), reasons
    assert 1 <= len(worker.named("redis_serves_again")) <= len(told)


def test_what_troubles_the_server_while_a_worker_starts_is_waited_out_too(
    server: ServerProcess, tiny_model: Path, tmp_path: Path
) -> None:
    """To read a model takes long, and what the server said before that is old news by then."""
    _configure(server, maxmemory=1)
    worker = Worker(tiny_model, server.url, tmp_path)
    try:
        worker.wait_until(is_ready=False, words="memory is full")
        _configure(server, maxmemory=0)
        worker.wait_until(is_ready=True)
        with Client(server.url, worker.queue, retry_s=60) as client:
            job_id = client.submit("hello", max_tokens=5, temperature=0, ignore_eos=1)
            assert len(client.result(job_id).ids) == 5
        worker.stop()
    finally:
        worker.process.kill()
        worker.process.wait()


def _bring_down_a_storm(worker: Worker, server: ServerProcess, client: Client) -> None:
    """Jobs outlive it, and it makes no storm in the log."""
    num_lines = len(worker.named("redis_waited_for"))
    job_ids = [client.submit("hello", max_tokens=60, temperature=0, ignore_eos=1) for _ in range(4)]
    deadline = time.monotonic() + 1.5
    num_killed = 0
    with RespClient(server.url) as admin:
        while time.monotonic() < deadline:
            num_killed += admin.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            time.sleep(0.02)
    assert num_killed > 30
    assert [len(client.result(job_id).ids) for job_id in job_ids] == [60] * 4
    assert len(worker.named("redis_waited_for")) - num_lines <= 2
    worker.wait_until(is_ready=True)


@pytest.mark.parametrize("num_jobs", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_stop_without_a_server_ends_within_its_grace(worker: Worker, server: ServerProcess, num_jobs: int) -> None:
    """What is unfinished is given up: its leases run out, and the next worker goes on."""
    with Client(server.url, worker.queue, retry_s=60) as client:
        for _ in range(num_jobs):
            job_id = client.submit("hello", max_tokens=400, temperature=0, ignore_eos=1)
            assert any(event.kind == "token" for event in _until_token(client, job_id))
        server.kill()
        worker.wait_until(is_ready=False, words="can't be reached")
        assert worker.stop() < GRACE_S + END_S
    assert len(worker.named("redis_waited_for")) <= 4


def test_a_stop_ends_in_time_when_the_server_is_there_and_says_nothing(worker: Worker, server: ServerProcess) -> None:
    """As half-open connections do."""
    with Client(server.url, worker.queue, retry_s=60) as client:
        job_id = client.submit("hello", max_tokens=400, temperature=0, ignore_eos=1)
        assert any(event.kind == "token" for event in _until_token(client, job_id))
        os.kill(server.pid, signal.SIGSTOP)
        try:
            assert worker.stop() < GRACE_S + END_S
        finally:
            os.kill(server.pid, signal.SIGCONT)


def test_a_stop_on_a_full_server_hands_its_jobs_over_though_their_last_tokens_can_not_be_written(
    worker: Worker, server: ServerProcess
) -> None:
    """Handing over is still allowed there, and a peer computes again what isn't stored; no job has a crash for it."""
    keys = QueueKeys(worker.queue)
    with Client(server.url, worker.queue, retry_s=60) as client:
        job_ids = [client.submit("hello", max_tokens=400, temperature=0, ignore_eos=1) for _ in range(3)]
        for job_id in job_ids:
            assert any(event.kind == "token" for event in _until_token(client, job_id))
        _configure(server, maxmemory=1)
        worker.wait_until(is_ready=False, words="memory is full")
        worker.stop()
        assert [server.call("HMGET", keys.state(each), "status", "crashes") for each in job_ids] == [
            [b"queued", b"0"]
        ] * 3
        owners = [pending[1] for pending in server.call("XPENDING", keys.jobs("normal"), GROUP, "-", "+", 10)]
        assert owners == [HANDOVER.encode()] * 3


@pytest.mark.parametrize("name", ["valkey-9.1", pytest.param("redis-6.2", marks=pytest.mark.slow)])
def test_the_whole_service_works_with_the_least_rights_in_a_cluster(
    name: str, tiny_model: Path, tmp_path: Path
) -> None:
    """A worker process under the worker's rule, a client under the client's; each queue on a node of its own."""
    group = ClusterGroup(server_command(name), tmp_path / "servers")
    workers = []
    try:
        version = group.nodes[0].info("redis_version")
        for node in group.nodes:
            for user, rule in (("worker", worker_rule), ("client", client_rule)):
                node.call("ACL", "SETUSER", user, "on", ">secret", *rule_words(rule(version, "cluster")))
        urls = {user: group.url.replace(f"default:{QUOTED}", f"{user}:secret") for user in ("worker", "client")}
        workers = [Worker(tiny_model, urls["worker"], tmp_path) for _ in range(2)]
        for worker in workers:
            worker.wait_until(is_ready=True)
            with Client(urls["client"], worker.queue, retry_s=60) as client:
                reply = client.result(client.submit("hello", max_tokens=20, temperature=0, ignore_eos=1))
                assert (reply.error, len(reply.ids)) == (None, 20)
                job_id = client.submit("hello", max_tokens=400, temperature=0, ignore_eos=1)
                _until_token(client, job_id)
                client.cancel(job_id)
                assert client.result(job_id).error is not None
        for worker in workers:
            worker.stop()
            assert worker.named("redis_waited_for") == []
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.wait()
        group.stop()


def _until_token(client: Client, job_id: str) -> list[Any]:
    events = []
    for event in client.stream(job_id):
        events.append(event)
        if event.kind == "token":
            break
    return events
