"""The clients in docs/clients as programs: each rule for clients, on a real server."""

import asyncio
import contextlib
import json
import re
import select
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from urllib.parse import urlsplit

import pytest

from tests.clients.conftest import FOLDER, node
from tests.clients.samples import Sample, end, opened, token, write
from tests.e2e.workers import Queue, eventually
from tests.faults.proxy import Proxy
from worker.client import Client, ReplyLostError
from worker.streams.keys import TERMINAL_SEQ
from worker.streams.rights import client_rule, rule_words

# What a shell, CSV, JSON and a terminal could each trip over.
NASTY = 'a "quoted" \\ back\\\\slash\\" \\x41 \\n $(no) `no` %s & ","\n\ttab\n\nnaïve 日本語 🙂 \x1f\x1b[0m end \n'
ANEW = "\n[the reply began anew]\n"


@pytest.fixture
async def proxy(valkey_url: str) -> AsyncIterator[Proxy]:
    """On the way to the server."""
    proxy, parts = Proxy(), urlsplit(valkey_url)
    proxy.server = (str(parts.hostname), int(parts.port or 0))
    yield proxy
    await proxy.close()


async def url_through(proxy: Proxy, url: str) -> str:
    return url.replace(f":{urlsplit(url).port}", f":{await proxy.listen('sample')}")


def test_a_job_is_sent_streamed_and_told_of(sample: Sample, served: Queue) -> None:
    sample.queue = served.keys.queue
    assert sample.call("status", "nobody") == "unknown"
    job_id = sample.call("submit", "a slow river", "max_tokens", "40", "temperature", "0", "ignore_eos", "1")
    reading = sample.read(job_id)
    assert reading.end() == 0
    reply = served.reply(job_id)
    assert len(reply.ids) == 40
    assert reading.text == reply.text
    assert [event_id for _, event_id in reading.seen] == [event_id for event_id, _ in reply.events]
    eventually(lambda: sample.call("status", job_id) == "done", "the job to be settled")


def test_a_chat_is_a_field(sample: Sample, queue: Queue) -> None:
    messages = '[{"role": "user", "content": "say \\"é\\""}]'
    job_id = sample.call("submit", "", "messages", messages, "seed", "7")
    ((_, job),) = queue.redis.events(queue.keys.jobs("normal"))
    assert job == {"id": job_id, "messages": messages, "seed": "7"}


def test_a_job_that_runs_is_cancelled(sample: Sample, served: Queue) -> None:
    sample.queue = served.keys.queue
    job_id = sample.call("submit", "a slow river", "max_tokens", "1500", "ignore_eos", "1")
    reading = sample.read(job_id)
    eventually(lambda: "token" in reading.kinds, "tokens to come")
    sample.call("cancel", job_id)
    assert reading.end() == 1
    assert reading.complaint.startswith("cancelled: ")
    eventually(lambda: sample.call("status", job_id) == "cancelled", "the job to be settled")


def test_any_text_comes_through_as_it_was(sample: Sample, queue: Queue) -> None:
    job_id = sample.call("submit", NASTY, "max_tokens", "3", "meta", NASTY)
    ((_, job),) = queue.redis.events(queue.keys.jobs("normal"))
    assert (job["id"], job["prompt"], job["max_tokens"], job["meta"]) == (job_id, NASTY, "3", NASTY)
    deltas = [NASTY, "", *NASTY, NASTY * 20]
    tokens = [token(f"7-{at}", text, [at], at) for at, text in enumerate(deltas, 1)]
    write(queue, opened(7), *tokens, end(7, NASTY))
    reading = sample.read("job")
    assert reading.end() == 0
    assert reading.text == "".join(deltas) + NASTY


def test_a_reader_that_comes_first_waits(sample: Sample, queue: Queue) -> None:
    reading = sample.read("job")
    write(queue, opened(7))
    reading.wait_for("7-0")
    write(queue, token("7-1", "late", [1], 1), end(7))
    assert (reading.end(), reading.text) == (0, "late")


