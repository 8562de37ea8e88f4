"""A worker that dies after any event of a reply: whoever goes on writes what would have come anyway."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.workers import Queue, Reply, fresh_keys
from tests.faults.scripted import ScriptedWorker
from tests.wire.resp import Part

CHAT = json.dumps([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}])
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": 1}
JOBS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "a slow river", **GREEDY},
    "chat": {"messages": CHAT, **GREEDY},
    "choices": {"prompt": "carries small boats", "n": 2, **GREEDY},
    "unstreamed": {"prompt": "past the town", "stream": 0, **GREEDY},
}


@pytest.fixture(scope="module")
def queue(
    tiny_model: Path, start_server: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Queue]:
    """A queue that a worker of the made-up model serves, which draws each token from all that come before it."""
    url, queue = start_server("valkey-9.1"), Queue(start_server("valkey-9.1"), fresh_keys())
    with ScriptedWorker(tiny_model, url, queue.keys.queue, tmp_path_factory.mktemp("logs"), step_ms=3) as worker:
        worker.wait_until_ready()
        yield queue
    queue.close()


def told(reply: Reply) -> dict[str, Any]:
    """What a client has of a reply at its end: text and ids of each choice, and why each ended."""
    by_choice: dict[int, list[Any]] = {}
    for _, fields in reply.events:
        choice = by_choice.setdefault(int(fields.get("index", 0)), ["", []])
        choice[0] += fields.get("text", "")
        if fields["e"] == "token":
            choice[1] += json.loads(fields["ids"])
    end = reply.terminal
    whole = json.loads(end["ids"]) if "ids" in end else None
    return {"choices": by_choice, "finish": end["finish"], "ends": end.get("choices"), "whole": whole}


def leave_unfinished(queue: Queue, job_id: str, events: list[tuple[str, dict[str, str]]]) -> None:
    """The reply as a worker left it that died after these events."""
    for event_id, fields in events:
        flat: list[Part] = [part for pair in fields.items() for part in pair]
        queue.redis.call("XADD", queue.keys.reply(job_id), event_id, *flat)


def checkpoints(reply: Reply) -> list[tuple[str, dict[str, str]]]:
    """Of an unstreamed reply: an open, and one token an event, as a worker in a hurry would store them."""
    ids = json.loads(reply.terminal["ids"])
    events = [reply.events[0]]
    for count, token_id in enumerate(ids, 1):
        events.append(
            (f"{events[0][0].partition('-')[0]}-{count}", {"e": "token", "ids": f"[{token_id}]", "n": f"{count}"})
        )
    return events


@pytest.mark.parametrize("kind", [*JOBS, "stop", "tail"])
def test_after_a_death_at_any_event_the_reply_is_what_it_would_have_been(queue: Queue, kind: str) -> None:
    job = JOBS.get(kind) or (stopping_job(queue) if kind == "stop" else tailed_job(queue))
    whole = queue.run(id=f"{kind}-whole", **job)
    events = checkpoints(whole) if kind == "unstreamed" else whole.events[:-1]
    assert len(events) > 3
    for cut in range(1, len(events) + 1):
        leave_unfinished(queue, f"{kind}-{cut}", events[:cut])
        queue.enqueue(id=f"{kind}-{cut}", **job)
    for cut in range(1, len(events) + 1):
        resumed = queue.wait(f"{kind}-{cut}")
        assert resumed.events[:cut] == events[:cut]
        covered = events[cut - 1][1].get("n", "0")
        assert [fields["from"] for _, fields in resumed.events if fields["e"] == "open"] == ["0", covered]
        assert resumed.field("usage")["replayed_tokens"] == int(covered)
        after, before = told(resumed), told(whole)
        if kind == "unstreamed":
            after.pop("choices"), before.pop("choices")
        assert after == before, f"cut after {cut} of {len(events)} events"
    queue.assert_settled()


def stopping_job(queue: Queue) -> dict[str, Any]:
    """A job that ends at a stop string of three characters, which a death may find half said."""
    job: dict[str, Any] = {"prompt": "the quiet town", **GREEDY}
    text = queue.run(**job).text
    stop = text[12:15]
    assert text.index(stop) == 12
    return job | {"stop": stop}


def tailed_job(queue: Queue) -> dict[str, Any]:
    """A job whose last character is held back to the end, and goes out with the last ids, before the `end` event."""
    job: dict[str, Any] = {"prompt": "where nobody sleeps", **GREEDY}
    text = queue.run(**job).text
    job["stop"] = f"{text[-1]} and what never comes"
    last = [fields for _, fields in queue.run(**job).events if fields["e"] == "token"][-1]
    assert last["text"].endswith(text[-1])
    return job
