"""What the jobs of each queue did, for Prometheus: every series carries the name of its queue."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from scheduler.output import SequenceStats
from worker.errors import ErrorCode

# Seconds. From a fast GPU's first token to a long queue; a bucket edge every factor of two to two and a half.
_LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 600.0)
_INTER_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 10.0)


class JobMetrics:
    """The metrics of all queues' jobs, made once for a registry; `QueueMetrics` writes those of one queue."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...] = _LATENCY_BUCKETS) -> Histogram:
            return Histogram(name, text, ("queue",), buckets=buckets, registry=registry)

        self.held = Gauge(
            "pagemill_jobs_held", "Jobs that this worker has taken and not settled.", ("queue",), registry=registry
        )
        self.jobs = Counter(
            "pagemill_jobs",
            "Settled jobs: `ok`, `cancelled`, or the error code.",
            ("queue", "outcome"),
            registry=registry,
        )
        self.not_begun = Counter(
            "pagemill_entries_not_begun",
            "Entries that began no job: `duplicate`, `conflict`, or put back by the limit of their tenant.",
            ("queue", "why"),
            registry=registry,
        )
        self.tokens = Counter(
            "pagemill_tokens",
            "Tokens of settled jobs: prompt, generated, and cached (part of prompt).",
            ("queue", "kind"),
            registry=registry,
        )
        self.queue_time = histogram("pagemill_queue_seconds", "From XADD to the job's first step.")
        self.first_token = histogram("pagemill_first_token_seconds", "From XADD to the first token's event.")
        self.inter_token = histogram(
            "pagemill_inter_token_seconds", "Between two tokens of one reply.", _INTER_TOKEN_BUCKETS
        )
        self.job_time = histogram("pagemill_job_seconds", "From XADD to the terminal event.")


class QueueMetrics:
    """Owner of one queue's series. Cheap enough to be called at every token."""

    def __init__(self, metrics: JobMetrics, queue: str) -> None:
        self._metrics = metrics
        self._queue = queue
        self._held = metrics.held.labels(queue)
        self._queue_time = metrics.queue_time.labels(queue)
        self._first_token = metrics.first_token.labels(queue)
        self._inter_token = metrics.inter_token.labels(queue)
        self._job_time = metrics.job_time.labels(queue)
        # So that each series is there from the start: a rate over a series that appears with its first count misses it.
        for outcome in ("done", str(ErrorCode.POISON)):
            metrics.jobs.labels(queue, outcome)
        for why in ("duplicate", "conflict"):
            metrics.not_begun.labels(queue, why)
        for kind in ("prompt", "generated", "cached"):
            metrics.tokens.labels(queue, kind)

    def set_jobs_held(self, count: int) -> None:
        """Jobs taken and not yet settled, now."""
        self._held.set(count)

    def not_begun(self, why: str) -> None:
        """Count an entry that began no job: `duplicate`, `conflict`, or what it has to wait for."""
        self._metrics.not_begun.labels(self._queue, why).inc()

    def job_settled(self, outcome: str, job_s: float | None = None, stats: SequenceStats | None = None) -> None:
        """Count a job: `outcome` is `done` or an error code, `job_s` the seconds since its XADD.

        `stats` is what its sequence cost, where it got as far as the engine.
        """
        self._metrics.jobs.labels(self._queue, outcome).inc()
        if job_s is not None:
            self._job_time.observe(max(0.0, job_s))
        if stats is not None:
            tokens = self._metrics.tokens
            tokens.labels(self._queue, "prompt").inc(stats.num_prompt_tokens)
            tokens.labels(self._queue, "generated").inc(stats.num_generated_tokens)
            tokens.labels(self._queue, "cached").inc(stats.num_cached_tokens)

    def first_scheduled(self, queue_s: float) -> None:
        """A job's first step began `queue_s` seconds after its XADD. Clocks may differ: below 0 counts as 0."""
        self._queue_time.observe(max(0.0, queue_s))

    def first_token(self, seconds: float) -> None:
        """A job's first token came `seconds` after its XADD."""
        self._first_token.observe(max(0.0, seconds))

    def inter_token(self, seconds: float) -> None:
        """A further token came `seconds` after the one before it."""
        self._inter_token.observe(max(0.0, seconds))
