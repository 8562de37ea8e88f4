"""The trace that a worker records: lengths and times, nothing that anybody said, and the simulator reads it."""

import json
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from ops.simulate.traces import read_trace
from scheduler import FinishReason, SamplingParams, SequenceOutput
from tests.unit.text.tokenizers import tokenizer_of
from worker.choices import Choices
from worker.errors import StartupError
from worker.generation import Generation
from worker.job import Job, JobTimes
from worker.protocol import GenerateRequest, parse_envelope
from worker.streams.leases import Entry
from worker.streams.reply_writer import ReplyWriter
from worker.trace_recorder import TraceRecorder

PROMPT_IDS = (5, 6, 7)


def job(num_generated: int = 4, tenant: str = "", priority: int = 0) -> Job:
    """A job that came at 1,000 ms, and has its first token since 1,030."""
    fields = {b"prompt": b"a secret", b"tenant": tenant.encode(), b"id": b"job-of-mine"}
    envelope = parse_envelope("normal", "1000-0", fields, now_ms=1005)
    writer = ReplyWriter(envelope.id, 1005, lambda _: None, lambda _: None)
    made = Job(Entry("normal", "1000-0", fields), envelope, writer, JobTimes(1000, 1005, first_token_ms=1030))
    made.request = GenerateRequest(id=envelope.id, prompt="a secret", tenant=tenant, priority=priority)
    made.prompt_ids = PROMPT_IDS
    made.choices = Choices("a", [Generation(SamplingParams(), tokenizer_of("byte-level"), PROMPT_IDS)])
    made.choices[0].absorb(SequenceOutput("a", (1,) * num_generated, FinishReason.LENGTH))
    return made


def record(path: Path, *jobs: Job) -> list[dict[str, Any]]:
    recorder = TraceRecorder(path)
    for each in jobs:
        recorder.record(each, 1100)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_line_tells_when_a_job_came_and_how_long_it_was(tmp_path: Path) -> None:
    expected = {"arrival_ms": 1000, "prompt_tokens": 3, "output_tokens": 4, "end_ms": 100, "first_token_ms": 30}
    assert record(tmp_path / "trace.jsonl", job()) == [expected]


def test_the_simulator_reads_what_is_recorded(tmp_path: Path) -> None:
    record(tmp_path / "trace.jsonl", job(priority=3))
    record(tmp_path / "trace.jsonl", job(num_generated=9, tenant="acme"))
    trace = read_trace(tmp_path / "trace.jsonl")
    assert trace.kind == "pagemill"
    assert [(each.num_prompt_tokens, each.num_output_tokens, each.priority) for each in trace.requests] == [
        (3, 4, 3),
        (3, 9, 0),
    ]


def test_tenants_are_told_apart_but_not_named_and_no_text_or_id_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    first, other, again, none = record(path, job(tenant="acme"), job(tenant="umbrella"), job(tenant="acme"), job())
    assert first["tenant"] == again["tenant"] != other["tenant"]
    assert "tenant" not in none
    text = path.read_text(encoding="utf-8")
    assert not any(word in text for word in ("acme", "umbrella", "secret", "job-of-mine"))
    assert record(tmp_path / "other.jsonl", job(tenant="acme"))[0]["tenant"] != first["tenant"]


def test_the_first_token_of_a_job_that_another_worker_began_is_not_told(tmp_path: Path) -> None:
    resumed = job()
    resumed.num_replayed = 2
    assert "first_token_ms" not in record(tmp_path / "trace.jsonl", resumed)[0]


def test_jobs_that_generated_nothing_are_left_out(tmp_path: Path) -> None:
    not_understood = job()
    not_understood.request = not_understood.choices = None
    assert record(tmp_path / "trace.jsonl", not_understood, job(num_generated=0)) == []


def test_a_file_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"can't write the trace .*: Is a directory: set record_trace to a file"):
        TraceRecorder(tmp_path)


def test_a_file_that_cannot_be_written_any_more_is_one_warning(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "trace.jsonl"
    path.parent.mkdir()
    recorder = TraceRecorder(path)
    path.unlink()
    path.parent.rmdir()
    with capture_logs() as events:
        recorder.record(job(), 1100)
        recorder.record(job(), 1100)
    assert [(event["event"], event["log_level"]) for event in events] == [("trace_unwritten", "warning")]
    path.parent.mkdir()
    recorder.record(job(), 1100)
    assert len(read_trace(path).requests) == 1
