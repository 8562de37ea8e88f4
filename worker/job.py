"""One job that this worker holds, from its opened reply to its terminal event: what to write next, and no I/O."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from model.tokenizer import Tokenizer
from scheduler.output import FinishReason, SequenceOutput
from worker.engine import EngineRequest
from worker.errors import ErrorCode, JobError
from worker.generation import Generation
from worker.protocol import GenerateRequest

# With stream = 0 token events are checkpoints to resume from, and one a second is enough.
CHECKPOINT_MS = 1000


@dataclass(frozen=True, slots=True)
class StoredReply:
    """What earlier attempts left in a reply, after its last `reset`."""

    token_ids: tuple[int, ...] = ()
    num_chars: int = 0
    seed: int | None = None
    num_attempts: int = 0


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


@dataclass(slots=True)
class Job:
    """A job with its prompt in tokens. The pump asks it for events; the step loop feeds it.

    `seed` is the job's own or the one that was drawn for it (`is_seed_drawn`), which an attempt's first token event
    tells, so that a later attempt draws alike.
    """

    request: GenerateRequest
    prompt_ids: tuple[int, ...]
    max_tokens: int
    seed: int
    is_seed_drawn: bool
    stored: StoredReply
    times: JobTimes
    generation: Generation
    names: WorkerNames
    num_engine_deaths: int = 0
    error: JobError | None = None
    _num_reported: int = 0
    _is_seed_told: bool = field(default=False)
    _last_event_ms: int = 0

    @classmethod
    def start(
        cls,
        request: GenerateRequest,
        prompt_ids: tuple[int, ...],
        *,
        max_tokens: int,
        drawn_seed: int,
        stored: StoredReply,
        times: JobTimes,
        names: WorkerNames,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
    ) -> "Job":
        """A job that goes on where `stored` ends; it may turn out to be finished already."""
        generation = Generation(request.sampling, tokenizer)
        generation.replay(stored.token_ids, eos_token_ids, max_tokens)
        if request.stream:
            generation.skip_text(stored.num_chars)
        is_seed_drawn = request.sampling.seed is None
        seed = drawn_seed if stored.seed is None else stored.seed
        return cls(
            request=request,
            prompt_ids=prompt_ids,
            max_tokens=max_tokens,
            seed=seed if request.sampling.seed is None else request.sampling.seed,
            is_seed_drawn=is_seed_drawn,
            stored=stored,
            times=times,
            generation=generation,
            names=names,
            _num_reported=len(stored.token_ids),
            _last_event_ms=times.opened_ms,
        )

    @property
    def is_over(self) -> bool:
        """Whether a terminal event is owed and no token will be added."""
        return self.error is not None or self.generation.is_finished

    @property
    def num_unreported(self) -> int:
        """Generated tokens that no event has told yet."""
        return len(self.generation.ids) - self._num_reported

    def engine_request(self, seq_id: str) -> EngineRequest:
        """What the engine is asked: the prompt, and after it what is already generated."""
        return EngineRequest(
            seq_id=seq_id,
            prompt_ids=self.prompt_ids,
            sampling=self.request.sampling,
            seed=self.seed,
            generated_ids=tuple(self.generation.ids),
            priority=self.request.priority,
            tenant=self.request.tenant,
            cache_salt=self.request.cache_salt,
        )

    def absorb(self, output: SequenceOutput, now_ms: int) -> bool:
        """Take in a step's output. True if the engine must be told to stop this sequence."""
        if self.is_over:
            return False
        if output.new_token_ids:
            if self.times.first_token_ms is None:
                self.times.first_token_ms = now_ms
            self.times.last_token_ms = now_ms
        if output.finish_reason is FinishReason.ERROR:
            self.fail(
                JobError(ErrorCode.ENGINE_ERROR, output.error or "the engine could not go on with this job"), now_ms
            )
            return False
        must_stop = self.generation.absorb(output)
        if self.generation.is_finished:
            self.times.finished_ms = now_ms
        return must_stop

    def fail(self, error: JobError, now_ms: int) -> None:
        """End the job with an error event; what was generated so far is still told first."""
        if not self.is_over:
            self.error = error
            self.times.finished_ms = now_ms

    def is_event_due(self, now_ms: int) -> bool:
        """Whether a token event should be written now."""
        if self.num_unreported == 0:
            return False
        gather_ms = self.request.chunk_ms if self.request.stream else max(CHECKPOINT_MS, self.request.chunk_ms)
        return self.is_over or now_ms - self._last_event_ms >= gather_ms

    def take_token_event(self, now_ms: int) -> dict[str, str]:
        """The fields of the next token event; what it tells counts as told from here on."""
        ids = self.generation.ids[self._num_reported :]
        self._num_reported = len(self.generation.ids)
        self._last_event_ms = now_ms
        fields = {"ids": _json(ids), "n": str(self._num_reported)}
        if self.request.stream:
            fields["text"] = self.generation.take_text()
        if self.is_seed_drawn and not self._is_seed_told:
            self._is_seed_told = True
            fields["seed"] = str(self.seed)
        return fields

    def terminal_event(self) -> tuple[str, dict[str, str]]:
        """(`end` or `error`, its fields). Call it once, when the job is over and all tokens are told."""
        if self.error is not None:
            return "error", error_fields(self.error)
        generation = self.generation
        assert generation.finish_reason is not None, "a terminal event of a job that is not over"
        fields = {
            "finish": str(generation.finish_reason),
            "text": generation.take_text() + generation.take_tail(),
            "usage": _json(self.usage()),
            "receipt": _json(self.receipt()),
        }
        if not self.request.stream:
            fields["ids"] = _json(generation.ids)
        if self.request.meta is not None:
            fields["meta"] = self.request.meta
        return "end", fields

    def usage(self) -> dict[str, int]:
        """Tokens: of the prompt, generated, found in the prefix cache, and taken over from earlier attempts."""
        stats = self.generation.stats
        return {
            "prompt_tokens": len(self.prompt_ids),
            "completion_tokens": len(self.generation.ids),
            "cached_tokens": 0 if stats is None else stats.num_cached_tokens,
            "replayed_tokens": len(self.stored.token_ids),
        }

    def receipt(self) -> dict[str, Any]:
        """Where the time went and what it cost."""
        times, stats = self.times, self.generation.stats
        end_ms = times.finished_ms or times.opened_ms
        first_ms = times.first_token_ms or end_ms
        return {
            "queue_ms": max(0, times.opened_ms - times.enqueued_ms),
            "prefill_ms": first_ms - times.opened_ms,
            "decode_ms": end_ms - first_ms,
            "first_token_ms": max(0, first_ms - times.enqueued_ms),
            "preemptions": 0 if stats is None else stats.num_preemptions,
            "recomputed_tokens": 0 if stats is None else stats.num_recomputed_tokens,
            "swapped_bytes": 0 if stats is None else stats.swapped_bytes,
            "attempts": self.stored.num_attempts + 1,
            "worker": self.names.worker_id,
            "model": self.names.model,
            "fingerprint": self.names.fingerprint,
            "seed": self.seed,
        }


def error_fields(error: JobError) -> dict[str, str]:
    """The fields of an `error` event."""
    return {
        "code": str(error.code),
        "message": error.message,
        "retryable": "1" if error.is_retryable else "0",
        "details": _json(error.details),
    }


def _json(value: dict[str, Any] | Sequence[Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
