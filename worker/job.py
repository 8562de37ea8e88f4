"""One job that this worker holds, from its opened reply to its terminal event: feeds the reply writer, does no I/O."""

from dataclasses import dataclass
from typing import Any

from scheduler.output import FinishReason, SequenceOutput, SequenceStats
from worker.choices import Choices
from worker.engine import EngineRequest
from worker.errors import ErrorCode, JobError, deadline_exceeded
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
    """A job whose reply is open. `choices` and `request` are set once its prompt is understood.

    It ends exactly once, by `finish` (through `absorb`) or `fail`; both hand the terminal event to the writer, which
    writes it after every token.
    """

    def __init__(
        self, entry: Entry, envelope: JobEnvelope, writer: ReplyWriter, times: JobTimes, *, queue: str = ""
    ) -> None:
        self.entry = entry
        self.envelope = envelope
        self._queue = queue
        self.writer = writer
        self.times = times
        # The engine's name for this job: one attempt's tokens are never taken for another's, nor for those of a job
        # of the same id in another queue.
        self.seq_id = f"{queue}/{envelope.id}:{writer.attempt}"
        self.request: GenerateRequest | None = None
        self.choices: Choices | None = None
        self.prompt_ids: tuple[int, ...] = ()
        self.seed = 0
        self.num_replayed = 0
        self.num_attempts = 1
        # Engines and workers that died with it, and those in a row that it was alone in.
        self.crashes = 0
        self.solo = 0
        # How often it was set aside while another ran alone.
        self.num_set_aside = 0
        self.has_dead_letter = False
        self.is_over = False
        self.outcome = ""

    @property
    def log_ids(self) -> dict[str, str]:
        """What log events of the job name it by: an id alone may be another queue's too."""
        return {"request_id": self.envelope.id, "queue": self._queue}

    @property
    def stats(self) -> SequenceStats | None:
        """What its sequences have cost together; None where the engine has ended none of them."""
        return None if self.choices is None else self.choices.stats

    @property
    def seq_ids(self) -> tuple[str, ...]:
        """The engine's names for its choices."""
        return () if self.choices is None else self.choices.seq_ids

    def engine_requests(self, now_ms: int) -> list[EngineRequest]:
        """What the engine is asked for each choice that goes on: the prompt, and what is already generated after it.

        All in the time that is left.
        """
        assert self.request is not None, f"{self.envelope.id}: no request yet"
        assert self.choices is not None, f"{self.envelope.id}: no choices yet"
        deadline_ms = self.envelope.deadline_ms
        base = EngineRequest(
            seq_id=self.seq_id,
            prompt_ids=self.prompt_ids,
            sampling=self.request.sampling,
            seed=self.seed,
            priority=self.request.priority,
            tenant=self.request.tenant,
            cache_salt=self.request.cache_salt,
            deadline_in_s=None if deadline_ms is None else (deadline_ms - now_ms) / 1000,
        )
        return self.choices.requests(base)

    def absorb(self, output: SequenceOutput, now_ms: int, names: WorkerNames) -> bool:
        """Take in a step's output of one choice. True if the engine must be told to stop this sequence.

        The job ends with its last choice, or with the first that fails.
        """
        if self.is_over or self.choices is None:
            return False
        if output.finish_reason is FinishReason.ERROR:
            reason = output.error or "the engine can't go on with this job"
            code = ErrorCode.OUT_OF_MEMORY if output.is_out_of_memory else ErrorCode.ENGINE_ERROR
            # Some reasons come with their advice.
            message = reason if ": " in reason else f"{reason}: send the job again with another id"
            self.fail(JobError(code, message), now_ms)
            return False
        if output.finish_reason is FinishReason.DEADLINE:
            is_first = self.times.first_token_ms is None
            was_begun = not is_first or (output.stats is not None and output.stats.first_scheduled_s is not None)
            self.fail(deadline_exceeded("running" if was_begun else "queued"), now_ms)
            return False
        if output.new_token_ids:
            self.times.first_token_ms = self.times.first_token_ms or now_ms
            self.times.last_token_ms = now_ms
        if output.hypotheses and output.stats is not None and output.stats.first_token_s is not None:
            first_ago_s = output.stats.finished_s - output.stats.first_token_s
            self.times.first_token_ms, self.times.last_token_ms = now_ms - round(first_ago_s * 1000), now_ms
        index = self.choices.index_of(output.seq_id)
        generation = self.choices[index]
        num_before = len(generation.ids)
        must_stop = self.choices.absorb(output)
        if not generation.sampling.is_told_at_the_end:  # else it is written once it is chosen
            self.writer.token(generation.ids[num_before:], generation.take_text(), index)
        if self.choices.is_finished:
            self.finish(now_ms, names)
        return must_stop

    def finish(self, now_ms: int, names: WorkerNames) -> None:
        """Hand the `end` event to the writer, with the tail of the text that was held back."""
        assert self.choices is not None, f"{self.envelope.id}: no choices yet"
        assert self.choices.is_finished, f"{self.envelope.id}: not finished"
        self.is_over, self.outcome, self.times.finished_ms = True, "done", now_ms
        sampling = self.choices[0].sampling
        best = self.choices.best(sampling.n)
        for index, generation in enumerate(best):
            ids = generation.ids if sampling.is_told_at_the_end else ()
            self.writer.token(ids, generation.take_text() + generation.take_tail(), index)
        self.writer.end(
            [str(generation.finish_reason) for generation in best],
            usage=self.usage(),
            receipt=self.receipt(names),
            beams=[{"logprob": found.logprob, "score": found.score} for found in self.choices.hypotheses],
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
        stats = self.stats
        waited_ms = max(0, self.times.opened_ms - self.times.enqueued_ms)
        if stats is None or stats.first_scheduled_s is None:
            return waited_ms
        return waited_ms + round((stats.first_scheduled_s - stats.arrival_s) * 1000)

    def usage(self) -> dict[str, int]:
        """Tokens: of the prompt, generated in all choices, in the prefix cache, replayed from earlier attempts."""
        stats = self.stats
        return {
            "prompt_tokens": len(self.prompt_ids),
            "completion_tokens": 0 if self.choices is None else self.choices.num_tokens,
            # Whoever goes on with a reply may find tokens of that too.
            "cached_tokens": 0 if stats is None else min(stats.num_cached_tokens, len(self.prompt_ids)),
            "replayed_tokens": self.num_replayed,
        }

    def receipt(self, names: WorkerNames) -> dict[str, Any]:
        """Where the time went and what it cost."""
        times = self.times
        stats = self.stats
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
            "saved_blocks": 0 if stats is None else stats.num_saved_blocks,
            "attempts": self.num_attempts,
            "worker": names.worker_id,
            "model": names.model,
            "fingerprint": names.fingerprint,
            "seed": self.seed,
        }