def test_an_attempt_that_goes_on_appends_and_a_reset_clears(sample: Sample, queue: Queue) -> None:
    write(queue, opened(7), token("7-1", "one ", [1], 1), opened(9, 1), token("9-1", "two", [2], 2))
    write(queue, ("9-2", {"e": "reset", "why": "beam", "n": 0}), token("9-3", "three", [3], 1), end(9, "!"))
    reading = sample.read("job")
    assert (reading.end(), reading.text) == (0, f"one two{ANEW}three!")


def test_an_error_event_ends_with_its_code_and_message(sample: Sample, queue: Queue) -> None:
    error = {"e": "error", "code": "bad_request", "message": 'n is "two": send a number', "retryable": 0}
    write(queue, opened(7), (f"7-{TERMINAL_SEQ}", error))
    reading = sample.read("job")
    assert reading.end() == 1
    assert reading.complaint == 'bad_request: n is "two": send a number'


def test_another_process_reads_on_behind_the_last_id(sample: Sample, queue: Queue) -> None:
    write(queue, opened(7), token("7-1", "one ", [1, 2], 2), token("7-2", "two ", [3], 3))
    first = sample.read("job")
    first.wait_for("7-2")
    first.process.kill()
    first.process.wait()
    write(queue, token("7-3", "three ", [4], 4), opened(9, 4), token("9-1", "four", [5], 5), end(9))
    second = sample.read("job", "7-2")
    assert (second.end(), first.text + second.text) == (0, "one two three four")
    assert sample.read("job", f"9-{TERMINAL_SEQ}").end() == 0


def test_behind_an_id_that_is_gone_all_is_read_again(sample: Sample, queue: Queue) -> None:
    write(queue, opened(9), token("9-1", "anew", [1], 1), end(9))
    reading = sample.read("job", "7-5")
    assert (reading.end(), reading.text) == (0, f"{ANEW}anew")


def test_what_does_not_follow_is_read_again_and_once_only(sample: Sample, queue: Queue) -> None:
    """An open below what is held, and a gap: the second reply was begun after the first was lost."""
    write(queue, opened(7), token("7-1", "lost", [1, 2], 2))
    reading = sample.read("job")
    reading.wait_for("7-1")
    queue.redis.call("MULTI")
    queue.redis.call("DEL", queue.keys.reply("job"))
    write(queue, opened(9), token("9-1", "anew", [3], 1))
    queue.redis.call("EXEC")
    reading.wait_for("9-1")
    write(queue, token("9-3", "gap", [5], 3))
    assert reading.end() != 0
    assert reading.text == f"lost{ANEW}anew{ANEW}anew"
    assert reading.complaint.startswith("reply_broken: ")


async def test_a_server_that_is_away_is_waited_for_and_what_it_forgot_is_read_again(
    sample: Sample, queue: Queue, proxy: Proxy
) -> None:
    sample.url = await url_through(proxy, sample.url)
    write(queue, opened(7), token("7-1", "kept ", [1], 1))
    reading = sample.read("job")
    await asyncio.to_thread(reading.wait_for, "7-1")
    server, proxy.server = proxy.server, None
    for line in proxy.lines():
        line.cut()
    write(queue, token("7-2", "and on ", [2], 2))
    proxy.server = server
    await asyncio.to_thread(reading.wait_for, "7-2")
    proxy.server = None
    for line in proxy.lines():
        line.cut()
    # A promoted replica has less: an attempt that was opened and read is gone, and the old one ends.
    queue.redis.call("DEL", queue.keys.reply("job"))
    write(queue, opened(7), token("7-1", "kept ", [1], 1), end(7, "for good"))
    proxy.server = server
    assert await asyncio.to_thread(reading.end) == 0
    assert reading.text == f"kept and on {ANEW}kept for good"


