"""From a stream entry to a sequence in the engine: open the reply, understand the job, turn its prompt into tokens."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

import structlog

from model.errors import ModelError
from model.tokenizer import Tokenizer
from scheduler.beam_intake import why_no_room
from worker.choices import Choices
from worker.dead_letters import keep_dead_letter
from worker.engine_config import EngineInfo
from worker.errors import ErrorCode, JobError, cancelled, deadline_exceeded, overloaded, poison, rate_limited
from worker.generation import Generation
from worker.job import Job, JobTimes, WorkerNames
from worker.job_table import JobTable
from worker.protocol import GenerateRequest, JobEnvelope, parse_envelope, parse_request
from worker.quarantine import Marks
from worker.queue_links import QueueLinks
from worker.streams.admission import Refusal
from worker.streams.leases import Entry
from worker.streams.outcomes import fetch_prompt, persist
from worker.streams.recovery import Recovered
from worker.streams.reply_writer import ReplyWriter
from worker.streams.scripts import OpenResult, OpenStatus

log = structlog.get_logger(__name__)

# An entry that was delivered this often without being opened ends whoever reads it.
MAX_DELIVERIES = 10


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What jobs are understood with: names that the queue answers to, tokenizer, and the engine's limits."""

    model_names: frozenset[str]
    tokenizer: Tokenizer
    info: EngineInfo
    eos_token_ids: frozenset[int]
    names: WorkerNames


