"""Whatever goes into the pipe comes out equal."""

import msgpack
import pytest

from scheduler.output import FinishReason, Hypothesis, SchedulerStats, SequenceOutput, SequenceStats
from scheduler.sampling_params import SamplingParams
from worker.engine import EngineRequest, StepTimes
from worker.engine_config import EngineInfo
from worker.engine_messages import (
    Abort,
    Add,
    Begins,
    Close,
    Command,
    Died,
    Event,
    Notice,
    Progress,
    Ready,
    Refused,
    StepReport,
    pack_command,
    pack_event,
    unpack_command,
    unpack_event,
)

SAMPLING = SamplingParams(temperature=0.5, top_k=3, seed=-7, stop=("a", "é"), stop_token_ids=(1, 2), max_tokens=None)
STATS = SequenceStats(3, 4, 1, 0, 0, 0, 1.5, 2.5, None, 3.5, num_saved_blocks=6)
HYPOTHESES = (
    Hypothesis((1, 2), -0.5, -0.25, FinishReason.EOS),
    Hypothesis((3,), -2.5, -2.5, FinishReason.LENGTH),
)


@pytest.mark.parametrize(
    "command",
    [
        Add(EngineRequest("id", (1, 2), SAMPLING, 2**63 - 1, (3,), -5, "tenant", "salt", False, 2.5, "family")),
        Add(EngineRequest("id", (1,), SamplingParams(), 0)),
        Add(EngineRequest("id", (1,), SamplingParams(beam_width=4, early_stopping="never", length_penalty=0.5), 0)),
        Abort("id"),
        Close(),
    ],
)
def test_commands_survive_the_pipe(command: Command) -> None:
    assert unpack_command(msgpack.unpackb(pack_command(command))) == command


@pytest.mark.parametrize(
    "event",
    [
        Progress("loading", 3, 10),
        Notice("the cache is damaged"),
        Ready(EngineInfo(512, 64, 16, 8, 320, 4096, "cpu", "float32", "print", 1)),
        Ready(EngineInfo(512, 64, 16, 8, 320, 4096, "cpu", "float32", "print", 1, 32, 6.5e9, 300.5)),
        Refused("no such file"),
        Died("a reason"),
        Begins(("a", "b")),
        StepReport(
            (
                SequenceOutput("a", (1, 2)),
                SequenceOutput("c", (), FinishReason.EOS, stats=STATS, hypotheses=HYPOTHESES),
                SequenceOutput("b", (), FinishReason.ERROR, "why", STATS, is_out_of_memory=True),
            ),
            SchedulerStats(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13),
            StepTimes(5, 0.5, 0.25),
        ),
    ],
)
def test_events_survive_the_pipe(event: Event) -> None:
    assert unpack_event(msgpack.unpackb(pack_event(event))) == event
