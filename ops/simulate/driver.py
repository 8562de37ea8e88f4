"""The loop: arrivals into the scheduler, its steps out, and a clock that goes on by what each step costs."""

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import Protocol

from ops.simulate.cost import CostModel, StepCost
from ops.simulate.traces import Trace, TraceRequest
from scheduler import (
    ModelRunnerOutput,
    SamplingParams,
    Scheduler,
    SchedulerOutput,
    SchedulerStats,
    Sequence,
    SequenceOutput,
    SequenceStatus,
    TransferResult,
)
from scheduler.errors import PromptTooLongError


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One step, done. Times are in seconds from the trace's first arrival; `stats` are those after its update.

    preempted: who lost its place in this step, and how: `recompute` or `swap`.
    """

    start_s: float
    end_s: float
    output: SchedulerOutput
    outputs: list[SequenceOutput]
    preempted: list[tuple[str, str]]
    cost: StepCost
    stats: SchedulerStats


class Observer(Protocol):
    """Somebody who is told what happens, in order."""

    def arrived(self, seq_id: str, request: TraceRequest) -> None:
        """The scheduler has taken a request on, at its arrival."""

    def stepped(self, step: SimulatedStep) -> None:
        """A step is over."""


class Simulation:
    """Runs a trace to its end. The scheduler is the real one; only what it schedules isn't computed.

    A request enters the scheduler at the end of the step in which it arrives. Its tokens are made then, so that only
    unfinished requests take memory. Each draws its own token again and again, until it has as many as the trace says.

    refused: indices of requests that can't fit the context or the pool, as the worker would refuse them.
    """

    def __init__(
        self, trace: Trace, scheduler: Scheduler, cost_model: CostModel, observers: SequenceABC[Observer]
    ) -> None:
        self._trace = trace
        self._scheduler = scheduler
        self._cost_model = cost_model
        self._observers = observers
        self._live: dict[str, tuple[Sequence, int]] = {}
        self._num_taken = 0
        self.now = 0.0
        self.refused: list[int] = []

    def advance(self) -> bool:
        """Go on by a step, or to the next arrival where nothing is to be done; False once all is over."""
        self._take_arrivals()
        if self._scheduler.has_work:
            self._step()
            return True
        requests = self._trace.requests
        if self._num_taken == len(requests):
            return False
        self.now = requests[self._num_taken].arrival_s
        return True

    def _take_arrivals(self) -> None:
        requests = self._trace.requests
        while self._num_taken < len(requests) and requests[self._num_taken].arrival_s <= self.now:
            self._add(requests[self._num_taken])
            self._num_taken += 1

    def _add(self, request: TraceRequest) -> None:
        seq = Sequence(
            f"r{request.index}",
            self._trace.prompt_tokens(request),
            SamplingParams(temperature=0, max_tokens=request.num_output_tokens, ignore_eos=True),
            priority=request.priority,
            tenant=request.tenant,
            arrival_s=request.arrival_s,
        )
        try:
            self._scheduler.add(seq)
        except PromptTooLongError:
            self.refused.append(request.index)
            return
        self._live[seq.seq_id] = (seq, request.own_token)
        for observer in self._observers:
            observer.arrived(seq.seq_id, request)

    def _step(self) -> None:
        scheduler, live = self._scheduler, self._live
        start_s = self.now
        output = scheduler.schedule(start_s)
        # Whoever ended has left `live` with the last step's update.
        preempted = [(seq_id, _mode(live[seq_id][0])) for seq_id in output.removed_ids if seq_id in live]
        cost = self._cost_model.step(output, scheduler.kv.block_size)
        self.now = start_s + cost.total_s
        sampled = {seq_id: live[seq_id][1] for seq_id in output.chunks.sampled_ids}
        # The step's time covers its copies, so they end with it.
        ended = tuple([TransferResult(transfer.transfer_id) for transfer in (*output.swap_outs, *output.swap_ins)])
        outputs = scheduler.update(output, ModelRunnerOutput(sampled, transfers=ended), self.now)
        for each in outputs:
            if each.finish_reason is not None:
                del live[each.seq_id]
        step = SimulatedStep(start_s, self.now, output, outputs, preempted, cost, scheduler.stats())
        for observer in self._observers:
            observer.stepped(step)


def _mode(seq: Sequence) -> str:
    return "recompute" if seq.status is SequenceStatus.WAITING else "swap"