class Intake:
    """Takes entries in, one `accept` each; what comes of it is a job in the table, and in the engine if it can run."""

    def __init__(
        self,
        links: QueueLinks,
        table: JobTable,
        served: ServedModel,
        *,
        wait_turn: Callable[[Job], Awaitable[bool]],
        enter_engine: Callable[[Job], None],
        on_closed: Callable[[ReplyWriter], None],
        on_not_begun: Callable[[str], None],
        max_wait_s: float,
    ) -> None:
        """`enter_engine` takes a job that is understood; `wait_turn` waits until a suspect may be looked at at all.

        `on_not_begun` is told why an entry begins no job: `duplicate`, `conflict`, or what it has to wait for.
        """
        self._links = links
        self._table = table
        self._served = served
        self._wait_turn = wait_turn
        self._enter_engine = enter_engine
        self._on_closed = on_closed
        self._on_not_begun = on_not_begun
        self._max_wait_s = max_wait_s

    async def accept(self, entry: Entry) -> None:
        """Open the entry's reply and start its job, or end it.

        Raises ServerError where Redis refuses what has nothing to do with this job: no rights, for instance.
        """
        envelope = parse_envelope(
            entry.lane,
            entry.entry_id,
            entry.fields,
            now_ms=self._links.clock.now_ms(),
            repeated=entry.repeated,
            limits=self._links.limits,
        )
        with structlog.contextvars.bound_contextvars(request_id=envelope.id):
            refusal = await self._refusal(entry, envelope)
            if refusal is not None and not refusal.must_end:
                log.debug("job_waits", limit=refusal.limit, wait_ms=refusal.retry_after_ms)
                await self._links.outcomes.put_aside(envelope)
                self._on_not_begun(refusal.limit)
                return
            # The open comes before the job is looked at: one whose parsing kills must have been counted.
            result, writer = await persist(
                lambda: self._links.replies.open(envelope, self._on_closed), cap_s=self._max_wait_s
            )
            if writer is None:
                await self._not_opened(entry, envelope, result)
                return
            if not self._links.leases.holds(entry):  # it was lost while the answer was under way
                self._links.replies.discard(writer)
                log.info("job_lost_while_it_opened", entry_id=entry.entry_id, lane=entry.lane)
                return
            await self._opened(entry, envelope, result, writer, refusal)

    async def _refusal(self, entry: Entry, envelope: JobEnvelope) -> Refusal | None:
        """What keeps a job from beginning now, if it is to run at all."""
        is_to_end = entry.must_end is not None or envelope.error is not None
        if is_to_end or envelope.is_expired(self._links.clock.now_ms()):
            return None
        return await persist(lambda: self._links.admission.admit(envelope), cap_s=self._max_wait_s)

    async def _not_opened(self, entry: Entry, envelope: JobEnvelope, result: OpenResult) -> None:
        log.info("job_not_opened", status=result.status.value, entry_id=entry.entry_id, lane=entry.lane)
        match result.status:
            case OpenStatus.ENDED:
                outcome = result.terminal_code if result.terminal == "error" else "done"
                record = {} if result.usage is None else {"usage": result.usage}
                # A poison's prompt is what its dead letter is kept for.
                is_kept = outcome == ErrorCode.POISON
                await self._links.outcomes.settle(envelope, outcome, record=record, keep_prompt=is_kept)
            case OpenStatus.DUPLICATE | OpenStatus.CONFLICT:
                if result.status is OpenStatus.CONFLICT:
                    await self._keep_dead_letter(entry, ErrorCode.ID_CONFLICT)
                await self._links.outcomes.drop(entry)
                self._on_not_begun(result.status.value)
            case OpenStatus.BLOCKED:
                # Somebody put something under one of the job's keys: nothing can be written there.
                advice = "delete that key, and send the job again with an id that nobody can guess"
                log.error("job_unanswerable", lane=entry.lane, entry_id=entry.entry_id, key=result.key, advice=advice)
                await self._keep_dead_letter(entry, ErrorCode.BAD_REQUEST)
                await self._links.outcomes.drop(entry)
            case _:
                self._links.leases.forget(entry)

    async def _opened(
        self,
        entry: Entry,
        envelope: JobEnvelope,
        result: OpenResult,
        writer: ReplyWriter,
        refusal: Refusal | None,
    ) -> None:
        now_ms = self._links.clock.now_ms()
        enqueued_ms = min(now_ms, int(entry.entry_id.partition("-")[0]))
        times = JobTimes(enqueued_ms=enqueued_ms, opened_ms=now_ms)
        job = Job(entry, envelope, writer, times, queue=self._links.keys.queue)
        job.crashes, job.solo = result.crashes, result.solo
        self._table.add(job)
        log.debug("job_opened", attempt=writer.attempt, covered=result.covered, queue_ms=now_ms - enqueued_ms)
        try:
            self._check_wanted(entry, envelope, result, now_ms)
            if refusal is not None:
                raise rate_limited(envelope.tenant, refusal.limit, refusal.retry_after_ms)
            await self._start(job, result)
        except JobError as error:
            await self._refuse(job, error)
        except Exception as error:
            log.exception("job_not_understood")
            await self._refuse(
                job, JobError(ErrorCode.INTERNAL, f"the worker failed ({type(error).__name__}): send the job again")
            )

    def _check_wanted(self, entry: Entry, envelope: JobEnvelope, result: OpenResult, now_ms: int) -> None:
        if result.cancel_reason is not None or entry.must_end is ErrorCode.CANCELLED:
            raise cancelled(result.cancel_reason or "", "queued")
        if envelope.is_expired(now_ms) or entry.must_end is ErrorCode.DEADLINE_EXCEEDED:
            raise deadline_exceeded("queued")
        if entry.must_end is ErrorCode.OVERLOADED:
            depth, max_depth = self._links.oldest.depths[entry.lane], self._links.oldest.max_depth
            raise overloaded(depth, max_depth, self._links.oldest.rate.ms_to_serve(depth))
        if Marks(result.crashes, result.solo).is_poison:
            raise poison(result.crashes, result.solo)
        if entry.deliveries > MAX_DELIVERIES:
            raise JobError(
                ErrorCode.POISON,
                f"this job was delivered {entry.deliveries} times and ended whoever read it: it is kept with the dead "
                "letters, so look there for what is odd about it",
            )

    async def _start(self, job: Job, result: OpenResult) -> None:
        """Understand the job and give it to the engine. Raises JobError, ModelError or StreamsError.

        What is there to be understood may be what kills: a suspect's turn begins before that.
        """
        if job.crashes and not await self._wait_turn(job):
            return
        request = await self._request_of(job)
        job.request = request
        served = self._served
        check_deterministic(request, served.info)
        job.prompt_ids = await asyncio.to_thread(prompt_ids_of, request, served.tokenizer)
        max_tokens = check_fits(request, job.prompt_ids, served.info)
        num_sequences = request.sampling.num_sequences
        choices = Choices(
            job.seq_id,
            [Generation(request.sampling, served.tokenizer, job.prompt_ids) for _ in range(num_sequences)],
        )
        drawn_seed = secrets.randbits(63)
        if result.is_reply_gone:
            # The client deleted it while nobody had the job: what a server loses, it loses together with the record.
            await persist(lambda: self._links.replies.abandon(job.writer), cap_s=self._max_wait_s)
            if job.is_over:
                return
        if result.covered or result.is_resumed:
            recovered = await persist(lambda: self._links.replies.recover(job.writer), cap_s=self._max_wait_s)
            drawn_seed = drawn_seed if recovered.seed is None else recovered.seed
            job.num_replayed, job.num_attempts = recovered.num_tokens, recovered.num_attempts
            check_stored_ids(recovered, served.info)
            for index, generation in enumerate(choices.generations):
                stored = recovered.choice(index)
                generation.replay(stored.ids, served.eos_token_ids, max_tokens)
                generation.skip_text(len(stored.text))
        job.choices = choices
        job.seed = drawn_seed if request.sampling.seed is None else request.sampling.seed
        job.writer.configure(
            is_streaming=request.stream,
            chunk_ms=request.chunk_ms,
            seed=job.seed if request.sampling.seed is None else None,
            num_choices=request.sampling.n,
        )
        if job.is_over:  # cancelled or expired while it was tokenized
            return
        if choices.is_finished:
            job.finish(self._links.clock.now_ms(), served.names)
            return
        for index, generation in enumerate(choices.generations):
            if text := generation.take_text():
                job.writer.token((), text, index)
        self._enter_engine(job)

    async def _request_of(self, job: Job) -> GenerateRequest:
        limits, envelope = self._links.limits, job.envelope
        prompt = None
        if envelope.error is None and envelope.prompt_ref is not None:
            name = envelope.prompt_ref
            prompt = await persist(
                lambda: fetch_prompt(self._links.commands, self._links.keys, name, limits.max_prompt_ref_bytes),
                cap_s=self._max_wait_s,
            )
        # In a thread: a hostile payload of a megabyte takes half a second to refuse.
        return await asyncio.to_thread(
            parse_request,
            envelope,
            job.entry.fields,
            prompt_ref_value=prompt,
            model_names=self._served.model_names,
            limits=limits,
        )

    async def _refuse(self, job: Job, error: JobError) -> None:
        """End a job that can't run. One whose reply nobody knows to read is kept as a dead letter too."""
        log.info("job_refused", code=str(error.code))
        is_reply_unknown = job.envelope.is_id_malformed or b"id" not in job.entry.fields
        if error.code is ErrorCode.POISON or (error.code is ErrorCode.BAD_REQUEST and is_reply_unknown):
            job.has_dead_letter = await self._keep_dead_letter(job.entry, error.code, job.envelope.id)
        job.fail(error, self._links.clock.now_ms())

    async def _keep_dead_letter(self, entry: Entry, code: ErrorCode, opened_id: str | None = None) -> bool:
        return await keep_dead_letter(self._links, entry, code, max_wait_s=self._max_wait_s, opened_id=opened_id)


