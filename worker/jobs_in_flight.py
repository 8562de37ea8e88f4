"""What happens to open jobs: tokens come in, replies go out, and each ends in exactly one way.

ended         its terminal event is written     ─► settle
abandoned     its reply was deleted by the client ─► settle, nothing to write; or first run to the end, by policy
fenced, lost  another worker has it             ─► forget: nothing is written, nothing settled
orphaned      its entry, group or lane is gone  ─► it goes on here, since nobody else can be given it
handed over   this worker stops, or its engine hung ─► a peer goes on after the last event
poison        it kills whatever computes it     ─► a dead letter, an error event, settle
"""

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from worker.dead_letters import keep_dead_letter
from worker.engine_gate import EngineGate
from worker.engine_messages import StepReport
from worker.engine_supervisor import EngineSupervisor
from worker.errors import ErrorCode, JobError, deadline_exceeded, poison
from worker.job import Job, WorkerNames
from worker.job_table import JobTable
from worker.quarantine import Marks
from worker.queue_links import QueueLinks
from worker.queue_metrics import QueueMetrics
from worker.streams.errors import ServerError
from worker.streams.leases import Entry, Loss
from worker.streams.reply_writer import ReplyStatus, ReplyWriter, compact
from worker.streams.scripts import SettleStatus
from worker.trace_recorder import TraceRecorder

log = structlog.get_logger(__name__)

# Longest wait before a dead letter that Redis did not take is tried again.
MAX_WAIT_S = 1.0
# How long what is gathered may take to be written before its job is handed over without it: a full server takes none.
WRITE_OUT_S = 2.0


