"""A trace of recorded traffic through a real engine, in this process, at the times at which its requests came."""

import time
from dataclasses import dataclass

from ops.bench.errors import BenchError
from ops.bench.runs import percentile
from ops.bench.workload import BenchRequest
from ops.simulate.traces import Trace
from scheduler.output import SchedulerStats, SequenceOutput
from scheduler.sampling_params import SamplingParams
from worker.engine import Engine, EngineRequest


@dataclass(frozen=True, slots=True)
class TraceRun:
    """What came of a run. Counts are of this run alone, not of the engine's life.

    wall_s: from the first arrival to the last token. cpu_s: processor time of this process in it, which what else runs
    on the machine disturbs less. reply_s, gap_s: mean time of a reply, and the 99th percentile between two tokens.
    """

    wall_s: float
    cpu_s: float
    num_output_tokens: int
    reply_s: float
    gap_p99_s: float
    num_swaps: int
    num_recomputes: int
    num_recomputed_tokens: int
    swapped_bytes: int

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second of wall time."""
        return self.num_output_tokens / self.wall_s

    @property
    def tokens_per_cpu_s(self) -> float:
        """Output tokens a second of processor time."""
        return self.num_output_tokens / self.cpu_s


class TraceRunner:
    """Runs traces through `engine`, one after the other."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_runs = 0

    def run(self, trace: Trace, requests: list[BenchRequest]) -> TraceRun:
        """Offer `requests`, which have the lengths of the trace's, when they arrive; wait for all their ends.

        Raises BenchError where one fails.
        """
        self._num_runs += 1
        engine, before = self._engine, self._engine.stats()
        arrivals = [each.arrival_s for each in trace.requests]
        last_s: dict[str, float] = {}
        gap_s: list[float] = []
        reply_s: list[float] = []
        num_added = 0
        started, cpu_started = time.perf_counter(), time.process_time()
        while len(reply_s) < len(requests):
            now = time.perf_counter() - started
            while num_added < len(requests) and arrivals[num_added] <= now:
                engine.add(self._request(num_added, requests[num_added]))
                num_added += 1
            if not engine.has_work:
                time.sleep(max(0.0, arrivals[num_added] - now))
                continue
            outputs = engine.step()
            now = time.perf_counter() - started
            for output in outputs:
                _check(output)
                if output.seq_id in last_s:
                    gap_s.append(now - last_s[output.seq_id])
                last_s[output.seq_id] = now
                if output.finish_reason is not None:
                    reply_s.append(now - arrivals[int(output.seq_id.partition("-")[2])])
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
        while engine.has_work:  # rows of the last ones are dropped; nothing is computed
            engine.step()
        after = engine.stats()
        return TraceRun(
            wall_s=wall_s,
            cpu_s=cpu_s,
            num_output_tokens=sum(each.num_output for each in requests),
            reply_s=sum(reply_s) / len(reply_s),
            gap_p99_s=percentile(gap_s, 99),
            num_swaps=after.num_preemptions_swap - before.num_preemptions_swap,
            num_recomputes=after.num_preemptions_recompute - before.num_preemptions_recompute,
            num_recomputed_tokens=after.num_recomputed_tokens - before.num_recomputed_tokens,
            swapped_bytes=_copied_bytes(after) - _copied_bytes(before),
        )

    def _request(self, index: int, request: BenchRequest) -> EngineRequest:
        return EngineRequest(
            seq_id=f"{self._num_runs}-{index}",
            prompt_ids=request.prompt_ids,
            sampling=SamplingParams(temperature=0, max_tokens=request.num_output, ignore_eos=True),
            seed=0,
        )


def _check(output: SequenceOutput) -> None:
    if output.error is not None:
        raise BenchError(f"request {output.seq_id} failed: {output.error}")


def _copied_bytes(stats: SchedulerStats) -> int:
    return stats.swapped_out_bytes + stats.swapped_in_bytes + stats.written_behind_bytes