def prompt_ids_of(request: GenerateRequest, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The prompt in tokens. Raises JobError. May take long for a long text: run it off the event loop."""
    try:
        if request.tokens is not None:
            return request.tokens
        if request.messages is not None:
            return tuple(tokenizer.encode_chat(request.messages))
        return tuple(tokenizer.encode(request.prompt or ""))
    except ModelError as error:
        raise JobError(ErrorCode.BAD_REQUEST, str(error)) from error


def check_deterministic(request: GenerateRequest, info: EngineInfo) -> None:
    """Raises JobError where the job asks for tokens that don't depend on the batch, and the engine can't promise it."""
    if request.deterministic and info.batch_dependence is not None:
        raise JobError(ErrorCode.BAD_REQUEST, f"deterministic can't be kept by this worker: {info.batch_dependence}")


def check_fits(request: GenerateRequest, prompt_ids: tuple[int, ...], info: EngineInfo) -> int:
    """The most tokens that this job may generate.

    Raises JobError where prompt and max_tokens can't fit, or where an id is none of the model's.
    """
    if not prompt_ids:
        raise JobError(ErrorCode.BAD_REQUEST, "the prompt has no tokens: send at least one character")
    check_token_ids("tokens", prompt_ids, info)
    check_token_ids("stop_token_ids", request.sampling.stop_token_ids, info)
    limit, num_prompt, max_tokens = info.max_sequence_tokens, len(prompt_ids), request.sampling.max_tokens
    if num_prompt + (max_tokens or 1) > limit:
        details = {"prompt_tokens": num_prompt, "max_tokens": max_tokens, "limit": limit}
        advice = "shorten the prompt" if num_prompt >= limit else f"ask for at most {limit - num_prompt} max_tokens"
        raise JobError(
            ErrorCode.CONTEXT_TOO_LONG,
            f"the prompt has {num_prompt} tokens, {max_tokens or 1} are to be generated, {limit} fit in all: {advice}",
            details,
        )
    num_generated = max_tokens if max_tokens is not None else limit - num_prompt
    reason = why_no_room(
        request.sampling, num_prompt, num_prompt + num_generated, info.max_num_seqs, info.num_blocks, info.block_size
    )
    if reason is not None:
        details = {"prompt_tokens": num_prompt, "beam_width": request.sampling.beam_width}
        is_wide = request.sampling.beam_width > info.max_num_seqs
        raise JobError(ErrorCode.BAD_REQUEST if is_wide else ErrorCode.CONTEXT_TOO_LONG, reason, details)
    return num_generated


def check_token_ids(name: str, ids: Collection[int], info: EngineInfo) -> None:
    """Raises JobError where a field's token ids are not all of the model's vocabulary."""
    if (largest := max(ids, default=0)) >= info.vocab_size:
        raise JobError(
            ErrorCode.BAD_REQUEST,
            f"{name} holds {largest}: leave it out, the model's token ids run from 0 to {info.vocab_size - 1}",
        )


def check_stored_ids(recovered: Recovered, info: EngineInfo) -> None:
    """Raises JobError where a reply holds tokens that this model can't have generated."""
    stored = (recovered.choice(index).ids for index in range(1 + len(recovered.others)))
    if max((max(ids, default=0) for ids in stored), default=0) >= info.vocab_size:
        raise JobError(
            ErrorCode.INTERNAL, "the reply holds tokens that the model doesn't have: send the job again with another id"
        )
