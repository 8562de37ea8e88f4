"""The commands that read and write a queue, against a real server and a worker played by hand."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping

import pytest
from redis import Redis

from tests.e2e.workers import eventually
from tests.unit.cli.conftest import Pagemill, Server
from worker.protocol import digest_of
from worker.streams.keys import TERMINAL_SEQ, QueueKeys, lot_of

pytestmark = pytest.mark.usefixtures("at_server")

KEYS = QueueKeys("smollm2")
Events = list[tuple[str, dict[str, str]]]
OPEN = ("7-0", {"e": "open", "worker": "w", "from": "0"})


def end(**fields: str) -> tuple[str, dict[str, str]]:
    return f"7-{TERMINAL_SEQ}", {"e": "end", "finish": "stop", **fields}


class HandWorker:
    """Takes the first job of a lane and answers it with `events`, from a thread."""

    def __init__(self, url: str, events: Events, lane: str = "normal") -> None:
        self.job: Mapping[bytes, bytes] = {}
        self._url = url
        self._events = events
        self._lane = lane
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> "HandWorker":
        self._thread.start()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._thread.join()

    def _work(self) -> None:
        with Redis.from_url(self._url, protocol=2) as connection:
            server: Server = connection
            taken = server.xread({KEYS.jobs(self._lane): "0-0"}, count=1, block=20_000)
            self.job = taken[0][1][0][1]
            for event_id, fields in self._events:
                server.xadd(KEYS.reply(self.job[b"id"].decode()), dict(fields), id=event_id)


def test_enqueue_sends_a_chat_message_and_prints_the_reply(pagemill: Pagemill, server_url: str) -> None:
    events = [OPEN, ("7-1", {"e": "token", "text": "Par", "ids": "[1]", "n": "1"}), end(text="is é.")]
    with HandWorker(server_url, events) as worker:
        result = pagemill("enqueue", "Capital?", "--system", "Be brief.", "--max-tokens", "8", "--field", "top_p=0.9")
    assert (result.code, result.out) == (0, "Paris é.\n")
    assert "No worker serves queue smollm2 now" in result.err
    assert worker.job[b"messages"] == (
        b'[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Capital?"}]'
    )
    assert (worker.job[b"max_tokens"], worker.job[b"top_p"]) == (b"8", b"0.9")


def test_enqueue_raw_sends_the_prompt_as_it_stands(pagemill: Pagemill, server_url: str) -> None:
    with HandWorker(server_url, [OPEN, end(text="two")], lane="high") as worker:
        result = pagemill("enqueue", "--raw", "--lane", "high", "--id", "mine", "--temperature", "0", "one ")
    assert (result.code, result.out) == (0, "two\n")
    assert worker.job == {b"id": b"mine", b"prompt": b"one ", b"temperature": b"0.0"}


def test_enqueue_says_nothing_of_workers_where_one_serves(pagemill: Pagemill, server: Server, server_url: str) -> None:
    server.zadd(KEYS.workers, {"w1": time.time() * 1000})
    server.hset(KEYS.worker("w1"), "model", "smollm2")
    with HandWorker(server_url, [OPEN, end(text="hi")]):
        assert pagemill("enqueue", "hello").err == ""


def test_a_job_that_fails_ends_with_code_1_and_its_error(pagemill: Pagemill, server_url: str) -> None:
    error = {"e": "error", "code": "context_too_long", "message": "use fewer tokens", "retryable": "0"}
    with HandWorker(server_url, [OPEN, (f"7-{TERMINAL_SEQ}", error)]):
        result = pagemill("enqueue", "hello")
    assert (result.code, result.out) == (1, "")
    assert result.err.splitlines()[-1] == "pagemill: the job failed: context_too_long: use fewer tokens"


def test_a_field_without_a_value_is_refused_before_anything_is_sent(pagemill: Pagemill, server: Server) -> None:
    result = pagemill("enqueue", "hello", "--field", "top_p")
    why = "--field 'top_p': use NAME=VALUE, like --field top_p=0.9."
    assert (result.code, result.err) == (2, f"pagemill: {why} `pagemill enqueue --help` shows what is accepted.\n")
    assert server.keys() == []


def test_ctrl_c_cancels_the_job(server: Server, server_url: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "ops.cli", "enqueue", "--id", "mine", "hello"],
        env={**os.environ, "PAGEMILL_REDIS_URL": server_url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            eventually(lambda: "xread" in str(server.client_list()), "a read")
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "pagemill: cancelled mine"
    assert server.get(KEYS.cancel("mine")) is not None


def test_cancel_marks_a_job(pagemill: Pagemill, server: Server) -> None:
    result = pagemill("cancel", "abc", "--reason", "not needed")
    assert (result.code, result.out) == (0, "abc: cancel mark set on queue smollm2\n")
    assert server.get(KEYS.cancel("abc")) == b"not needed"
    assert [fields for _, fields in server.xrange(KEYS.control)] == [{b"op": b"cancel", b"id": b"abc"}]


def test_cancelling_a_job_that_nobody_knows_says_so(pagemill: Pagemill, server: Server) -> None:
    """It may wait in a lane, so the mark is set all the same."""
    result = pagemill("cancel", "abc")
    assert result.code == 0
    assert "No worker of queue smollm2 has taken a job abc" in result.err
    assert server.get(KEYS.cancel("abc")) is not None
    server.hset(KEYS.state("run"), "status", "running")
    assert pagemill("cancel", "run").err == ""


def test_cancelling_a_job_that_has_ended_sets_no_mark(pagemill: Pagemill, server: Server) -> None:
    server.hset(KEYS.state("old"), "status", "done")
    result = pagemill("cancel", "old")
    assert (result.code, result.out) == (1, "")
    assert result.err == "pagemill: old has ended already (done): there is nothing to cancel\n"
    assert server.get(KEYS.cancel("old")) is None


@pytest.mark.parametrize("command", [("cancel",), ("enqueue", "hello", "--id")])
@pytest.mark.parametrize("job_id", ["bad id", "", "x" * 65, "caf\udce9", "a:b"])
def test_an_id_that_no_job_can_have_is_refused(
    pagemill: Pagemill, server: Server, command: tuple[str, ...], job_id: str
) -> None:
    result = pagemill(*command, job_id)
    assert (result.code, result.out) == (2, "")
    assert "can't be used: use 1 to 64 of A-Z a-z 0-9 _ -" in result.err
    assert server.keys() == []


def test_an_id_of_another_job_is_refused_before_anything_is_sent(pagemill: Pagemill, server: Server) -> None:
    server.hset(KEYS.state("mine"), mapping={"status": "done", "digest": "of something else"})
    server.xadd(KEYS.reply("mine"), {"e": "end", "text": "not this"}, id=f"7-{TERMINAL_SEQ}")
    result = pagemill("enqueue", "--id", "mine", "hello")
    assert (result.code, result.out) == (2, "")
    assert "the id mine belongs to another job: send this one with another id" in result.err
    assert server.exists(KEYS.jobs("normal")) == 0


def test_the_same_job_again_under_its_id_shows_its_reply(pagemill: Pagemill, server: Server, server_url: str) -> None:
    job = {b"id": b"mine", b"prompt": b"one", b"max_tokens": b"4"}
    server.hset(KEYS.state("mine"), mapping={"status": "done", "digest": digest_of(job)})
    with HandWorker(server_url, [OPEN, end(text="two")]):
        result = pagemill("enqueue", "--raw", "--id", "mine", "--max-tokens", "4", "one")
    assert (result.code, result.out) == (0, "two\n")


def test_an_id_that_another_job_takes_in_the_queue_is_told(pagemill: Pagemill, server: Server, server_url: str) -> None:
    """That one was sent before and is opened first; nothing of its reply is shown."""

    class Impostor(HandWorker):
        def _work(self) -> None:
            with Redis.from_url(server_url, protocol=2) as connection:
                sender: Server = connection
                sender.xread({KEYS.jobs("normal"): "0-0"}, count=1, block=20_000)
                sender.hset(KEYS.state("mine"), mapping={"status": "running", "digest": "of something else"})
                for event_id, fields in self._events:
                    sender.xadd(KEYS.reply("mine"), dict(fields), id=event_id)

    with Impostor(server_url, [OPEN, end(text="not this")]):
        result = pagemill("enqueue", "--id", "mine", "hello")
    assert (result.code, result.out) == (2, "")
    assert "belongs to another job" in result.err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("enqueue", "--raw", "caf\udce9"), "TEXT is not UTF-8 at byte 3"),
        (("enqueue", "hi", "--system", "\udcff"), "--system is not UTF-8 at byte 0"),
        (("enqueue", "hi", "--field", "stop=\udcff"), "--field is not UTF-8 at byte 5"),
        (("cancel", "a", "--reason", "\udcff"), "--reason is not UTF-8 at byte 0"),
        (("dead", "caf\udce9"), "is no entry id"),
    ],
)
def test_bytes_that_are_no_utf8_are_refused_by_name(
    pagemill: Pagemill, server: Server, words: tuple[str, ...], what: str
) -> None:
    result = pagemill(*words)
    assert (result.code, result.out) == (2, "")
    assert what in result.err
    assert server.keys() == []


def test_standard_input_that_is_no_utf8_is_refused(server: Server, server_url: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "ops.cli", "enqueue", "-"],
        env={**os.environ, "PAGEMILL_REDIS_URL": server_url},
        input=b"caf\xe9",
        capture_output=True,
        check=False,
    )
    assert (result.returncode, result.stdout) == (2, b"")
    assert b"standard input is not UTF-8 at byte 3: convert it first" in result.stderr
    assert server.keys() == []


def test_commands_name_a_key_that_holds_something_else(pagemill: Pagemill, server: Server) -> None:
    for key in (KEYS.jobs("high"), KEYS.workers, KEYS.dead):
        server.set(key, "something else")
    assert f"{KEYS.workers} holds something else" in pagemill("workers").err
    assert f"{KEYS.dead} holds something else" in pagemill("dead").err
    jobs = pagemill("jobs")
    assert jobs.code == 0
    assert f"{KEYS.jobs('high')} holds a string: RENAME or DEL it" in jobs.out


def test_jobs_shows_lanes_unfinished_jobs_and_outcomes(pagemill: Pagemill, server: Server) -> None:
    for lane, count in (("high", 1), ("normal", 3)):
        server.xgroup_create(KEYS.jobs(lane), "workers", "0", mkstream=True)
        for _ in range(count):
            server.xadd(KEYS.jobs(lane), {"prompt": "secret words"})
    server.xreadgroup("workers", "w1", {KEYS.jobs("normal"): ">"}, count=2)
    server.hset(KEYS.state("run"), mapping={"status": "running", "worker": "w1", "attempt": "7", "entry": "normal/1-0"})
    server.hset(KEYS.state("done"), mapping={"status": "end"})
    result = pagemill("jobs")
    rows = [line.split("\t")[:3] for line in result.out.splitlines()]
    assert ["high", "1", "0"] in rows
    assert ["normal", "1", "2"] in rows
    assert ["low", "0", "0"] in rows
    assert ["run", "running", "w1"] in rows
    assert ["end", "1"] in rows
    assert "secret" not in result.out


def test_what_was_put_back_waits_as_what_nobody_has_read(pagemill: Pagemill, server: Server) -> None:
    ids = [server.xadd(KEYS.jobs("normal"), {"prompt": "x"}) for _ in range(5)]
    server.xgroup_create(KEYS.jobs("normal"), "workers", "0")
    server.xreadgroup("workers", "w1", {KEYS.jobs("normal"): ">"}, count=3)
    for name, entry_id in ((lot_of(b"acme"), ids[0]), ("handover", ids[1])):
        server.execute_command("XCLAIM", KEYS.jobs("normal"), "workers", name, 0, entry_id)
    server.hset(KEYS.config, "paused", "1")
    result = pagemill("jobs")
    assert "normal\t4\t1\t" in result.out
    paused = "Queue smollm2 is paused: `pagemill resume --queue smollm2` lets it go on\n"
    assert result.err == f"{paused}No worker serves queue smollm2 now\n"


def test_pause_resume_and_drain_write_the_config_and_give_a_hint(pagemill: Pagemill, server: Server) -> None:
    assert pagemill("pause").out == "queue smollm2 is paused: `pagemill resume --queue smollm2` lets it go on\n"
    assert server.hgetall(KEYS.config) == {b"paused": b"1"}
    assert pagemill("resume").out == "queue smollm2 goes on\n"
    assert pagemill("resume").out == "queue smollm2 was not paused\n"
    server.hset(KEYS.worker("w1"), "model", "smollm2")
    assert pagemill("drain", "w1").code == 0
    assert server.hgetall(KEYS.config) == {b"drain:w1": b"1"}
    assert [fields for _, fields in server.xrange(KEYS.control)] == [{b"op": b"config"}] * 4
    unknown = pagemill("drain", "w2")
    assert (unknown.code, unknown.out) == (2, "")
    assert "queue smollm2 has no worker 'w2': `pagemill workers` lists those it has" in unknown.err


@pytest.mark.parametrize("words", ["jobs", "pause", "resume"])
def test_a_queue_that_nobody_serves_is_told(pagemill: Pagemill, server: Server, words: str) -> None:
    assert pagemill(words).err == "No worker serves queue smollm2 now\n"
    server.zadd(KEYS.workers, {"w1": time.time() * 1000})
    assert pagemill(words).err.startswith("No worker serves"), "its heartbeat has expired"
    server.hset(KEYS.worker("w1"), "model", "smollm2")
    assert "No worker" not in pagemill(words).err


def test_workers_shows_the_registry_and_what_each_says(pagemill: Pagemill, server: Server) -> None:
    server.zadd(KEYS.workers, {"w1": time.time() * 1000, "lost": (time.time() - 90) * 1000})
    server.hset(KEYS.worker("w1"), mapping={"running": "3", "model": "smollm2", "kv_use": "0.5", "beat": "1"})
    header, *rows = [line.split("\t") for line in pagemill("workers").out.splitlines()]
    assert header == ["worker", "last beat", "model", "running", "kv_use"]
    assert [[row[0], *row[2:]] for row in rows] == [["w1", "smollm2", "3", "0.5"]], "who missed three beats is gone"
    assert rows[0][1].endswith(("s ago", "min ago"))


def test_jobs_and_workers_tell_several_queues_apart(
    pagemill: Pagemill, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEMILL_QUEUE", "smollm2, other")
    other = QueueKeys("other")
    server.xadd(other.jobs("low"), {"prompt": "x"})
    server.hset(KEYS.state("run"), mapping={"status": "running"})
    for keys, running in ((KEYS, "3"), (other, "5")):
        server.zadd(keys.workers, {"w1": time.time() * 1000})
        server.hset(keys.worker("w1"), "running", running)
    rows = [line.split("\t") for line in pagemill("jobs").out.splitlines()]
    assert rows[0] == ["queue", "lane", "waiting", "held", "oldest"]
    assert ["other", "low", "1", "0"] in [row[:4] for row in rows]
    assert ["smollm2", "low", "0", "0"] in [row[:4] for row in rows]
    assert ["smollm2", "run", "running"] in [row[:3] for row in rows]
    workers = [line.split("\t") for line in pagemill("workers").out.splitlines()]
    assert [[row[0], row[1], row[3]] for row in workers[1:]] == [["smollm2", "w1", "3"], ["other", "w1", "5"]]


@pytest.mark.parametrize("words", [("enqueue", "hello"), ("cancel", "j1"), ("dead",)])
def test_a_command_of_one_queue_asks_which_of_several(
    pagemill: Pagemill, server: Server, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("PAGEMILL_QUEUE", "smollm2,other")
    said = "names 2 queues and this command works with one: add --queue with one of"
    result = pagemill(*words)
    assert (result.code, result.err) == (2, f"pagemill: PAGEMILL_QUEUE {said} smollm2, other\n")
    flagged = pagemill(*words[:1], "--queue", "a,b", *words[1:])
    assert flagged.err == f"pagemill: --queue {said} a, b\n"
    assert not server.keys("*"), "nothing was written anywhere"


def test_one_raw_command_needs_no_queue(pagemill: Pagemill, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_QUEUE", "smollm2,other")
    assert pagemill("redis", "PING").out == "PONG\n"


def test_dead_lists_letters_and_shows_one_whole(pagemill: Pagemill, server: Server) -> None:
    first = server.xadd(KEYS.dead, {"error": "bad_request", "prompt": "tab\there", "source_id": "normal/1-0"})
    server.xadd(KEYS.dead, {"id": "j2", "error": "poison", "deliveries": "3"})
    out = pagemill("dead", "--limit", "5").out.splitlines()
    assert [line.split("\t")[1:3] for line in out[1:]] == [["j2", "poison"], ["", "bad_request"]]
    assert "prompt\ttab here" in pagemill("dead", first.decode()).out
    missing = pagemill("dead", "1-1")
    assert (missing.code, missing.err) == (
        2,
        "pagemill: queue smollm2 has no dead letter 1-1: `pagemill dead` lists them\n",
    )


def test_commands_on_an_empty_queue_show_empty_tables(pagemill: Pagemill) -> None:
    assert pagemill("jobs", "--queue", "none").code == 0
    assert pagemill("workers").out == "worker\tlast beat\n"
    assert len(pagemill("dead").out.splitlines()) == 1


@pytest.fixture(autouse=True)
def nothing_left(server: Server) -> Iterator[None]:
    """Every command closes its connections: only this test's own is left."""
    yield
    eventually(lambda: len(server.client_list()) <= 1, "the connections to close")