async def test_a_job_is_sent_once_the_server_is_back(sample: Sample, queue: Queue, proxy: Proxy) -> None:
    sample.url = await url_through(proxy, sample.url)
    server, proxy.server = proxy.server, None
    sending = sample.begin("submit", "hello")
    await asyncio.to_thread(eventually, lambda: proxy.num_accepted > 1, "a second try")
    assert sending.process.poll() is None
    proxy.server = server
    assert await asyncio.to_thread(sending.end) == 0
    ((_, job),) = queue.redis.events(queue.keys.jobs("normal"))
    assert job["id"] == sending.text.strip()


def misdirect(listener: socket.socket, port: int) -> None:
    """Play a Cluster's node that has another queue's slot, until the listener is closed."""
    with contextlib.suppress(OSError):
        while True:
            client, _ = listener.accept()
            with client, client.makefile("rb") as words:
                while line := words.readline():
                    command = [(words.readline(), words.readline())[1] for _ in range(int(line[1:]))]
                    is_login = command[0].strip().upper() == b"AUTH"
                    client.sendall(b"+OK\r\n" if is_login else b"-MOVED 7 127.0.0.1:%d\r\n" % port)


def test_of_a_cluster_the_node_that_has_the_queue_is_found(sample: Sample, queue: Queue) -> None:
    parts = urlsplit(sample.url)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        node_thread = threading.Thread(target=misdirect, args=(listener, parts.port), daemon=True)
        node_thread.start()
        sample.url = sample.url.replace(f":{parts.port}", f":{listener.getsockname()[1]}")
        job_id = sample.call("submit", "hello")
        write(queue, opened(7), token("7-1", "found ", [1], 1), end(7, "it"), job_id=job_id)
        reading = sample.read(job_id)
        assert (reading.end(), reading.text) == (0, "found it")
        listener.shutdown(socket.SHUT_RDWR)
        node_thread.join()


def test_a_full_server_is_waited_for(sample: Sample, queue: Queue) -> None:
    queue.redis.call("CONFIG", "RESETSTAT")
    queue.redis.call("CONFIG", "SET", "maxmemory", "1")
    try:
        sending = sample.begin("submit", "hello")
        eventually(lambda: num_refused(queue) > 1, "a second try")
    finally:
        queue.redis.call("CONFIG", "SET", "maxmemory", "0")
    assert sending.end() == 0
    ((_, job),) = queue.redis.events(queue.keys.jobs("normal"))
    assert job["id"] == sending.text.strip()


def num_refused(queue: Queue) -> int:
    """How many XADDs the server has refused."""
    found = re.search(r"cmdstat_xadd:.*rejected_calls=(\d+)", queue.redis.call("INFO", "commandstats").decode())
    return int(found[1]) if found else 0


def test_a_begun_job_that_is_wholly_gone_is_given_up_though_it_had_no_limit(sample: Sample, queue: Queue) -> None:
    write(queue, opened(7), token("7-1", "one", [1], 1))
    reading = sample.read("job", GONE_S="1")
    reading.wait_for("7-1")
    queue.redis.call("DEL", queue.keys.reply("job"))
    assert reading.end() != 0
    assert reading.complaint.startswith("reply_lost: job job is unknown")


@pytest.mark.parametrize("words", ["", "stream", "stream q", "submit q hello max_tokens", "status q a b", "dance q a"])
def test_wrong_words_are_answered_with_the_right_ones(sample: Sample, words: str) -> None:
    ran = subprocess.run(
        [*sample.command, *words.split()], env=sample._environment({}), capture_output=True, timeout=60, check=False
    )
    assert (ran.returncode, ran.stdout) == (64, b"")
    assert b"submit QUEUE PROMPT [NAME VALUE]..." in ran.stderr


def test_what_nobody_knows_is_given_up_past_the_jobs_time_limit(sample: Sample, queue: Queue) -> None:
    unknown = sample.read("job", LIMIT_S="1")
    queue.redis.call("HSET", queue.keys.state("gone"), "status", "done")
    gone = sample.read("gone", LIMIT_S="1")
    assert (unknown.end() != 0, gone.end() != 0) == (True, True)
    assert unknown.complaint.startswith("reply_lost: job job is unknown")
    assert gone.complaint.startswith("reply_lost: job gone ")


