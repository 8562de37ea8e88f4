"""Steps that overlap: the next one is decided while this one is computed."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from scheduler.output import ModelRunnerOutput, SchedulerOutput, SequenceOutput
from scheduler.scheduler import Scheduler


class LaunchingRunner(Protocol):
    """What computes steps and doesn't wait for them: the model runner on CUDA, or any runner on a thread of its own."""

    @property
    def is_queueing(self) -> bool:
        """Whether a step may be launched before the one before it was collected: it gets its tokens by itself."""
        ...

    @property
    def last_forward_s(self) -> float:
        """What computing the step took that was collected last."""
        ...

    def launch(self, output: SchedulerOutput) -> Any:
        """Begin a step; what `collect` is to be given."""
        ...

    def collect(self, pending: Any) -> ModelRunnerOutput:
        """Wait for the oldest step that was launched; what it has brought."""
        ...


class BlockingRunner(Protocol):
    """What computes a step while it is called."""

    last_forward_s: float

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step and draw the tokens of its sampled chunks."""
        ...


class ThreadedRunner:
    """A runner that blocks, on a thread of its own: its steps are computed while the caller does something else.

    A step is launched when the outcome of the one before it is known, so none is computed for who has ended.
    """

    is_queueing = False

    def __init__(self, runner: BlockingRunner) -> None:
        self.runner = runner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pagemill-steps")

    @property
    def last_forward_s(self) -> float:
        """Of the step that was computed last."""
        return self.runner.last_forward_s

    def launch(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """See LaunchingRunner."""
        return self._thread.submit(self.runner.execute, output)

    def collect(self, pending: Future[ModelRunnerOutput]) -> ModelRunnerOutput:
        """See LaunchingRunner. Raises what computing the step has raised."""
        return pending.result()


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step that was launched, and what `collect` wants to have."""

    output: SchedulerOutput
    pending: Any


class StepPipeline:
    """Keeps one step in flight while the caller sees to the outcome of the one before, and to what has come meanwhile.

        runner      | step t        | step t+1        | step t+2 ...
        scheduler    schedule t+1  update t | schedule t+2  update t+1
        the caller                  tells, takes commands

    Where the runner queues, step t+1 is launched as soon as it is decided, so that nothing lies between the two. Else
    it is launched when step t was taken in, without those that have ended by it. Where a step can't be decided ahead
    (`scheduler.lookahead`) it is scheduled when the one before is over, as without a pipeline.

    on_begin: told whom the steps that are being computed are about, just before another one is.
    last_forward_s: of the step that ended last.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: LaunchingRunner,
        clock: Callable[[], float],
        on_begin: Callable[[tuple[str, ...]], None],
    ) -> None:
        self.last_forward_s = 0.0
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._on_begin = on_begin
        self._begun: _Begun | None = None

    @property
    def seq_ids(self) -> tuple[str, ...]:
        """The sequences of the step in flight."""
        return () if self._begun is None else self._begun.output.chunks.seq_ids

    def step(self) -> list[SequenceOutput]:
        """See the oldest step to its end; its new tokens and ends. The next one is in flight afterwards, if it can."""
        scheduler, runner = self._scheduler, self._runner
        begun = self._begun or self._begin(scheduler.schedule(self._clock()))
        ahead = scheduler.try_schedule_ahead(self._clock())
        self._begun = None
        if ahead is not None and runner.is_queueing:
            self._begun = self._begin(ahead, begun.output.chunks.seq_ids)
        result = runner.collect(begun.pending)
        self.last_forward_s = runner.last_forward_s
        outputs = scheduler.update(begun.output, result, self._clock())
        if ahead is not None and self._begun is None:
            self._begun = self._begin(scheduler.without_ended(ahead))
        return outputs

    def _begin(self, output: SchedulerOutput, others: tuple[str, ...] = ()) -> _Begun:
        """Launch a step beside one that computes `others`."""
        self._on_begin(tuple(dict.fromkeys((*others, *output.chunks.seq_ids))))
        return _Begun(output, self._runner.launch(output))
