"""A made-up, steady load for the scheduler alone: about 256 sequences decode, 1,000 wait, tokens come from nowhere."""

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Self, TypeVar

from ops.bench.workload import Lengths, WorkloadShape, draw_lengths
from scheduler import CacheConfig, ModelRunnerOutput, SamplingParams, Scheduler, SchedulerConfig, Sequence
from scheduler.output import SchedulerOutput, TransferResult

T = TypeVar("T")

NUM_RUNNING: Final = 256
NUM_WAITING: Final = 1000
BLOCK_SIZE: Final = 16
NUM_TENANTS: Final = 32
# A third of the prompts begin with one of a few texts that their tenant sends again and again.
NUM_SHARED_TOKENS: Final = 64
SHAPE: Final = WorkloadShape(prompt_mean=120, prompt_sigma=0.6, output_mean=150, output_sigma=0.6)
# What the clock that the scheduler is told goes on by in a step.
STEP_S: Final = 0.03
# Steps before anything is measured: until sequences of all ages run.
NUM_SETTLING_STEPS: Final = 400


@dataclass(frozen=True, slots=True)
class Pool:
    """The memory of a load. Where `max_num_seqs` is above NUM_RUNNING, it is the blocks that limit who runs."""

    name: str
    num_blocks: int
    num_cpu_blocks: int
    max_num_seqs: int
    write_behind_blocks: int = 0


POOLS: Final = (
    Pool("roomy", 16_000, 0, NUM_RUNNING),
    Pool("tight", 4_100, 0, 2 * NUM_RUNNING),
    Pool("tight, with a CPU tier", 4_100, 4_100, 2 * NUM_RUNNING, 16),
)


@dataclass(slots=True)
class Times:
    """Nanoseconds of each call: by the clock on the wall, of this thread on a processor, and of that in the garbage
    collector."""

    wall_ns: list[int] = field(default_factory=list)
    cpu_ns: list[int] = field(default_factory=list)
    gc_ns: list[int] = field(default_factory=list)


class GcMeter:
    """While it is entered, `taken_ns` grows by the processor time of each collection."""

    def __init__(self) -> None:
        self.taken_ns = 0
        self._started_ns = 0

    def __enter__(self) -> Self:
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._started_ns = time.thread_time_ns()
        else:
            self.taken_ns += time.thread_time_ns() - self._started_ns


class SteadyLoad:
    """A scheduler in the midst of its work. Whoever ends is replaced by a newcomer, so that NUM_WAITING wait.

    num_running: summed over the measured steps.
    """

    def __init__(self, policy: str, pool: Pool, seed: int) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=4096,
                max_num_seqs=pool.max_num_seqs,
                max_num_batched_tokens=2048,
                scheduling_policy=policy,
                write_behind_blocks=pool.write_behind_blocks,
                swap_bytes_per_s=1e10,
                prefill_tokens_per_s=1e4,
            ),
            CacheConfig(pool.num_blocks, BLOCK_SIZE, pool.num_cpu_blocks, kv_block_bytes=1 << 20),
        )
        self.num_running = 0
        self._gc = GcMeter()
        self._rng = random.Random(seed)
        self._lengths: list[Lengths] = []
        self._num_added = 0
        self._now = 0.0
        self._seed = seed

    def settle(self) -> None:
        """Go on until those that run are of all ages."""
        for _ in range(NUM_SETTLING_STEPS):
            self._step(Times(), Times())

    def run(self, num_steps: int) -> tuple[Times, Times]:
        """What `schedule` and `update` take in so many steps."""
        schedule, update = Times(), Times()
        with self._gc:
            for _ in range(num_steps):
                self._step(schedule, update)
                self.num_running += len(self.scheduler.running)
        return schedule, update

    def _step(self, schedule: Times, update: Times) -> None:
        scheduler = self.scheduler
        while len(scheduler.waiting) < NUM_WAITING:
            scheduler.add(self._newcomer())
        self._now += STEP_S
        output = self._timed(schedule, partial(scheduler.schedule, self._now))
        drawn = _draw(output)
        self._timed(update, partial(scheduler.update, output, drawn, self._now + STEP_S))

    def _timed(self, times: Times, call: Callable[[], T]) -> T:
        wall_ns, gc_ns, cpu_ns = time.perf_counter_ns(), self._gc.taken_ns, time.thread_time_ns()
        result = call()
        times.cpu_ns.append(time.thread_time_ns() - cpu_ns)
        times.gc_ns.append(self._gc.taken_ns - gc_ns)
        times.wall_ns.append(time.perf_counter_ns() - wall_ns)
        return result

    def _newcomer(self) -> Sequence:
        if not self._lengths:
            self._lengths = draw_lengths(SHAPE, 4096, self._seed + self._num_added)
        rng, lengths = self._rng, self._lengths.pop()
        tenant = rng.randrange(NUM_TENANTS)
        prompt = rng.choices(range(50_000), k=lengths.num_prompt)
        if rng.random() < 1 / 3:
            prompt[:0] = range(tenant, tenant + NUM_SHARED_TOKENS)
        self._num_added += 1
        return Sequence(
            f"sequence-{self._num_added}",
            prompt,
            SamplingParams(max_tokens=lengths.num_output, ignore_eos=True),
            priority=rng.randrange(4),
            tenant=f"tenant-{tenant}",
            arrival_s=self._now,
            deadline_s=self._now + rng.uniform(20, 200) if rng.random() < 0.5 else None,
        )


def _draw(output: SchedulerOutput) -> ModelRunnerOutput:
    """A token for each sequence that wants one; copies between the tiers are done at once."""
    ended = [TransferResult(transfer.transfer_id) for transfer in (*output.swap_outs, *output.swap_ins)]
    return ModelRunnerOutput(dict.fromkeys(output.chunks.sampled_ids, 7), transfers=tuple(ended))