class JobsInFlight:
    """Owner of the lives of one queue's open jobs; `gate` is that of the engine, which queues may share.

    `on_room` is called whenever a place became free; `recorder` hears of settled jobs.
    """

    def __init__(
        self,
        table: JobTable,
        links: QueueLinks,
        metrics: QueueMetrics,
        gate: EngineGate,
        *,
        on_room: Callable[[], None],
        recorder: TraceRecorder | None = None,
        stops_unheard: bool = True,
    ) -> None:
        """`stops_unheard`: a job whose reply is gone stops; else it runs to its end, though nobody hears of it."""
        self._table = table
        self._links = links
        self._metrics = metrics
        self._gate = gate
        self._on_room = on_room
        self._recorder = recorder
        self._stops_unheard = stops_unheard
        self._closed: asyncio.Queue[Job] = asyncio.Queue()
        self.engine: EngineSupervisor | None = None
        self.names = WorkerNames("", "", "")

    # What the engine brings.

    def on_report(self, report: StepReport) -> None:
        """Hand a step's tokens to their jobs."""
        now_ms = self._links.clock.now_ms()
        for output in report.outputs:
            job = self._table.by_seq_id(output.seq_id)
            if job is None:  # another queue's, or it ended here before the engine heard of it
                continue
            if job.envelope.is_expired(now_ms):
                self.end(job, deadline_exceeded("running"))
                continue
            self._observe_tokens(job, len(output.new_token_ids), now_ms)
            if job.absorb(output, now_ms, self.names) and self.engine is not None:
                self.engine.abort(output.seq_id)
            if job.is_over:
                self._gate.leave(job)
            elif output.new_token_ids:
                self._gate.on_tokens(job)

    def _observe_tokens(self, job: Job, num_tokens: int, now_ms: int) -> None:
        times = job.times
        if num_tokens == 0 or job.is_over:
            return
        if times.first_token_ms is None:
            self._metrics.first_token((now_ms - times.enqueued_ms) / 1000)
        elif times.last_token_ms is not None:
            self._metrics.inter_token((now_ms - times.last_token_ms) / 1000)

    # In the engine and out of it.

    async def wait_turn(self, job: Job) -> bool:
        """Wait until a suspect may be looked at, alone. False: it ended before that, or the worker stops."""
        return await self._gate.wait_turn(job, self)

    def enter_engine(self, job: Job) -> None:
        """The job is understood: it runs as soon as it may."""
        self._gate.enter(job, self)

    def put_in(self, job: Job) -> None:
        """Give the engine what is to be generated of the job."""
        self._table.enter_engine(job)
        for request in job.engine_requests(self._links.clock.now_ms()):
            if self.engine is not None:
                self.engine.add(request)

    def take_out(self, job: Job) -> None:
        """Have the engine stop whatever it still computes of the job; what it brings of it is not heard."""
        assert job.choices is not None, f"{job.envelope.id}: no choices yet"
        for seq_id in job.choices.unfinished_ids:
            if self.engine is not None:
                self.engine.abort(seq_id)
        self._table.leave_engine(job)
        job.num_set_aside += 1
        job.choices.rename(f"{job.seq_id}~{job.num_set_aside}")

    def left_dead_engine(self, job: Job) -> None:
        """The engine that had the job is gone."""
        self._table.leave_engine(job)

    async def record(self, job: Job, marks: Marks) -> bool:
        """Write the job's marks into its record. False: it is somebody else's now, as its reply will say too."""
        status = await self._links.outcomes.blame(
            job.envelope, crashes=marks.crashes, solo=marks.solo, is_alone=marks.is_alone
        )
        if status is SettleStatus.OTHER:
            self._links.replies.doubt(job.writer)
        return status is not SettleStatus.OTHER

    async def convict(self, job: Job, marks: Marks) -> None:
        """End the job as poison."""
        code = ErrorCode.POISON
        job.has_dead_letter = await keep_dead_letter(
            self._links, job.entry, code, max_wait_s=MAX_WAIT_S, opened_id=job.envelope.id
        )
        log.error("job_is_poison", **job.log_ids, crashes=marks.crashes, solo=marks.solo)
        self.end(job, poison(marks.crashes, marks.solo))

    async def let_go(self, job: Job) -> None:
        """Give the job to a peer, at once; where that fails its lease runs out."""
        self._links.source.leave_to_peers()
        try:
            await self.hand_over(job)
        except ServerError as error:
            log.error("hand_over_failed", **job.log_ids, error=str(error))
            self._forget(job)

    # How jobs end.

    def end(self, job: Job, error: JobError) -> None:
        """End a job with an error event, whatever it is doing."""
        if not job.is_over:
            self._gate.leave(job)
            job.fail(error, self._links.clock.now_ms())

    def on_closed(self, writer: ReplyWriter) -> None:
        """A reply takes no more events: its terminal one is written, a later attempt took over, or it was deleted."""
        job = self._table.by_writer(writer)
        if job is None:
            return
        if writer.status is ReplyStatus.ABANDONED and not (self._stops_unheard or job.is_over):
            log.info("job_goes_on_unheard", **job.log_ids)
            return
        self._gate.leave(job)
        if writer.status is ReplyStatus.FENCED:
            self._forget(job)
            return
        if writer.status is ReplyStatus.ABANDONED:
            job.is_over, job.outcome = True, str(ErrorCode.ABANDONED)
        self._closed.put_nowait(job)

    def on_loss(self, entry: Entry, loss: Loss) -> None:
        """A lease turned out to be another's, or nobody's: then the job goes on, unless its reply says otherwise."""
        job = self._table.by_entry(entry.key)
        if job is None or job.entry is not entry:  # not open yet, or a later claim's
            return
        if loss is Loss.LOST:
            self._gate.leave(job)
            self._forget(job)
        else:
            self._links.replies.doubt(job.writer)

    async def settle_closed(self) -> None:
        """Take ended jobs off the queue until cancelled; their terminal events are written by now."""
        while True:
            job = await self._closed.get()
            finished_ms = job.times.finished_ms or self._links.clock.now_ms()
            usage = job.usage()
            record = {"finished": str(finished_ms), "usage": compact(usage)}
            status = await self._settle(job, record)
            if status == SettleStatus.UNENDED:  # it comes again, to whoever takes it
                log.warning("reply_end_lost", **job.log_ids)
                self._remove(job)
                continue
            num_computed = usage["prompt_tokens"] + usage["completion_tokens"] if job.choices is not None else 0
            await self._links.admission.ended(job.envelope, num_computed)
            if job.choices is not None:
                self._links.oldest.rate.count()
            self._count(job, finished_ms)
            if self._recorder is not None:
                self._recorder.record(job, finished_ms)
            log.info(
                "job_settled",
                **job.log_ids,
                outcome=job.outcome,
                settled=status,
                num_prompt_tokens=len(job.prompt_ids),
                num_generated_tokens=job.writer.num_tokens,
            )
            self._remove(job)

    async def _settle(self, job: Job, record: dict[str, str]) -> str:
        # A dead letter names the job's prompt, which then stays until its own expiry.
        status = await self._links.outcomes.settle(
            job.envelope, job.outcome, record=record, keep_prompt=job.has_dead_letter
        )
        if status is SettleStatus.UNRECORDED:
            log.error("job_record_unwritable", **job.log_ids, key=self._links.keys.state(job.envelope.id))
        return status.value

    async def hand_over(self, job: Job) -> None:
        """Give a job that isn't settled to a peer, which goes on after the last event. Raises StreamsError.

        What can't be written in time is computed again there. Where its entry is gone no peer can take it, so it ends
        here with an error.
        """
        self._gate.leave(job)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WRITE_OUT_S):
                await self._links.replies.drained(job.writer)
        if job.writer.status is ReplyStatus.ABANDONED:
            self.end(job, JobError(ErrorCode.ABANDONED, "its reply was deleted: a peer can't go on with it"))
        if job.writer.status is not ReplyStatus.LIVE:
            return
        if await self._links.outcomes.hand_over(job.envelope) is SettleStatus.GONE:
            advice = "no other can take the job, since its entry was deleted: send it again with another id"
            self.end(job, JobError(ErrorCode.DRAINING, f"this worker stops, and {advice}"))
            return
        self._links.replies.discard(job.writer)
        self._remove(job)
        log.info("job_handed_over", **job.log_ids)

    def _count(self, job: Job, finished_ms: int) -> None:
        stats = job.stats
        if stats is not None:
            self._metrics.first_scheduled(job.queue_ms() / 1000)
        self._metrics.job_settled(job.outcome, (finished_ms - job.times.enqueued_ms) / 1000, stats)

    def _forget(self, job: Job) -> None:
        """The job is somebody else's now: nothing more is written, and it is not settled."""
        job.is_over = True
        self._links.replies.discard(job.writer)
        self._links.leases.forget(job.entry)
        self._remove(job)

    def _remove(self, job: Job) -> None:
        self._table.remove(job)
        self._on_room()