def test_several_choices_are_told_apart(sample: Sample, queue: Queue) -> None:
    write(queue, opened(7), token("7-1", "zero", [1], 1, index=0), token("7-2", "one", [2, 3], 3, index=1))
    write(queue, token("7-3", "!", [4], 4, index=0), token("7-4", "?", [5], 5, index=1), end(7))
    reading = sample.read("job")
    assert reading.end() == 0
    assert reading.text == "zero!\n[choice 1]\none?"


@pytest.fixture
def client_url(valkey_url: str, queue: Queue) -> Iterator[str]:
    """The server for somebody who has a client's rights and no more."""
    user = f"client-{queue.keys.queue}"
    queue.redis.call("ACL", "SETUSER", user, "reset", "on", ">secret", *rule_words(client_rule()))
    yield f"redis://{user}:secret@{valkey_url.rpartition('@')[2]}"
    queue.redis.call("ACL", "DELUSER", user)


def test_a_clients_rights_are_enough(sample: Sample, queue: Queue, client_url: str) -> None:
    sample.url = client_url
    job_id = sample.call("submit", "hello")
    assert sample.call("status", job_id) == "unknown"
    sample.call("cancel", job_id)
    write(queue, opened(7), token("7-1", "one ", [1], 1), end(7, "two"), job_id=job_id)
    reading = sample.read(job_id)
    assert (reading.end(), reading.text) == (0, "one two")
    behind = sample.read(job_id, "7-1", LIMIT_S="1")
    assert (behind.end(), behind.text) == (0, "two")
    assert sample.read("nobody", LIMIT_S="1").end() != 0


def test_a_clients_rights_are_enough_for_the_one_for_python(queue: Queue, client_url: str) -> None:
    with Client(client_url, queue.keys.queue) as client:
        job_id = client.submit("hello", ttl_ms=200)
        assert client.status(job_id) is None
        client.cancel(job_id)
        with pytest.raises(ReplyLostError):
            client.result(job_id)
        write(queue, opened(7), token("7-1", "one ", [1], 1), end(7, "two"), job_id=job_id)
        assert client.result(job_id).text == "one two"
        assert [event.text for event in client.stream(job_id, after="7-1")] == ["two"]


def test_a_login_that_is_refused_is_told_at_once(sample: Sample) -> None:
    sample.url = f"redis://default:wrong@{sample.url.rpartition('@')[2]}"
    reading = sample.read("job", RETRY_S="3600")
    assert reading.end() != 0
    assert "WRONGPASS" in reading.complaint or "NOAUTH" in reading.complaint
    assert "wrong@" not in reading.complaint


def test_wrong_words_are_told(sample: Sample) -> None:
    reading = sample.begin("stram", "job")
    assert reading.end() != 0
    assert "stream" in (reading.folder / "err").read_text()


def test_a_server_that_is_not_there_is_an_error(sample: Sample) -> None:
    sample.url = "redis://127.0.0.1:1"
    reading = sample.read("job", RETRY_S="0")
    assert reading.end() != 0
    assert reading.complaint.startswith("connection_lost: ")


NODE_SCRIPT = """
import { Client, PagemillError, Reply } from %(module)s;
const client = new Client(process.env.REDIS_URL, %(queue)s, { retryMs: 20000 });
const reply = await client.result("many");
console.log(JSON.stringify(reply.choices));
const kept = new Reply();
for await (const event of client.stream("many")) {
  kept.add(event);
  if (event.id === "7-2") break;
}
const again = await client.result("many", { reply: new Reply(JSON.parse(JSON.stringify(kept))) });
console.log(JSON.stringify(again.choices));
try {
  await client.result("failed");
} catch (error) {
  console.log(JSON.stringify([error instanceof PagemillError, error.code, error.retryable, error.details]));
}
await client.result("junk").catch((error) => console.log(JSON.stringify([error.code])));
await new Client("unix:///tmp/x", "q").status("x").catch((error) => console.log(JSON.stringify([error.code])));
const messages = [{ role: "user", content: "hé" }];
const fields = { stream: false, temperature: 0.5, stop: ["a"], seed: undefined };
await client.submit(messages, { id: "chat", lane: "low", ...fields });
const sent = await Promise.all(["a", "b", "c"].map((id) => client.submit("x", { id, lane: "high" })));
console.log(sent.join());
for (const wrong of [{ id: "{x}" }, { lane: "middle" }]) {
  await client.submit("x", wrong).catch((error) => console.log(error.code));
}
client.close();
"""


