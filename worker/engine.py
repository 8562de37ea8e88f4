"""The engine: schedule, execute, update. It computes and does no I/O; `step()` tells the whole story."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

from scheduler import invariants
from scheduler.family import Family
from scheduler.output import ModelRunnerOutput, SchedulerOutput, SchedulerStats, SequenceOutput
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from worker.step_pipeline import LaunchingRunner, StepPipeline


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to generate.

    `generated_ids` are tokens that an earlier attempt already produced: generation goes on after them.
    `seed` is used where `sampling.seed` is None. Only requests of one tenant and one cache_salt share cached prefixes.
    priority: larger is more important.
    use_prefix_cache: it may begin with blocks that others have computed, and they with its own.
    deadline_in_s: seconds from when the engine gets it; None is no limit.
    family: a name that the sequences of one request share, which have the same prompt; "" for one that is alone.
    """

    seq_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    generated_ids: tuple[int, ...] = ()
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    use_prefix_cache: bool = True
    deadline_in_s: float | None = None
    family: str = ""


class Runner(Protocol):
    """What computes a step: the model runner, or a double of it in tests."""

    last_forward_s: float

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step and draw the tokens of its sampled chunks."""
        ...


@dataclass(slots=True)
class StepTimes:
    """Seconds spent since the engine was built. Host time is `step_s` less `forward_s`, where steps don't overlap."""

    num_steps: int = 0
    step_s: float = 0.0
    forward_s: float = 0.0


class Engine:
    """Runs sequences to their end, a step at a time. Not thread-safe: one thread owns it.

    With `overlapping`, which computes the same steps as `runner` and doesn't wait for them, a step is in flight between
    two calls of `step`; tokens are the same. Without it, the simple way: one step after the other.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        check_invariants: str = "off",
        clock: Callable[[], float] = time.monotonic,
        overlapping: LaunchingRunner | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.times = StepTimes()
        self._check = check_invariants
        self._clock = clock
        # Each lives as long as a member.
        self._families: WeakValueDictionary[str, Family] = WeakValueDictionary()
        # Told whom a step computes, just before it does: should it end this process, they are the suspects.
        self.on_begin: Callable[[tuple[str, ...]], None] = lambda seq_ids: None
        self._pipeline: StepPipeline | None = None
        if overlapping is not None:
            self._pipeline = StepPipeline(scheduler, overlapping, clock, self._tell_begin)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work

    @property
    def in_flight_ids(self) -> tuple[str, ...]:
        """The sequences that are being computed between two calls of `step`."""
        return () if self._pipeline is None else self._pipeline.seq_ids

    def add(self, request: EngineRequest) -> None:
        """Queue a sequence. Raises InvalidPromptError, PromptTooLongError or DuplicateSequenceError."""
        now = self._clock()
        self.scheduler.add(
            Sequence(
                seq_id=request.seq_id,
                prompt_token_ids=request.prompt_ids,
                generated_token_ids=request.generated_ids,
                sampling=request.sampling,
                seed=request.seed if request.sampling.seed is None else request.sampling.seed,
                priority=request.priority,
                tenant=request.tenant,
                cache_salt=request.cache_salt,
                use_prefix_cache=request.use_prefix_cache,
                family=self._family_of(request),
                arrival_s=now,
                deadline_s=None if request.deadline_in_s is None else now + request.deadline_in_s,
            )
        )

    def _family_of(self, request: EngineRequest) -> Family | None:
        return self._families.setdefault(request.family, Family()) if request.family else None

    def abort(self, seq_id: str) -> bool:
        """Stop a sequence and free its blocks, whatever its state. False if there is no such sequence (any more)."""
        return self.scheduler.abort(seq_id)

    def step(self) -> list[SequenceOutput]:
        """Compute one step; answer the new tokens and the ends of sequences."""
        started = self._clock()
        if self._pipeline is not None:
            outputs = self._pipeline.step()
            self.times.forward_s += self._pipeline.last_forward_s
        else:
            output = self.scheduler.schedule(started)
            self.on_begin(output.chunks.seq_ids)
            result = self.runner.execute(output)
            outputs = self.scheduler.update(output, result, self._clock())
            self.times.forward_s += self.runner.last_forward_s
        self._check_invariants()
        self.times.num_steps += 1
        self.times.step_s += self._clock() - started
        return outputs

    def _tell_begin(self, seq_ids: tuple[str, ...]) -> None:
        self.on_begin(seq_ids)

    def stats(self) -> SchedulerStats:
        """A snapshot of queues and blocks."""
        return self.scheduler.stats()

    def _check_invariants(self) -> None:
        if self._check == "step" or (self._check == "idle" and not self.scheduler.has_work):
            invariants.check(self.scheduler)
