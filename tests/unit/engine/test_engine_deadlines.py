"""A job's deadline on its way: to the engine as time that is left, and back as an error that says where it was."""

import pytest

from scheduler import FinishReason, SamplingParams, SequenceOutput, SequenceStats
from scheduler.output import ModelRunnerOutput, SchedulerOutput
from tests.unit.scheduler.makers import make_scheduler
from tests.unit.text.tokenizers import tokenizer_of
from worker.choices import Choices
from worker.engine import Engine, EngineRequest
from worker.errors import ErrorCode
from worker.generation import Generation
from worker.job import Job, JobTimes, WorkerNames
from worker.protocol import GenerateRequest, parse_envelope
from worker.streams.leases import Entry
from worker.streams.reply_writer import ReplyWriter


class SlowRunner:
    """Each step takes a second of a clock that stands still otherwise."""

    last_forward_s = 1.0

    def __init__(self) -> None:
        self.now = 1_000.0

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.now += 1.0
        return ModelRunnerOutput(dict.fromkeys(output.chunks.sampled_ids, 7))


def test_the_engine_drops_a_sequence_when_the_time_that_was_left_is_over() -> None:
    runner = SlowRunner()
    engine = Engine(make_scheduler(), runner, check_invariants="step", clock=lambda: runner.now)
    sampling = SamplingParams(max_tokens=50)
    engine.add(EngineRequest("pressed", (1, 2), sampling, seed=0, deadline_in_s=3.5))
    engine.add(EngineRequest("free", (1, 2), sampling, seed=0))
    outputs = [output for _ in range(6) for output in engine.step()]
    told = [output for output in outputs if output.seq_id == "pressed"]
    assert [output.new_token_ids for output in told] == [(7,), (7,), (7,), ()]
    assert told[-1].finish_reason is FinishReason.DEADLINE
    assert sum(output.seq_id == "free" for output in outputs) == 6


def pressed_job() -> Job:
    """One that came at 1,000 ms and has 500."""
    fields = {b"prompt": b"x", b"id": b"j", b"ttl_ms": b"500"}
    envelope = parse_envelope("normal", "1000-0", fields, now_ms=1005)
    writer = ReplyWriter(envelope.id, 1005, lambda _: None, lambda _: None)
    job = Job(Entry("normal", "1000-0", fields), envelope, writer, JobTimes(1000, 1005))
    job.request = GenerateRequest(id=envelope.id, prompt="x")
    job.prompt_ids = (1, 2)
    job.choices = Choices(job.seq_id, [Generation(SamplingParams(), tokenizer_of("byte-level"), job.prompt_ids)])
    return job


def test_a_job_asks_for_what_is_left_of_its_time() -> None:
    assert [request.deadline_in_s for request in pressed_job().engine_requests(now_ms=1200)] == [0.3]


@pytest.mark.parametrize(("first_scheduled_s", "where"), [(None, "queued"), (2.0, "running")])
def test_an_overdue_sequence_ends_its_job_with_deadline_exceeded(first_scheduled_s: float | None, where: str) -> None:
    job = pressed_job()
    stats = SequenceStats(2, 0, 0, 0, 0, 0, 1.0, first_scheduled_s, None, 3.0)
    output = SequenceOutput(job.seq_id, (), FinishReason.DEADLINE, stats=stats)
    assert not job.absorb(output, 1500, WorkerNames("w", "m", "f"))
    assert job.is_over
    assert job.outcome == ErrorCode.DEADLINE_EXCEEDED
    terminal = job.writer.next_event(1500)
    assert terminal is not None
    assert where in str(terminal.fields)
