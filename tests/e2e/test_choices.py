"""Jobs that ask for several choices, by raw commands through a real worker: told apart by index, resumed one by one."""

import json
import signal
from typing import Any

import pytest

from scheduler.family import choice_seed
from tests.e2e.conftest import StartWorker
from tests.e2e.workers import Queue, Reply, WorkerProcess, eventually

SEEDED: dict[str, Any] = {"prompt": "several answers to one prompt", "temperature": 1.2, "seed": 21, "ignore_eos": 1}


def by_index(reply: Reply, num_choices: int) -> list[tuple[list[int], str]]:
    """Ids and text of each choice as a client gathers them, with `n` checked against all of them together."""
    ids: list[list[int]] = [[] for _ in range(num_choices)]
    text = [""] * num_choices
    for _, fields in reply.events:
        if fields["e"] == "token":
            index = int(fields["index"])
            ids[index] += json.loads(fields["ids"])
            text[index] += fields.get("text", "")
            assert int(fields["n"]) == sum(map(len, ids))
    return list(zip(ids, text, strict=True))


def singles(queue: Queue, num_choices: int, **fields: Any) -> list[tuple[list[int], str]]:
    """What the choices should be: jobs of one choice with the seeds that follow."""
    job_ids = [queue.enqueue(**(fields | {"seed": choice_seed(fields["seed"], index)})) for index in range(num_choices)]
    replies = [queue.wait(job_id) for job_id in job_ids]
    return [(reply.ids, reply.text) for reply in replies]


def test_streamed_choices_are_told_apart_by_index(queue: Queue) -> None:
    reply = queue.run(**SEEDED, max_tokens=20, n=4)
    assert by_index(reply, 4) == singles(queue, 4, **SEEDED, max_tokens=20)
    assert reply.field("choices") == [{"index": index, "finish": "length"} for index in range(4)]
    assert (reply.terminal["finish"], reply.terminal["text"]) == ("length", "")
    usage = reply.field("usage")
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(SEEDED["prompt"]), 80)
    queue.assert_settled()


def test_choices_of_a_greedy_job_are_all_the_same(queue: Queue) -> None:
    job = SEEDED | {"temperature": 0, "max_tokens": 12}
    (alone,) = singles(queue, 1, **job)
    assert by_index(queue.run(**job, n=3), 3) == [alone] * 3


def test_without_streaming_the_end_has_all_choices(queue: Queue) -> None:
    reply = queue.run(**SEEDED, max_tokens=20, n=3, stream=0)
    expected = singles(queue, 3, **SEEDED, max_tokens=20)
    assert reply.field("choices") == [
        {"index": index, "finish": "length", "text": text, "ids": ids} for index, (ids, text) in enumerate(expected)
    ]
    assert all("text" not in fields for _, fields in reply.events if fields["e"] == "token")


def test_best_of_returns_some_of_the_choices_and_writes_nothing_before(queue: Queue) -> None:
    job = SEEDED | {"max_tokens": 16, "stream": 0}
    every = [each["ids"] for each in queue.run(**job, n=5).field("choices")]
    one, two = queue.run(**job, best_of=5), queue.run(**job, best_of=5, n=2)
    assert [fields["e"] for _, fields in one.events] == ["open", "end"]
    best = [each["ids"] for each in two.field("choices")]
    assert one.field("ids") == best[0]
    assert all(ids in every for ids in best)
    assert len(two.field("choices")) == 2
    assert two.field("usage")["completion_tokens"] == 5 * 16
    refused = queue.run(**(job | {"stream": 1}), best_of=5)
    assert refused.terminal["code"] == "bad_request"
    assert "set stream to 0" in refused.terminal["message"]


def test_a_drawn_seed_is_told_and_gives_the_choices_again(queue: Queue) -> None:
    job = {name: value for name, value in SEEDED.items() if name != "seed"} | {"max_tokens": 8, "n": 2}
    first = queue.run(**job)
    seeds = [fields["seed"] for _, fields in first.events if "seed" in fields]
    assert len(seeds) == 1
    assert by_index(queue.run(**job, seed=seeds[0]), 2) == by_index(first, 2)


def test_forks_and_saved_blocks_are_metrics(served: tuple[WorkerProcess, Queue]) -> None:
    worker, queue = served
    queue.run(**SEEDED, max_tokens=4, n=4)
    _, page = worker.get("/metrics")
    values = dict(line.split(" ") for line in page.splitlines() if line.startswith("pagemill_") and "{" not in line)
    assert float(values["pagemill_forks_total"]) >= 3
    assert float(values["pagemill_copied_blocks_total"]) >= 3
    assert "pagemill_kv_blocks_saved" in values


# Checkpoints of an unstreamed job come once a second: it must take longer than that.
@pytest.mark.parametrize(("stream", "num_choices", "max_tokens"), [(1, 3, 500), (0, 2, 1500)])
def test_a_killed_workers_choices_go_on_at_a_peer_each_where_it_was(
    start_worker: StartWorker, own_queue: Queue, stream: int, num_choices: int, max_tokens: int
) -> None:
    job = SEEDED | {"max_tokens": max_tokens, "n": num_choices}
    first = start_worker(lease_ms=1500, num_kv_blocks=256)
    first.wait_until_ready()
    job_id = own_queue.enqueue(**job, stream=stream)

    def has_begun() -> bool:
        told = {fields["index"] for _, fields in own_queue.reply(job_id).events if fields["e"] == "token"}
        return len(told) == num_choices

    eventually(has_begun, "tokens of all choices")
    first.signal(signal.SIGKILL)
    first.wait()
    first.assert_gone()
    start_worker(lease_ms=1500, num_kv_blocks=256).wait_until_ready()
    reply = own_queue.wait(job_id)
    covered = [int(fields["from"]) for _, fields in reply.events if fields["e"] == "open"]
    assert len(covered) == 2
    assert reply.field("usage")["replayed_tokens"] == covered[1] > 0
    expected = singles(own_queue, num_choices, **SEEDED, max_tokens=max_tokens)
    if stream:
        assert by_index(reply, num_choices) == expected
    else:
        assert [(each["ids"], each["text"]) for each in reply.field("choices")] == expected
    own_queue.assert_settled()