def test_the_module_for_node_has_choices_resuming_and_errors(valkey_url: str, queue: Queue) -> None:
    choices = [{"index": 0, "finish": "stop"}, {"index": 1, "finish": "length"}]
    write(queue, opened(7), token("7-1", "zé", [1], 1, index=0), token("7-2", "o", [2, 3], 3, index=1), job_id="many")
    write(queue, token("7-3", "!", [4], 4, index=0), end(7, choices=json.dumps(choices)), job_id="many")
    error = {"e": "error", "code": "overloaded", "message": "later", "retryable": 1, "details": '{"retry_after_ms":9}'}
    write(queue, opened(7), (f"7-{TERMINAL_SEQ}", error), job_id="failed")
    write(queue, opened(7), ("7-1", {"e": "token", "text": "", "ids": "[1", "n": 1}), job_id="junk")
    names = {"module": json.dumps(str(FOLDER / "pagemill.mjs")), "queue": json.dumps(queue.keys.queue)}
    ran = run_node(NODE_SCRIPT % names, valkey_url)
    lines = ran.splitlines()
    told = [{"text": "zé!", "ids": [1, 4], "finish": "stop"}, {"text": "o", "ids": [2, 3], "finish": "length"}]
    assert [json.loads(line) for line in lines[:2]] == [told, told]
    assert json.loads(lines[2]) == [True, "overloaded", True, {"retry_after_ms": 9}]
    assert [json.loads(line) for line in lines[3:5]] == [["reply_broken"], ["bad_request"]]
    assert lines[5:] == ["a,b,c", "bad_request", "bad_request"]
    ((_, job),) = queue.redis.events(queue.keys.jobs("low"))
    assert job == {
        "id": "chat",
        "messages": '[{"role":"user","content":"hé"}]',
        "stream": "0",
        "temperature": "0.5",
        "stop": '["a"]',
    }


def trickle(listener: socket.socket, server: tuple[str, int]) -> None:
    """Carry one client's commands to the server, and each byte of the answers back in a packet of its own."""
    client, _ = listener.accept()
    with client, socket.create_connection(server) as upstream:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            for ready in select.select([client, upstream], [], [])[0]:
                data = ready.recv(4096)
                if not data:
                    return
                if ready is client:
                    upstream.sendall(data)
                else:
                    for byte in data:
                        client.sendall(bytes([byte]))


def test_characters_that_come_in_pieces_are_put_together(valkey_url: str, queue: Queue) -> None:
    write(queue, opened(7), token("7-1", "日本語 ", [1], 1), end(7, "🙂é"))
    parts = urlsplit(valkey_url)
    names = {"module": json.dumps(str(FOLDER / "pagemill.mjs")), "queue": json.dumps(queue.keys.queue)}
    script = """
import { Client } from %(module)s;
const client = new Client(process.env.REDIS_URL, %(queue)s);
console.log((await client.result("job")).text);
client.close();
"""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = threading.Thread(target=trickle, args=(listener, (parts.hostname, parts.port)))
        relay.start()
        url = valkey_url.replace(f":{parts.port}", f":{listener.getsockname()[1]}")
        assert run_node(script % names, url) == "日本語 🙂é\n"
        relay.join()


def run_node(script: str, url: str) -> str:
    """What a module prints."""
    command = [node(), "--input-type=module", "--eval", script]
    ran = subprocess.run(command, env={"REDIS_URL": url}, capture_output=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr.decode()
    return ran.stdout.decode()
