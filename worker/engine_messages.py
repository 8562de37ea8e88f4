"""What crosses the pipe between the service process and the engine process: msgpack arrays, first element the kind.

To the engine:    ["add", request]  ["abort", seq_id]  ["close"]
From the engine:  ["progress", stage, done, total]  ["notice", message]  ["ready", info]  ["refused", message]
                  ["begins", seq_ids]  ["step", step, outputs, stats, [steps, step_s, forward_s]]  ["died", message]
"""

from collections.abc import Sequence as SequenceABC
from dataclasses import astuple, dataclass, fields
from typing import Any

import msgpack

from scheduler.output import FinishReason, Hypothesis, SchedulerStats, SequenceOutput, SequenceStats
from scheduler.sampling_params import SamplingParams
from worker.engine import EngineRequest, StepTimes
from worker.engine_config import EngineInfo


@dataclass(frozen=True, slots=True)
class Add:
    """Queue a sequence."""

    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop a sequence."""

    seq_id: str


@dataclass(frozen=True, slots=True)
class Close:
    """Stop the engine; what runs is dropped."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the start has come: `done` of `total` units of `stage`."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Notice:
    """A line for the log, of something that the start came by without."""

    message: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine stands."""

    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine can't be built; `message` is one line that says what to do."""

    message: str


@dataclass(frozen=True, slots=True)
class Begins:
    """The engine is about to take these sequences in, or to compute them; told where they are others than before."""

    seq_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step brought. `step_s` and `forward_s` in `times` are totals since the start."""

    outputs: tuple[SequenceOutput, ...]
    stats: SchedulerStats
    times: StepTimes


@dataclass(frozen=True, slots=True)
class Died:
    """The engine hit an error of its own and ends."""

    message: str


Command = Add | Abort | Close
Event = Progress | Notice | Ready | Refused | Begins | StepReport | Died


def pack_command(command: Command) -> bytes:
    """A command as bytes for the pipe."""
    match command:
        case Add(request):
            values = [getattr(request, field.name) for field in fields(request)]
            values = [astuple(value) if isinstance(value, SamplingParams) else value for value in values]
            return _pack(["add", values])
        case Abort(seq_id):
            return _pack(["abort", seq_id])
        case Close():
            return _pack(["close"])


def unpack_command(message: SequenceABC[Any]) -> Command:
    """The command that `pack_command` packed."""
    if message[0] == "add":
        values = _by_name(EngineRequest, message[1])
        values["sampling"] = SamplingParams(**_by_name(SamplingParams, values["sampling"]))
        return Add(EngineRequest(**values))
    if message[0] == "abort":
        return Abort(message[1])
    return Close()


def pack_event(event: Event) -> bytes:
    """An event as bytes for the pipe."""
    message: list[Any]
    match event:
        case Progress(stage, done, total):
            message = ["progress", stage, done, total]
        case Notice(text):
            message = ["notice", text]
        case Ready(info):
            message = ["ready", astuple(info)]
        case Refused(text):
            message = ["refused", text]
        case Begins(seq_ids):
            message = ["begins", seq_ids]
        case StepReport(outputs, stats, times):
            message = ["step", [_pack_output(output) for output in outputs], astuple(stats), astuple(times)]
        case Died(text):
            message = ["died", text]
    return _pack(message)


# Events of nothing but a line of text.
_TEXT_EVENTS: dict[str, type[Notice] | type[Refused] | type[Died]] = {
    "notice": Notice,
    "refused": Refused,
    "died": Died,
}


def unpack_event(message: SequenceABC[Any]) -> Event:
    """The event that `pack_event` packed."""
    kind = message[0]
    if kind == "step":
        return StepReport(
            tuple(_unpack_output(values) for values in message[1]),
            SchedulerStats(*message[2]),
            StepTimes(*message[3]),
        )
    if kind == "begins":
        return Begins(tuple(message[1]))
    if kind == "progress":
        return Progress(*message[1:])
    if kind == "ready":
        return Ready(EngineInfo(*message[1]))
    return _TEXT_EVENTS[kind](message[1])


def _pack_output(output: SequenceOutput) -> list[Any]:
    stats = None if output.stats is None else astuple(output.stats)
    return [
        output.seq_id, output.new_token_ids, output.finish_reason, output.error, stats, output.is_out_of_memory,
        output.logprob, [astuple(hypothesis) for hypothesis in output.hypotheses],
    ]  # fmt: skip


def _unpack_output(values: SequenceABC[Any]) -> SequenceOutput:
    seq_id, new_token_ids, reason, error, stats, is_out_of_memory, logprob, hypotheses = values
    return SequenceOutput(
        seq_id,
        tuple(new_token_ids),
        None if reason is None else FinishReason(reason),
        error,
        None if stats is None else SequenceStats(*stats),
        is_out_of_memory,
        logprob,
        tuple(
            Hypothesis(tuple(token_ids), total, score, FinishReason(end)) for token_ids, total, score, end in hypotheses
        ),
    )


def _pack(message: list[Any]) -> bytes:
    packed: bytes = msgpack.packb(message)
    return packed


def _by_name(kind: type[Any], values: SequenceABC[Any]) -> dict[str, Any]:
    """Field names to values, lists (as msgpack gives them) back to tuples."""
    names = (field.name for field in fields(kind))
    return {name: tuple(value) if isinstance(value, list) else value for name, value in zip(names, values, strict=True)}
