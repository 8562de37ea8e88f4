"""Decides, step by step, which tokens of which sequences are computed."""

from collections import deque
from itertools import chain

from scheduler.admission import Admission
from scheduler.beam_group import BeamGroup
from scheduler.beam_intake import check_beams
from scheduler.config import CacheConfig, PreemptionMode, SchedulerConfig
from scheduler.deadlines import Deadlines
from scheduler.errors import DuplicateSequenceError, InvalidConfigError, PromptTooLongError
from scheduler.kv_cache_manager import KVCacheManager
from scheduler.lookahead import Lookahead, StepInFlight
from scheduler.output import (
    FinishReason,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
    SequenceOutput,
    TransferResult,
)
from scheduler.policy import Policy
from scheduler.policy_names import parse_policy
from scheduler.preemption import Preemptor
from scheduler.progress import Progress
from scheduler.queues import Queues
from scheduler.roster import Roster
from scheduler.sequence import Sequence, SequenceStatus
from scheduler.serving import Serving
from scheduler.stats import make_stats
from scheduler.step_adder import StepAdder
from scheduler.step_watch import StepWatch
from scheduler.stopping import finish_reason
from scheduler.tier_hits import TierHits
from scheduler.write_behind import WriteBehind


class Scheduler:
    """One token budget a step, no phases: running sequences first, then waiting ones.

        while scheduler.has_work:
            output = scheduler.schedule(now)
            outputs = scheduler.update(output, runner.execute(output), now)

    Every `schedule` is followed by its `update`. Between the two the next step may be decided already, with
    `try_schedule_ahead`: the updates come in the order of the steps, each before the step after the next. `add` and
    `abort` may come at any time between. One thread at a time. `now` is in seconds of the clock that arrivals and
    deadlines are of; from `schedule` to `update`, or from the update before if that is later, is a step's time.

    Whoever's deadline has come is dropped by the next `schedule`, in whatever state it is, and its blocks are free in
    this step; the next `update` says so.

    The runner has rows of RUNNING sequences and of no others: one gets a NewRow with its first chunk after it was
    admitted or swapped in, and its id is in `removed_ids` of exactly one later output once it has left that state.
    Ids that are still to be reported count as work, so the last ones reach the runner too, in a step without chunks.
    So do copies between the tiers that are on their way.

    The parts of a step are owners of their own: `Serving`, `Admission`, `WriteBehind` and `Progress`, over the same
    `Queues`, which say who is where, and `Roster`, which lets sequences in and out.

    waiting, running, moving, ending: the queues, to be read.

    Raises InvalidConfigError for a preemption mode `swap` without a CPU tier.
    """

    def __init__(self, config: SchedulerConfig, cache: CacheConfig, kv: KVCacheManager | None = None) -> None:
        self.config = config
        self._cache = cache
        self.kv = kv = KVCacheManager(cache) if kv is None else kv
        if config.preemption_mode is PreemptionMode.SWAP and kv.swap is None:
            raise InvalidConfigError(
                "preemption_mode is swap, but the CPU tier has no blocks: give it some, or use auto or recompute"
            )
        self.policy = policy = Policy(parse_policy(config.scheduling_policy), kv.pool.num_blocks)
        self._watch = watch = StepWatch(config, policy.fair)
        self._queues = queues = Queues(policy)
        self.waiting, self.running, self.moving = queues.waiting, queues.running, queues.moving
        self.ending = queues.ending
        self._roster = roster = Roster(kv, queues, Deadlines(watch.pace), policy.fair)
        self._preemptor = Preemptor(kv, config, cache.kv_block_bytes)
        self._serving = Serving(kv, queues, roster, policy, self._preemptor)
        self._admission = Admission(kv, queues, roster, policy, watch, delay_factor=config.scheduler_delay_factor)
        self._tier_hits = TierHits(kv, config, cache.kv_block_bytes)
        is_swapping = config.preemption_mode is not PreemptionMode.RECOMPUTE
        self._write_behind = WriteBehind(kv, config.write_behind_blocks if is_swapping else 0)
        self._progress = Progress(
            kv, queues, roster, eos_token_ids=config.eos_token_ids, drops_hopeless=policy.drops_hopeless
        )
        self.lookahead = Lookahead(kv, queues, self._roster.deadlines, config.max_num_batched_tokens)
        # Steps that were scheduled and not updated, in their order: two at most.
        self._in_flight: deque[StepInFlight] = deque()
        self._step = 0
        self._num_step_splits = 0

    @property
    def max_num_tokens(self) -> int:
        """Tokens that one sequence may have, prompt and generated: the context, or the whole pool if that is less."""
        return min(self.config.max_model_len, self.kv.pool.num_blocks * self.kv.block_size)

    @property
    def num_unfinished(self) -> int:
        """Sequences that were added and have neither ended nor been aborted."""
        return len(self._roster)

    @property
    def complete(self) -> list[Sequence]:
        """Resumed sequences that were complete when they came, and end with the next `update`."""
        return [seq for seq, _ in self._queues.complete.values()]

    @property
    def has_unfinished(self) -> bool:
        """Whether a sequence was added that has neither ended nor been aborted."""
        return len(self._roster) > 0

    @property
    def has_work(self) -> bool:
        """Whether a step is due: something is unfinished or not told, or the runner holds rows or copies of its."""
        return self.has_unfinished or self._roster.has_news or self.kv.has_transfers

    def add(self, seq: Sequence) -> None:
        """Take a sequence on. It is this scheduler's until it ends.

        Raises DuplicateSequenceError, PromptTooLongError where prompt and `max_tokens` could never fit, even with
        nothing else running, with all beams of a beam search, and InvalidPromptError where its family has another
        prompt, or a beam search should be resumed. A resumed sequence that lacks nothing ends with the next `update`.
        """
        if self._roster.get(seq.seq_id) is not None:
            raise DuplicateSequenceError(f"sequence {seq.seq_id} is running or waiting already: give it another id")
        seq.max_num_tokens = self._max_num_tokens_of(seq)
        if seq.sampling.is_beam_search:
            check_beams(seq, self.config.max_num_seqs, self.kv.pool.num_blocks, self.kv.block_size)
            seq.beams = BeamGroup(seq, self.config.eos_token_ids)
        self._roster.enter(seq, finish_reason(seq, self.config.eos_token_ids))

    def abort(self, seq_id: str) -> bool:
        """End a sequence in whatever state it is; False if none of this id is unfinished. No output follows.

        If a step is computing it right now, its blocks are free at once all the same: whoever gets them writes
        in a later step, and nothing of this step is entered into the prefix cache. Blocks that are being copied
        are free when their transfer has ended.
        """
        seq = self._roster.get(seq_id)
        if seq is None:
            return False
        self._queues.take_out(seq)
        self._roster.end(seq, FinishReason.ABORTED)
        return True

    def preempt(self, seq_id: str) -> bool:
        """Have a running sequence give way although nobody needs its blocks; False if it does not run, or leads.

        It comes back like any victim. Not between `schedule` and `update`.
        """
        assert not self._in_flight, f"{seq_id} is preempted while step {self._step} computes"
        seq = self._roster.get(seq_id)
        if seq is None or seq.status is not SequenceStatus.RUNNING or seq is self.running.leader:
            return False
        self.running.remove(seq)
        self._serving.preempt(seq)
        return True

    def schedule(self, now: float) -> SchedulerOutput:
        """Decide the next step and allocate its blocks.

        If anything is unfinished, it computes a token at least, or copies between the tiers are on their way.
        """
        assert not self._in_flight, f"step {self._step} was scheduled, but never updated"
        return self._schedule(now)

    def try_schedule_ahead(self, now: float) -> SchedulerOutput | None:
        """Decide the step after the one that is being computed; None where that needs its outcome (`lookahead`)."""
        assert len(self._in_flight) == 1, f"{len(self._in_flight)} steps are in flight, and not 1"
        if not self.lookahead.try_assume(self._in_flight[0], now, is_step_counted=self.policy.drops_hopeless):
            return None
        return self._schedule(now)

    def without_ended(self, output: SchedulerOutput) -> SchedulerOutput:
        """A step that was scheduled ahead, and that nobody has begun, without chunks of those that have ended since."""
        assert self._in_flight, f"step {output.step} is not in flight"
        assert self._in_flight[-1].step == output.step, f"step {output.step} is not the last one"
        return self._in_flight[-1].drop_ended(output)

    def _schedule(self, now: float) -> SchedulerOutput:
        self._watch.begin(now)
        self._roster.drop_overdue(now, is_step_counted=self.policy.drops_hopeless)
        adder = StepAdder(self.kv, self._watch.guard.num_step_tokens(len(self.running)), self._tier_hits)
        has_lacked_blocks = self._serving.serve(adder)
        # Who was preempted must not be let in again with the blocks it has just made room with.
        if not has_lacked_blocks:
            self._admission.admit(adder, now)
        self._write_behind.begin(self.running, adder.num_admitted)
        self._step += 1
        output = adder.build(self._step, self._roster.take_removed_ids())
        self._in_flight.append(StepInFlight(self._step, adder.seqs, output.chunks))
        return output

    def update(self, output: SchedulerOutput, runner_output: ModelRunnerOutput, now: float) -> list[SequenceOutput]:
        """Take in what a step has computed; the new tokens and the ends, in no particular order.

        A sequence that was aborted meanwhile is passed over. One in `runner_output.failed` ends with an error, and
        what its blocks hold is not used again.
        """
        assert self._in_flight, f"step {output.step} is updated twice"
        step = self._in_flight[0]
        assert output.step == step.step, f"step {output.step} is updated, but step {step.step} was the last"
        self._in_flight.popleft()
        self._num_step_splits += runner_output.num_splits
        self._watch.end(now, chain(self.running, self.ending.values()), step.seqs, step.chunks)
        for result in runner_output.transfers:
            self._end_transfer(result)
        outputs = self._roster.end_complete(now)
        outputs += self._progress.take_in(step.seqs, step.chunks, runner_output, now)
        outputs += self._roster.take_overdue()
        return outputs

    def stats(self) -> SchedulerStats:
        """A snapshot. After an `update`, the slots that are filled are exactly those of computed tokens."""
        return make_stats(
            self.kv,
            self._queues,
            self._preemptor,
            num_recomputed_tokens=self._progress.num_recomputed_tokens,
            num_missing_blocks=self._serving.num_missing_blocks,
            num_step_splits=self._num_step_splits,
            num_overdue=self._roster.num_overdue,
            num_allowed_seqs=self._watch.guard.num_seqs,
            kv_block_bytes=self._cache.kv_block_bytes,
        )

    def _max_num_tokens_of(self, seq: Sequence) -> int:
        limit = self.max_num_tokens
        max_tokens = seq.sampling.max_tokens
        num_wanted = max(1, seq.num_generated_tokens) if max_tokens is None else max_tokens
        num_tokens = seq.num_prompt_tokens + num_wanted
        if num_tokens > limit:
            raise PromptTooLongError(
                f"the prompt has {seq.num_prompt_tokens} tokens and {num_wanted} more are wanted, but a sequence has "
                f"room for {limit} (context {self.config.max_model_len}, KV cache {self.kv.pool.num_blocks} blocks of "
                f"{self.kv.block_size}): shorten the prompt or ask for fewer tokens"
            )
        return limit if max_tokens is None else num_tokens

    def _end_transfer(self, result: TransferResult) -> None:
        for seq in self.kv.end_transfer(result):
            del self.moving[seq.seq_id]
            self._queues.place(seq)
