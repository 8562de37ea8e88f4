"""Decides, step by step, which tokens of which sequences are computed."""

from dataclasses import replace
from itertools import chain, count

from scheduler.admission_delay import AdmissionDelay
from scheduler.beam_blocks import each_beam, num_empty_slots
from scheduler.beam_group import BeamGroup
from scheduler.beam_intake import check_beams
from scheduler.config import CacheConfig, PreemptionMode, SchedulerConfig
from scheduler.deadlines import Deadlines
from scheduler.errors import DuplicateSequenceError, InvalidConfigError, PromptTooLongError
from scheduler.kv_cache_manager import KVCacheManager
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
from scheduler.preemption import Preemptor, RunningQueue
from scheduler.sequence import Sequence, SequenceStatus
from scheduler.step_adder import StepAdder
from scheduler.step_watch import StepWatch
from scheduler.stopping import finish_reason
from scheduler.tier_hits import TierHits
from scheduler.waiting_queue import WaitingQueue
from scheduler.write_behind import WriteBehind

# So many sequences may be admitted past one that doesn't fit; then they wait behind it.
MAX_PASSES = 32
# So many that don't fit are passed in one step: each may cost a walk through the prefix cache.
MAX_PASSED = 8


class Scheduler:
    """One token budget a step, no phases: running sequences first, then waiting ones.

        while scheduler.has_work:
            output = scheduler.schedule(now)
            outputs = scheduler.update(output, runner.execute(output), now)

    Every `schedule` is followed by its `update`. `add` and `abort` may come at any time between. One thread at a time.
    `now` is in seconds of the clock that arrivals and deadlines are of; from `schedule` to `update` is a step's time.

    Whoever's deadline has come is dropped by the next `schedule`, in whatever state it is, and its blocks are free in
    this step; the next `update` says so.

    The runner has rows of RUNNING sequences and of no others: one gets a NewRow with its first chunk after it was
    admitted or swapped in, and its id is in `removed_ids` of exactly one later output once it has left that state.
    Ids that are still to be reported count as work, so the last ones reach the runner too, in a step without chunks.
    So do copies between the tiers that are on their way.

    Who is where: `waiting` holds those that are WAITING or SWAPPED, in one order; `running` the RUNNING ones;
    `moving` those that are SWAPPING_OUT or SWAPPING_IN.

    Raises InvalidConfigError for a preemption mode `swap` without a CPU tier.
    """

    def __init__(self, config: SchedulerConfig, cache: CacheConfig, kv: KVCacheManager | None = None) -> None:
        self.config = config
        self._cache = cache
        self.kv = KVCacheManager(cache) if kv is None else kv
        if config.preemption_mode is PreemptionMode.SWAP and self.kv.swap is None:
            raise InvalidConfigError(
                "preemption_mode is swap, but the CPU tier has no blocks: give it some, or use auto or recompute"
            )
        self.policy = Policy(parse_policy(config.scheduling_policy), self.kv.pool.num_blocks)
        self.waiting = WaitingQueue(self.policy)
        self.running = RunningQueue(self.policy.protection_key)
        self.moving: dict[str, Sequence] = {}
        self._preemptor = Preemptor(self.kv, config, cache.kv_block_bytes)
        self._tier_hits = TierHits(self.kv, config, cache.kv_block_bytes)
        is_swapping = config.preemption_mode is not PreemptionMode.RECOMPUTE
        self._write_behind = WriteBehind(self.kv, config.write_behind_blocks if is_swapping else 0)
        self._watch = StepWatch(config, self.policy.fair)
        self._deadlines = Deadlines(self._watch.pace)
        self._delay = AdmissionDelay(config.scheduler_delay_factor, self._watch.pace)
        self._seqs: dict[str, Sequence] = {}
        # Resumed sequences that were complete when they came: they end with the next update.
        self._complete: dict[str, tuple[Sequence, FinishReason]] = {}
        # Who was dropped for its deadline since the last update.
        self._overdue: list[SequenceOutput] = []
        self._removed_ids: list[str] = []
        # The sequences of the chunks that are being computed, in their order.
        self._in_flight: list[Sequence] | None = None
        self._step = 0
        self._serials = count()
        self._num_recomputed_tokens = 0
        self._num_missing_blocks = 0
        self._num_step_splits = 0
        self._num_overdue = 0

    @property
    def max_num_tokens(self) -> int:
        """Tokens that one sequence may have, prompt and generated: the context, or the whole pool if that is less."""
        return min(self.config.max_model_len, self.kv.pool.num_blocks * self.kv.block_size)

    @property
    def num_unfinished(self) -> int:
        """Sequences that were added and have neither ended nor been aborted."""
        return len(self._seqs)

    @property
    def complete(self) -> list[Sequence]:
        """Resumed sequences that were complete when they came, and end with the next `update`."""
        return [seq for seq, _ in self._complete.values()]

    @property
    def has_unfinished(self) -> bool:
        """Whether a sequence was added that has neither ended nor been aborted."""
        return bool(self._seqs)

    @property
    def has_work(self) -> bool:
        """Whether a step is due: something is unfinished or not told, or the runner holds rows or copies of its."""
        return bool(self._seqs or self._removed_ids or self._overdue or self.kv.has_transfers)

    def add(self, seq: Sequence) -> None:
        """Take a sequence on. It is this scheduler's until it ends.

        Raises DuplicateSequenceError, PromptTooLongError where prompt and `max_tokens` could never fit, even with
        nothing else running, with all beams of a beam search, and InvalidPromptError where its family has another
        prompt, or a beam search should be resumed. A resumed sequence that lacks nothing ends with the next `update`.
        """
        if seq.seq_id in self._seqs:
            raise DuplicateSequenceError(f"sequence {seq.seq_id} is running or waiting already: give it another id")
        seq.max_num_tokens = self._max_num_tokens_of(seq)
        if seq.sampling.is_beam_search:
            check_beams(seq, self.config.max_num_seqs, self.kv.pool.num_blocks, self.kv.block_size)
            seq.beams = BeamGroup(seq, self.config.eos_token_ids)
        if seq.family is not None:
            seq.family.join(seq)
        seq.serial = next(self._serials)
        self._seqs[seq.seq_id] = seq
        if self.policy.fair is not None:
            self.policy.fair.arrive(seq)
        reason = finish_reason(seq, self.config.eos_token_ids)
        if reason is None:
            self._deadlines.add(seq)
            self.waiting.add(seq)
        else:
            self._complete[seq.seq_id] = (seq, reason)

    def abort(self, seq_id: str) -> bool:
        """End a sequence in whatever state it is; False if none of this id is unfinished. No output follows.

        If a step is computing it right now, its blocks are free at once all the same: whoever gets them writes
        in a later step, and nothing of this step is entered into the prefix cache. Blocks that are being copied
        are free when their transfer has ended.
        """
        seq = self._seqs.get(seq_id)
        if seq is None:
            return False
        self._take_out(seq)
        self._end(seq, FinishReason.ABORTED)
        return True

    def preempt(self, seq_id: str) -> bool:
        """Have a running sequence give way although nobody needs its blocks; False if it does not run, or leads.

        It comes back like any victim. Not between `schedule` and `update`.
        """
        assert self._in_flight is None, f"{seq_id} is preempted while step {self._step} computes"
        seq = self._seqs.get(seq_id)
        if seq is None or seq.status is not SequenceStatus.RUNNING or seq is self.running.leader:
            return False
        self.running.remove(seq)
        self._preempt(seq)
        return True

    def schedule(self, now: float) -> SchedulerOutput:
        """Decide the next step and allocate its blocks.

        If anything is unfinished, it computes a token at least, or copies between the tiers are on their way.
        """
        assert self._in_flight is None, f"step {self._step} was scheduled, but never updated"
        self._watch.begin(now)
        for seq in self._deadlines.take_overdue(now, is_step_counted=self.policy.drops_hopeless):
            self._drop(seq, now)
        num_tokens = self._watch.guard.num_step_tokens(len(self.running))
        adder = StepAdder(self.kv, num_tokens, self._tier_hits)
        has_lacked_blocks = self._serve_running(adder)
        # Who was preempted must not be let in again with the blocks it has just made room with.
        if self.waiting and not has_lacked_blocks and self._is_admission_due(adder, now):
            self._admit_waiting(adder, now)
        self._write_behind.begin(self.running)
        self._step += 1
        self._in_flight = adder.seqs
        removed_ids, self._removed_ids = tuple(self._removed_ids), []
        return adder.build(self._step, removed_ids)

    def update(self, output: SchedulerOutput, runner_output: ModelRunnerOutput, now: float) -> list[SequenceOutput]:
        """Take in what a step has computed; the new tokens and the ends, in no particular order.

        A sequence that was aborted meanwhile is passed over. One in `runner_output.failed` ends with an error, and
        what its blocks hold is not used again.
        """
        assert self._in_flight is not None, f"step {output.step} is updated twice"
        assert output.step == self._step, f"step {output.step} is updated, but step {self._step} was the last"
        seqs, self._in_flight = self._in_flight, None
        self._num_step_splits += runner_output.num_splits
        self._watch.end(now, self.running, seqs, output.chunks)
        for result in runner_output.transfers:
            self._end_transfer(result)
        outputs, self._overdue = self._overdue, []
        for seq, reason in self._complete.values():
            self._end(seq, reason)
            outputs.append(SequenceOutput(seq.seq_id, (), reason, stats=seq.stats(now)))
        self._complete.clear()
        chunks, sampled = output.chunks, runner_output.sampled
        failed, logprobs = runner_output.failed, runner_output.logprobs
        for seq, num_tokens, is_sampled in zip(seqs, chunks.num_tokens, chunks.is_sampled, strict=True):
            if seq.status is SequenceStatus.FINISHED:
                continue
            if failed and seq.seq_id in failed:
                is_out_of_memory = seq.seq_id in runner_output.out_of_memory_ids
                outputs.append(self._fail(seq.head, failed[seq.seq_id], now, is_out_of_memory=is_out_of_memory))
                continue
            self._advance(seq, num_tokens)
            if is_sampled and seq.beams is not None:
                outputs += self._advance_beams(seq.beams, seq, runner_output, now)
            elif is_sampled:
                logprob = logprobs.get(seq.seq_id) if logprobs else None
                outputs.append(self._append_token(seq, sampled[seq.seq_id], logprob, now))
            elif self.policy.drops_hopeless and self._deadlines.is_hopeless(seq.head, now):
                self._drop(seq.head, now)
                outputs.append(self._overdue.pop())
        return outputs

    def stats(self) -> SchedulerStats:
        """A snapshot. After an `update`, the slots that are filled are exactly those of computed tokens."""
        kv, pool, swap = self.kv, self.kv.pool, self.kv.swap
        num_allocated = kv.num_owned_blocks * kv.block_size
        # But for beams only full blocks are shared, so what is empty is empty in one sequence's last blocks. Blocks on
        # their way in or out count as filled.
        num_empty = sum(
            [
                len(seq.block_table) * kv.block_size - seq.num_computed_tokens
                if seq.beams is None
                else num_empty_slots(seq.beams, kv.block_size)
                for seq in self.running
            ]
        )
        num_swapped = 0 if swap is None else swap.num_sequences
        block_bytes = self._cache.kv_block_bytes
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting) + len(self.moving) - num_swapped,
            num_swapped=num_swapped,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free - pool.num_free_cached,
            num_cached_blocks=pool.num_free_cached,
            num_filled_slots=num_allocated - num_empty,
            num_allocated_slots=num_allocated,
            num_preemptions_recompute=self._preemptor.num_recomputes,
            num_preemptions_swap=self._preemptor.num_swaps,
            num_recomputed_tokens=self._num_recomputed_tokens,
            prefix_queried_tokens=kv.num_queried_tokens,
            prefix_hit_tokens=kv.num_hit_tokens,
            num_missing_blocks=self._num_missing_blocks,
            num_full_tier_recomputes=self._preemptor.num_full_tier_recomputes,
            num_swapped_out_blocks=0 if swap is None else swap.num_out_blocks,
            num_swapped_in_blocks=0 if swap is None else swap.num_in_blocks,
            swapped_out_bytes=0 if swap is None else swap.num_out_blocks * block_bytes,
            swapped_in_bytes=0 if swap is None else swap.num_in_blocks * block_bytes,
            num_damaged_blocks=0 if swap is None else swap.num_damaged_blocks,
            num_cpu_blocks=0 if swap is None else swap.pool.num_blocks,
            num_used_cpu_blocks=0 if swap is None else swap.pool.num_blocks - swap.pool.num_free,
            num_transfers=0 if swap is None else len(swap.flights),
            num_step_splits=self._num_step_splits,
            prefix_tier_hit_tokens=kv.num_tier_hit_tokens,
            num_written_behind_blocks=0 if swap is None else swap.num_written_behind_blocks,
            written_behind_bytes=0 if swap is None else swap.num_written_behind_blocks * block_bytes,
            num_overdue=self._num_overdue,
            num_allowed_seqs=self._watch.guard.num_seqs,
            num_saved_blocks=self._num_saved_blocks(),
            num_forks=kv.num_forks,
            num_copied_blocks=kv.num_copied_blocks,
        )

    def _num_saved_blocks(self) -> int:
        num_in_tables = sum([len(seq.block_table) for seq in each_beam(chain(self.running, self.moving.values()))])
        return num_in_tables - (self.kv.num_owned_blocks - self.kv.num_leaving_blocks)

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

    def _serve_running(self, adder: StepAdder) -> bool:
        """Give each running sequence its chunk, preempting from the back where blocks run out; whether they did.

        One that lacks no more than what copies on their way will free sits this step out, and nobody is preempted
        for it. So does a leader without anybody left to preempt: what it lacks is on its way.
        """
        running = self.running
        growing = self._growing_in_order(adder)
        num_other_beams = sum([len(running[index].all_beams) - 1 for index in growing])
        last_lacking: Sequence | None = None
        index = 0
        for growing_index in (*growing, len(running)):
            adder.serve_decodes(running.part(index, growing_index))
            index = growing_index
            while index == growing_index < len(running) and adder.num_tokens_left > 0:
                seq = running[index]
                num_behind = len(running) - index - 1 + num_other_beams
                if adder.try_serve(seq, num_behind):
                    index += 1
                    continue
                if seq is not last_lacking:
                    last_lacking = seq
                    self._num_missing_blocks += adder.num_missing_blocks(seq, num_behind)
                is_last = len(running) == 1 and self.kv.has_transfers
                if is_last or (self.kv.has_transfers and adder.try_reserve(seq, num_behind)):
                    index += 1
                    continue
                self._preempt(running.pop_victim())
            if index >= len(running) or adder.num_tokens_left == 0:
                break
        return last_lacking is not None

    def _growing_in_order(self, adder: StepAdder) -> list[int]:
        """Which of the running sequences are no mere decodes, those being in the order of now if blocks may run out."""
        growing = self.running.growing()
        if self.policy.fair is None or not adder.may_lack_blocks([self.running[index] for index in growing]):
            return growing
        self.running.reorder()
        return self.running.growing()

    def _remove_row(self, seq: Sequence) -> None:
        """Have the runner drop its row, if it has one: after a swap it gets it back with its next chunk only."""
        if seq.has_row:
            self._removed_ids.append(seq.seq_id)
            seq.has_row = False
            seq.num_decode_slots = 0

    def _preempt(self, victim: Sequence) -> None:
        for beam in victim.all_beams:
            self._remove_row(beam)
        self._preemptor.preempt(victim)
        self._place(victim)

    def _place(self, seq: Sequence) -> None:
        """Put a sequence that is in no queue into that of its status."""
        if seq.status is SequenceStatus.RUNNING:
            self.running.add(seq)
        elif seq.status in (SequenceStatus.SWAPPING_OUT, SequenceStatus.SWAPPING_IN):
            self.moving[seq.seq_id] = seq
        else:
            self.waiting.add(seq)

    def _end_transfer(self, result: TransferResult) -> None:
        for seq in self.kv.end_transfer(result):
            del self.moving[seq.seq_id]
            self._place(seq)

    def _is_admission_due(self, adder: StepAdder, now: float) -> bool:
        """Whether one more may run now: nobody is held back for others to come where nothing runs."""
        if adder.num_tokens_left == 0 or len(self.running) + len(self._coming()) >= self._watch.guard.num_seqs:
            return False
        return len(self.running) == 0 or self._delay.is_due(self.waiting, adder.num_tokens_left, now)

    def _coming(self) -> list[Sequence]:
        """Those that are being swapped in: they will run as soon as that has ended."""
        return [seq for seq in self.moving.values() if seq.status is SequenceStatus.SWAPPING_IN]

    def _admit_waiting(self, adder: StepAdder, now: float) -> None:
        """Admit in order while there is room. Small ones may pass a big one that doesn't fit, up to a limit."""
        passed: list[Sequence] = []
        is_passed_too_often = False
        admitted: list[Sequence] = []
        hopeless: list[Sequence] = []
        max_num_seqs, drops_hopeless = self._watch.guard.num_seqs, self.policy.drops_hopeless
        coming = self._coming()
        num_admitted = sum([seq.sampling.beam_width for seq in chain(self.running, coming)])
        adder.open_admission(chain(self.running, coming))
        for seq in self.waiting.candidates():
            if adder.num_tokens_left == 0 or num_admitted >= max_num_seqs:
                break
            if seq.family is not None and seq.family.is_awaited_by(seq):
                continue
            if drops_hopeless and seq.deadline_s is not None and self._is_hopeless(seq, now):
                hopeless.append(seq)
                continue
            if len(passed) == MAX_PASSED or is_passed_too_often:
                break
            num_rows = seq.sampling.beam_width
            has_rows = num_admitted == 0 or num_admitted + num_rows <= max_num_seqs
            if has_rows and adder.try_admit(seq, is_alone=num_admitted == 0 and not self.kv.has_transfers):
                admitted.append(seq)
                num_admitted += num_rows
                self._charge_prompt(seq)
                for other in passed:
                    other.num_passes += 1
                    is_passed_too_often |= other.num_passes == MAX_PASSES
            else:
                passed.append(seq)
                is_passed_too_often |= seq.num_passes == MAX_PASSES
        for seq in hopeless:
            self._drop(seq, now)
        self._let_in(admitted, now)

    def _let_in(self, admitted: list[Sequence], now: float) -> None:
        """Move those that the step has taken in from the waiting queue to where they are now."""
        for seq in admitted:
            self.waiting.admit(seq)
            if seq.status is not SequenceStatus.SWAPPING_IN:
                seq.status = SequenceStatus.RUNNING
            self._place(seq)
            if seq.first_scheduled_s is None:
                seq.first_scheduled_s = now

    def _charge_prompt(self, seq: Sequence) -> None:
        """Have the tenant pay, once, for what is to be computed of the prompt of one that is admitted."""
        if self.policy.fair is not None and seq.first_scheduled_s is None:
            num_present = max(seq.num_cached_tokens, seq.num_computed_tokens)
            self.policy.fair.charge_prompt(seq, max(0, seq.num_prompt_tokens - num_present))

    def _advance(self, seq: Sequence, num_tokens: int) -> None:
        start = seq.num_computed_tokens
        end = seq.num_computed_tokens = start + num_tokens
        if start < seq.num_tokens_seen:
            num_again = min(end, seq.num_tokens_seen) - start
            seq.head.num_recomputed_tokens += num_again
            self._num_recomputed_tokens += num_again
        seq.num_tokens_seen = max(seq.num_tokens_seen, end)
        block_size = self.kv.block_size
        if end // block_size > start // block_size:
            self.kv.seal_full_blocks(seq)

    def _append_token(self, seq: Sequence, token_id: int, logprob: float | None, now: float) -> SequenceOutput:
        seq.token_ids.append(token_id)
        if seq.first_token_s is None:
            seq.first_token_s = now
        reason = finish_reason(seq, self.config.eos_token_ids)
        if reason is None:
            return SequenceOutput(seq.seq_id, (token_id,), logprob=logprob)
        self.running.remove(seq)
        self._end(seq, reason)
        return SequenceOutput(seq.seq_id, (token_id,), reason, stats=seq.stats(now), logprob=logprob)

    def _advance_beams(
        self, group: BeamGroup, beam: Sequence, runner_output: ModelRunnerOutput, now: float
    ) -> list[SequenceOutput]:
        """Take in the candidates of a beam; when all have theirs, choose the next beams, or end the search."""
        head = group.head
        group.candidates[beam.seq_id] = runner_output.candidates[beam.seq_id]
        if not group.is_standing:
            return []
        if head.first_token_s is None:
            head.first_token_s = now
        if not group.advance(self.kv, self._remove_row):
            return []
        self.running.remove(head)
        hypotheses = group.hypotheses
        self._end(head, hypotheses[0].finish_reason)
        num_tokens = sum([len(hypothesis.token_ids) for hypothesis in hypotheses])
        stats = replace(head.stats(now), num_generated_tokens=num_tokens)
        return [SequenceOutput(head.seq_id, (), head.finish_reason, stats=stats, hypotheses=hypotheses)]

    def _is_hopeless(self, seq: Sequence, now: float) -> bool:
        """Whether a waiting sequence can't make it, even with what a tier or its family has of it."""
        if not self._deadlines.is_hopeless(seq, now):
            return False
        if seq.family is not None and seq.family.source(seq) is not None:
            return self._deadlines.is_hopeless(seq, now, min(seq.num_prompt_tokens, seq.num_tokens - 1))
        return self._deadlines.is_hopeless(seq, now, self.kv.num_found_tokens(seq))

    def _take_out(self, seq: Sequence) -> None:
        """Take an unfinished sequence out of whichever queue it is in."""
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
        elif self.moving.pop(seq.seq_id, None) is None and self._complete.pop(seq.seq_id, None) is None:
            self.waiting.remove(seq)

    def _drop(self, seq: Sequence, now: float) -> None:
        """End a sequence for its deadline, as an abort would; the next update says so."""
        self._take_out(seq)
        self._end(seq, FinishReason.DEADLINE)
        self._num_overdue += 1
        self._overdue.append(SequenceOutput(seq.seq_id, (), FinishReason.DEADLINE, stats=seq.stats(now)))

    def _fail(self, seq: Sequence, error: str, now: float, *, is_out_of_memory: bool) -> SequenceOutput:
        self.running.remove(seq)
        for beam in seq.all_beams:
            self.kv.discard(beam)
        self._end(seq, FinishReason.ERROR)
        return SequenceOutput(seq.seq_id, (), FinishReason.ERROR, error, seq.stats(now), is_out_of_memory)

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        """The one door out: whoever ends, for whatever reason, leaves no block, row or entry behind.

        The caller has taken it out of its queue.
        """
        for beam in seq.all_beams:
            self._remove_row(beam)
            self.kv.free(beam)
            beam.status = SequenceStatus.FINISHED
        if seq.family is not None:
            seq.family.leave(seq)
        seq.finish_reason = reason
        del self._seqs[seq.seq_id]
        self._deadlines.leave(seq)
        if self.policy.fair is not None:
            self.policy.fair.leave(seq)
