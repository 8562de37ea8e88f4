"""What a worker tells Prometheus. One registry of its own, so that two workers in one process don't mix.

Engine numbers arrive as snapshots (`SchedulerStats`) whose counters are totals since the engine started; a total that
went down means a new engine, whose whole total is new.
"""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Info

from scheduler.output import SchedulerStats
from worker.engine_end import EngineEnd
from worker.queue_metrics import JobMetrics, QueueMetrics

_BLOCK_STATES = ("used", "cached", "free")


class WorkerMetrics:
    """Owner of a worker's metrics: of its engine, and of each queue. Cheap enough to be called at every step."""

    def __init__(self, *, worker_id: str, queues: Sequence[str], model: str, version: str) -> None:
        self.registry = CollectorRegistry()
        self._totals: dict[tuple[Counter, tuple[str, ...]], float] = {}
        info = Info("pagemill_worker", "Which worker this is.", registry=self.registry)
        info.info({"worker_id": worker_id, "queue": ",".join(queues), "model": model, "version": version})
        self._make_engine_metrics()
        jobs = JobMetrics(self.registry)
        self._queues = {queue: QueueMetrics(jobs, queue) for queue in queues}

    def of_queue(self, queue: str) -> QueueMetrics:
        """The metrics of one queue's jobs."""
        return self._queues[queue]

    def _make_engine_metrics(self) -> None:
        self._running = self._gauge("pagemill_sequences_running", "Sequences in the running batch.")
        self._waiting = self._gauge("pagemill_sequences_waiting", "Sequences that wait for room in the batch.")
        self._swapped = self._gauge("pagemill_sequences_swapped", "Sequences whose blocks lie in CPU memory.")
        self._blocks = self._gauge("pagemill_kv_blocks", "Blocks of the KV cache by state.", "state")
        self._usage = self._gauge("pagemill_kv_usage_ratio", "Blocks owned by sequences, of all blocks.")
        self._fill = self._gauge("pagemill_kv_fill_ratio", "Filled slots, of all slots in blocks owned by sequences.")
        self._steps = self._counter("pagemill_steps", "Steps of the engine.")
        self._engine_restarts = self._counter("pagemill_engine_restarts", "Engines that had to be started anew.")
        self._engine_deaths = self._counter(
            "pagemill_engine_deaths", "Engines that ended under this worker, by what ended them.", "end"
        )
        self._crashes = self._counter(
            "pagemill_job_crashes", "Jobs that an engine was computing when it died, each time counted."
        )
        self._suspects = self._gauge("pagemill_jobs_suspect", "Jobs with a crash that run alone, or wait for it.")
        self._turns = self._counter("pagemill_quarantine_turns", "Times that a suspect began to run alone.")
        self._preemptions = self._counter("pagemill_preemptions", "Preemptions by mode.", "mode")
        self._full_tier = self._counter(
            "pagemill_preemptions_swap_full", "Preemptions that recompute since the swap space was full."
        )
        self._swapped_bytes = self._counter("pagemill_swapped_bytes", "KV bytes copied to CPU memory and back.", "way")
        self._written_behind = self._counter(
            "pagemill_written_behind_bytes", "KV bytes copied to CPU memory before anybody was preempted."
        )
        self._swap_blocks = self._gauge("pagemill_swap_blocks", "Blocks of the swap space by state.", "state")
        self._damaged = self._counter(
            "pagemill_swap_damaged_blocks", "Blocks that came back with a wrong checksum and were computed again."
        )
        self._splits = self._counter(
            "pagemill_step_splits", "Times that memory ran out in a step, so that it was computed in parts."
        )
        self._recomputed = self._counter("pagemill_recomputed_tokens", "Tokens computed again after a preemption.")
        self._queried = self._counter("pagemill_prefix_queried_tokens", "Prompt tokens looked up in the prefix cache.")
        self._hit = self._counter("pagemill_prefix_hit_tokens", "Prompt tokens found in the prefix cache.")
        self._tier_hit = self._counter(
            "pagemill_prefix_cpu_hit_tokens", "Tokens found in CPU memory, part of those found in the prefix cache."
        )
        self._saved = self._gauge("pagemill_kv_blocks_saved", "Blocks that sharing saves: n choices, equal prefixes.")
        self._forks = self._counter("pagemill_forks", "Sequences that began in the blocks of another choice.")
        self._copied = self._counter("pagemill_copied_blocks", "Shared blocks copied before they were written to.")
        # So that each series is there from the start: a rate over a series that appears with its first count misses it.
        for end in EngineEnd:
            self._engine_deaths.labels(end.value)
        for mode in ("recompute", "swap"):
            self._preemptions.labels(mode)
        for way in ("out", "in"):
            self._swapped_bytes.labels(way)
        for state in ("used", "free"):
            self._swap_blocks.labels(state)
        for state in _BLOCK_STATES:
            self._blocks.labels(state)

    def observe_scheduler(self, stats: SchedulerStats, num_steps: int) -> None:
        """Take over a snapshot; `num_steps` is the engine's total of steps."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._swapped.set(stats.num_swapped)
        used = stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks
        for state, count in zip(_BLOCK_STATES, (used, stats.num_cached_blocks, stats.num_free_blocks), strict=True):
            self._blocks.labels(state).set(count)
        self._usage.set(used / stats.num_blocks if stats.num_blocks else 0.0)
        self._fill.set(stats.num_filled_slots / stats.num_allocated_slots if stats.num_allocated_slots else 0.0)
        self._follow(self._steps, num_steps)
        self._follow(self._preemptions, stats.num_preemptions_recompute, "recompute")
        self._follow(self._preemptions, stats.num_preemptions_swap, "swap")
        self._follow(self._full_tier, stats.num_full_tier_recomputes)
        self._follow(self._swapped_bytes, stats.swapped_out_bytes, "out")
        self._follow(self._swapped_bytes, stats.swapped_in_bytes, "in")
        self._follow(self._written_behind, stats.written_behind_bytes)
        self._follow(self._damaged, stats.num_damaged_blocks)
        self._swap_blocks.labels("used").set(stats.num_used_cpu_blocks)
        self._swap_blocks.labels("free").set(stats.num_cpu_blocks - stats.num_used_cpu_blocks)
        self._follow(self._splits, stats.num_step_splits)
        self._follow(self._recomputed, stats.num_recomputed_tokens)
        self._follow(self._queried, stats.prefix_queried_tokens)
        self._follow(self._hit, stats.prefix_hit_tokens)
        self._follow(self._tier_hit, stats.prefix_tier_hit_tokens)
        self._saved.set(stats.num_saved_blocks)
        self._follow(self._forks, stats.num_forks)
        self._follow(self._copied, stats.num_copied_blocks)

    def engine_restarted(self) -> None:
        """A new engine: its totals begin at 0."""
        self._engine_restarts.inc()
        self._totals.clear()

    def engine_died(self, end: str, num_crashes: int) -> None:
        """Count an engine's death, and the jobs that it was computing."""
        self._engine_deaths.labels(end).inc()
        self._crashes.inc(num_crashes)
        for gauge in (self._running, self._waiting, self._swapped, self._usage, self._fill):
            gauge.set(0)  # what it had is nowhere now
        for gauge, states in ((self._blocks, _BLOCK_STATES), (self._swap_blocks, ("used", "free"))):
            for state in states:
                gauge.labels(state).set(0)

    def turn_began(self) -> None:
        """Count a suspect that runs alone."""
        self._turns.inc()

    def set_suspects(self, count: int) -> None:
        """Jobs that run alone or wait for it, now."""
        self._suspects.set(count)

    def _follow(self, counter: Counter, total: float, *labels: str) -> None:
        """Raise `counter` by what `total` gained since the last snapshot."""
        key = (counter, labels)
        last = self._totals.get(key, 0.0)
        self._totals[key] = total
        (counter.labels(*labels) if labels else counter).inc(total - last if total >= last else total)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)
