"""A worker records what it served, and the simulator runs it again."""

import json
from pathlib import Path

import pytest

from ops import cli
from tests.e2e.conftest import StartWorker
from tests.e2e.workers import Queue, eventually


def test_a_recorded_trace_can_be_simulated(
    start_worker: StartWorker, own_queue: Queue, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    start_worker(record_trace=path).wait_until_ready()
    ids = [own_queue.enqueue(prompt="x" * num, max_tokens=num, ignore_eos=1, tenant="acme") for num in (5, 9, 7)]
    replies = [own_queue.wait(job_id) for job_id in ids]
    own_queue.enqueue(prompt="never", max_tokens="many")
    own_queue.assert_settled()
    # A line is written just after its job has left the queue.
    eventually(lambda: len(path.read_text(encoding="utf-8").splitlines()) == 3, "three lines")

    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    usages = [reply.field("usage") for reply in replies]
    recorded = sorted((line["prompt_tokens"], line["output_tokens"]) for line in lines)
    assert recorded == sorted((usage["prompt_tokens"], usage["completion_tokens"]) for usage in usages)
    assert all(0 <= line["first_token_ms"] <= line["end_ms"] for line in lines)

    assert cli.main(["simulate", str(path)]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["trace"]["format"] == "pagemill"
    assert report["result"]["output_tokens"] == 5 + 9 + 7
