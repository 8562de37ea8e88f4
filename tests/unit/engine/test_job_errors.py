"""What the engine says of a sequence that can't go on, as the client reads it."""

from pathlib import Path

import pytest

from model.tokenizer import Tokenizer
from scheduler.output import FinishReason, SequenceOutput
from scheduler.sampling_params import SamplingParams
from tests.tiny_checkpoint import write_tiny_checkpoint
from worker.choices import Choices
from worker.generation import Generation
from worker.job import Job, JobTimes, WorkerNames
from worker.protocol import parse_envelope
from worker.streams.leases import Entry
from worker.streams.reply_writer import ReplyWriter


@pytest.mark.parametrize(
    ("is_out_of_memory", "code"), [(True, "out_of_memory"), (False, "engine_error")], ids=["memory", "other"]
)
def test_a_failed_sequence_ends_its_job_with_the_code_of_its_failure(
    tmp_path: Path, is_out_of_memory: bool, code: str
) -> None:
    tokenizer = Tokenizer.from_checkpoint(write_tiny_checkpoint(tmp_path))
    entry = Entry("jobs", "5-0", {b"v": b"1", b"id": b"a", b"prompt": b"x"})
    envelope = parse_envelope(entry.lane, entry.entry_id, entry.fields, now_ms=10)
    writer = ReplyWriter("a", 100, lambda _: None, lambda _: None)
    job = Job(entry, envelope, writer, JobTimes(5, 10))
    job.choices = Choices(job.seq_id, [Generation(SamplingParams(), tokenizer, (1,))])
    failure = SequenceOutput(job.seq_id, (), FinishReason.ERROR, "why", is_out_of_memory=is_out_of_memory)
    job.absorb(failure, 20, WorkerNames("w", "m", "f"))
    event = writer.next_event(20)
    assert event is not None
    told = dict(zip(event.fields[::2], event.fields[1::2], strict=True))
    assert (told["e"], told["code"], told["retryable"]) == ("error", code, "1")
    assert told["message"] == "why: send the job again with another id"
    assert job.outcome == code
