"""One job that this worker holds, from its opened reply to its terminal event: feeds the reply writer, does no I/O."""

from dataclasses import dataclass
from typing import Any

from scheduler.output import FinishReason, SequenceOutput
from worker.engine import EngineRequest
from worker.errors import ErrorCode, JobError, deadline_exceeded
from worker.generation import Generation
from worker.protocol import GenerateRequest, JobEnvelope
from worker.streams.leases import Entry
from worker.streams.reply_writer import ReplyWriter


@dataclass(slots=True)
class JobTimes:
    """When things happened, in milliseconds of the server's clock; None: not yet."""

    enqueued_ms: int
    opened_ms: int
    first_token_ms: int | None = None
    last_token_ms: int | None = None
    finished_ms: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerNames:
    """What a receipt says of the worker that wrote it."""

    worker_id: str
    model: str
    fingerprint: str


class Job:
    """A job whose reply is open. `generation` and `request` are set once its prompt is understood.

    It ends exactly once, by `finish` (through `absorb`) or `fail`; both hand the terminal event to the writer, which
    writes it after every token.
    """

    def __init__(self, entry: Entry, envelope: JobEnvelope, writer: ReplyWriter, times: JobTimes) -> None:
        self.entry = entry
        self.envelope = envelope
        self.writer = writer
        self.times = times
        # The engine's name for this job: one attempt's tokens are never taken for another's.
        self.seq_id = f"{envelope.id}:{writer.attempt}"
        self.request: GenerateRequest | None = None
        self.generation: Generation | None = None
        self.prompt_ids: tuple[int, ...] = ()
        self.seed = 0
        self.num_replayed = 0
        self.num_attempts = 1
        self.num_engine_deaths = 0
        self.is_over = False
        self.outcome = ""

    def engine_request(self, now_ms: int) -> EngineRequest:
        """What the engine is asked: the prompt, and after it what is already generated; in the time that is left."""
        assert self.request is not None, f"{self.envelope.id}: no request yet"
        assert self.generation is not None, f"{self.envelope.id}: no generation yet"
        deadline_ms = self.envelope.deadline_ms
        return EngineRequest(
            seq_id=self.seq_id,
            prompt_ids=self.prompt_ids,
            sampling=self.request.sampling,
            seed=self.seed,
            generated_ids=tuple(self.generation.ids),
            priority=self.request.priority,
            tenant=self.request.tenant,
            cache_salt=self.request.cache_salt,
            deadline_in_s=None if deadline_ms is None else (deadline_ms - now_ms) / 1000,
        )

    def absorb(self, output: SequenceOutput, now_ms: int, names: WorkerNames) -> bool:
        """Take in a step's output. True if the engine must be told to stop this sequence."""
        if self.is_over or self.generation is None:
            return False
        if output.finish_reason is FinishReason.ERROR:
            reason = output.error or "the engine can't go on with this job"
            code = ErrorCode.OUT_OF_MEMORY if output.is_out_of_memory else ErrorCode.ENGINE_ERROR
            self.fail(JobError(code, reason), now_ms)
            return False
        if output.finish_reason is FinishReason.DEADLINE:
            was_begun = output.stats is not None and output.stats.first_scheduled_s is not None
            self.fail(deadline_exceeded("running" if was_begun else "queued"), now_ms)
            return False
        if output.new_token_ids:
            self.times.first_token_ms = self.times.first_token_ms or now_ms
            self.times.last_token_ms = now_ms
        num_before = len(self.generation.ids)
        must_stop = self.generation.absorb(output)
        self.writer.token(self.generation.ids[num_before:], self.generation.take_text())
        if self.generation.is_finished:
            self.finish(now_ms, names)
        return must_stop

    def finish(self, now_ms: int, names: WorkerNames) -> None:
        """Hand the `end` event to the writer, with the tail of the text that was held back."""
        generation = self.generation
        assert generation is not None, f"{self.envelope.id}: no generation yet"
        assert generation.finish_reason is not None, f"{self.envelope.id}: not finished"
        self.is_over, self.outcome, self.times.finished_ms = True, "done", now_ms
        self.writer.token((), generation.take_text() + generation.take_tail())
        self.writer.end(
            str(generation.finish_reason),
            usage=self.usage(),
            receipt=self.receipt(names),
            meta=None if self.request is None else self.request.meta,
        )

    def fail(self, error: JobError, now_ms: int) -> None:
        """Hand the `error` event to the writer; the tokens so far are told first. Does nothing once the job is over."""
        if self.is_over:
            return
        self.is_over, self.outcome, self.times.finished_ms = True, str(error.code), now_ms
        self.writer.error(error, meta=None if self.request is None else self.request.meta)

    def queue_ms(self) -> int:
        """From the XADD to the first step that computed this job: the wait in the stream and that in the engine."""
        stats = None if self.generation is None else self.generation.stats
        waited_ms = max(0, self.times.opened_ms - self.times.enqueued_ms)
        if stats is None or stats.first_scheduled_s is None:
            return waited_ms
        return waited_ms + round((stats.first_scheduled_s - stats.arrival_s) * 1000)

    def usage(self) -> dict[str, int]:
        """Tokens: of the prompt, generated, found in the prefix cache, and taken over from earlier attempts."""
        stats = None if self.generation is None else self.generation.stats
        return {
            "prompt_tokens": len(self.prompt_ids),
            "completion_tokens": 0 if self.generation is None else len(self.generation.ids),
            "cached_tokens": 0 if stats is None else stats.num_cached_tokens,
            "replayed_tokens": self.num_replayed,
        }

    def receipt(self, names: WorkerNames) -> dict[str, Any]:
        """Where the time went and what it cost."""
        times = self.times
        stats = None if self.generation is None else self.generation.stats
        end_ms = times.finished_ms or times.opened_ms
        first_ms = times.first_token_ms or end_ms
        queue_ms = self.queue_ms()
        return {
            "queue_ms": queue_ms,
            "prefill_ms": max(0, first_ms - times.enqueued_ms - queue_ms),
            "decode_ms": end_ms - first_ms,
            "first_token_ms": max(0, first_ms - times.enqueued_ms),
            "preemptions": 0 if stats is None else stats.num_preemptions,
            "recomputed_tokens": 0 if stats is None else stats.num_recomputed_tokens,
            "swapped_bytes": 0 if stats is None else stats.swapped_bytes,
            "attempts": self.num_attempts,
            "worker": names.worker_id,
            "model": names.model,
            "fingerprint": names.fingerprint,
            "seed": self.seed,
        }
