"""Turns what an engine's steps bring into an OursRun."""

import statistics
from collections.abc import Sequence

from ops.bench.errors import BenchError
from ops.bench.runs import OursRun
from ops.bench.timeline import Timeline, closed_loop, open_loop
from scheduler.output import SchedulerStats, SequenceOutput
from worker.engine import StepTimes


class Recorder:
    """Takes in the steps of one run of `num_requests` requests, whose sequence ids are `0`, `1`, ... in their order.

    before: the engine's times when the run began, which go on counting through all runs.
    started_s and every `now` are of one clock.
    """

    def __init__(self, num_requests: int, *, started_s: float, before: StepTimes, num_hits_before: int) -> None:
        self.started_s = started_s
        self._before = before
        self._num_hits_before = num_hits_before
        self._token_s: list[list[float]] = [[] for _ in range(num_requests)]
        self._first_ids: list[int] = []
        self._num_open = num_requests
        self._uses: list[float] = []
        self._num_steps = 0
        self._num_slots_read = 0
        self.times = before
        self.num_hits = num_hits_before

    @property
    def is_done(self) -> bool:
        """Whether every request has ended."""
        return self._num_open == 0

    def absorb(self, now: float, outputs: Sequence[SequenceOutput], stats: SchedulerStats, times: StepTimes) -> None:
        """Take in one step; `times` is copied. Raises BenchError where a request failed."""
        for output in outputs:
            if output.error is not None:
                raise BenchError(f"request {output.seq_id} failed: {output.error}")
            index = int(output.seq_id)
            self._token_s[index].extend([now] * len(output.new_token_ids))
            if index == 0:
                self._first_ids.extend(output.new_token_ids)
            self._num_open -= output.finish_reason is not None
        if times.forward_s > self.times.forward_s:
            self._num_steps += 1
            self._num_slots_read += stats.num_filled_slots
            if stats.num_allocated_slots:
                self._uses.append(stats.num_filled_slots / stats.num_allocated_slots)
        self.times = StepTimes(times.num_steps, times.step_s, times.forward_s)
        self.num_hits = stats.prefix_hit_tokens

    def run(self, batch: int) -> OursRun:
        """The whole, once done. batch: how many sequences could be in flight."""
        return self._run_of(closed_loop(self.started_s, self._token_s, batch))

    def run_of_arrivals(self, arrivals_s: Sequence[float]) -> OursRun:
        """The whole, once done, of requests that came at these times, counted from the start."""
        return self._run_of(open_loop(self.started_s, self._token_s, arrivals_s))

    def _run_of(self, timeline: Timeline) -> OursRun:
        return OursRun(
            wall_s=timeline.wall_s,
            num_output_tokens=timeline.num_tokens,
            num_steps=self._num_steps,
            step_s=self.times.step_s - self._before.step_s,
            forward_s=self.times.forward_s - self._before.forward_s,
            kv_use=statistics.fmean(self._uses) if self._uses else 1.0,
            num_slots_read=self._num_slots_read,
            num_prefix_hits=self.num_hits - self._num_hits_before,
            ttft_s=timeline.ttft_s,
            gap_s=timeline.gap_s,
            reply_s=timeline.reply_s,
            first_ids=self._first_ids,
        )
