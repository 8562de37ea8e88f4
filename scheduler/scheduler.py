"""Decides, step by step, which tokens of which sequences are computed."""

from itertools import count

from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.errors import DuplicateSequenceError, PromptTooLongError
from scheduler.kv_cache_manager import KVCacheManager
from scheduler.output import (
    Chunk,
    FinishReason,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
    SequenceOutput,
)
from scheduler.policy import WaitingQueue
from scheduler.preemption import PreemptionMode, Preemptor, RunningQueue
from scheduler.sequence import Sequence, SequenceStatus
from scheduler.step_adder import StepAdder
from scheduler.stopping import finish_reason

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
    `now` is in seconds; the scheduler only stores it and never compares it with a clock.

    The runner has a row for each RUNNING sequence and no other: it gets a NewRow at admission, and its id is in
    `removed_ids` of exactly one later output once it has left that state. Ids that are still to be reported
    count as work, so the last ones reach the runner too, in a step without chunks.
    """

    def __init__(self, config: SchedulerConfig, cache: CacheConfig, kv: KVCacheManager | None = None) -> None:
        self.config = config
        self.kv = KVCacheManager(cache) if kv is None else kv
        self.waiting = WaitingQueue()
        self.running = RunningQueue()
        self._preemptor = Preemptor(self.kv)
        self._seqs: dict[str, Sequence] = {}
        # Resumed sequences that were complete when they came: they end with the next update.
        self._complete: dict[str, tuple[Sequence, FinishReason]] = {}
        self._removed_ids: list[str] = []
        self._in_flight: list[tuple[Sequence, Chunk]] | None = None
        self._step = 0
        self._serials = count()
        self._num_recomputed_tokens = 0

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
        """Whether a step is due: something is unfinished, or the runner holds rows of what has ended."""
        return bool(self._seqs or self._removed_ids)

    def add(self, seq: Sequence) -> None:
        """Take a sequence on. It is this scheduler's until it ends.

        Raises DuplicateSequenceError, and PromptTooLongError where prompt and `max_tokens` could never fit, even
        with nothing else running. A resumed sequence that lacks nothing ends with the next `update`.
        """
        if seq.seq_id in self._seqs:
            raise DuplicateSequenceError(f"sequence {seq.seq_id} is running or waiting already: give it another id")
        seq.max_num_tokens = self._max_num_tokens_of(seq)
        seq.serial = next(self._serials)
        self._seqs[seq.seq_id] = seq
        reason = finish_reason(seq, self.config.eos_token_ids)
        if reason is None:
            self.waiting.add(seq)
        else:
            self._complete[seq.seq_id] = (seq, reason)

    def abort(self, seq_id: str) -> bool:
        """End a sequence in whatever state it is; False if none of this id is unfinished. No output follows.

        If a step is computing it right now, its blocks are free at once all the same: whoever gets them writes
        in a later step, and nothing of this step is entered into the prefix cache.
        """
        seq = self._seqs.get(seq_id)
        if seq is None:
            return False
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
        elif self._complete.pop(seq_id, None) is None:
            self.waiting.remove(seq)
        self._end(seq, FinishReason.ABORTED)
        return True

    def schedule(self, now: float) -> SchedulerOutput:
        """Decide the next step and allocate its blocks. If anything is unfinished, it computes a token at least."""
        assert self._in_flight is None, f"step {self._step} was scheduled, but never updated"
        adder = StepAdder(self.kv, self.config.max_num_batched_tokens)
        has_preempted = self._serve_running(adder)
        # Who was preempted must not be let in again with the blocks it has just made room with.
        if self.waiting and not has_preempted:
            self._admit_waiting(adder, now)
        self._step += 1
        self._in_flight = adder.work
        removed_ids, self._removed_ids = tuple(self._removed_ids), []
        return adder.build(self._step, removed_ids)

    def update(self, output: SchedulerOutput, runner_output: ModelRunnerOutput, now: float) -> list[SequenceOutput]:
        """Take in what a step has computed; the new tokens and the ends, in no particular order.

        A sequence that was aborted meanwhile is passed over. One in `runner_output.failed` ends with an error, and
        what its blocks hold is not used again.
        """
        assert self._in_flight is not None, f"step {output.step} is updated twice"
        assert output.step == self._step, f"step {output.step} is updated, but step {self._step} was the last"
        work, self._in_flight = self._in_flight, None
        outputs = []
        for seq, reason in self._complete.values():
            self._end(seq, reason)
            outputs.append(SequenceOutput(seq.seq_id, (), reason, stats=seq.stats(now)))
        self._complete.clear()
        for seq, chunk in work:
            if seq.status is SequenceStatus.FINISHED:
                continue
            error = runner_output.failed.get(seq.seq_id)
            if error is not None:
                outputs.append(self._fail(seq, error, now))
                continue
            self._advance(seq, chunk)
            if chunk.is_sampled:
                outputs.append(self._append_token(seq, runner_output.sampled[seq.seq_id], now))
        return outputs

    def stats(self) -> SchedulerStats:
        """A snapshot. After an `update`, the slots that are filled are exactly those of computed tokens."""
        kv, pool = self.kv, self.kv.pool
        num_allocated = kv.num_owned_blocks * kv.block_size
        # Only full blocks are shared, so what is empty is empty in one sequence's last blocks.
        num_empty = sum([len(seq.block_table) * kv.block_size - seq.num_computed_tokens for seq in self.running])
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_swapped=0,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free - pool.num_free_cached,
            num_cached_blocks=pool.num_free_cached,
            num_filled_slots=num_allocated - num_empty,
            num_allocated_slots=num_allocated,
            num_preemptions_recompute=self._preemptor.counts[PreemptionMode.RECOMPUTE],
            num_preemptions_swap=0,
            num_recomputed_tokens=self._num_recomputed_tokens,
            prefix_queried_tokens=kv.num_queried_tokens,
            prefix_hit_tokens=kv.num_hit_tokens,
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

    def _serve_running(self, adder: StepAdder) -> bool:
        """Give each running sequence its chunk, preempting from the back where blocks run out; whether it did."""
        running = self.running
        has_preempted = False
        index = 0
        while index < len(running) and adder.num_tokens_left > 0:
            seq = running[index]
            if adder.try_serve(seq, num_behind=len(running) - index - 1):
                index += 1
                continue
            victim = running.pop_victim()
            self._removed_ids.append(victim.seq_id)
            self._preemptor.preempt(victim)
            self.waiting.add(victim)
            has_preempted = True
        return has_preempted

    def _admit_waiting(self, adder: StepAdder, now: float) -> None:
        """Admit in order while there is room. Small ones may pass a big one that doesn't fit, up to a limit."""
        passed: list[Sequence] = []
        admitted: list[Sequence] = []
        adder.open_admission(self.running)
        for seq in self.waiting:
            if adder.num_tokens_left == 0 or len(self.running) == self.config.max_num_seqs:
                break
            if len(passed) == MAX_PASSED or any(other.num_passes == MAX_PASSES for other in passed):
                break
            if adder.try_admit(seq, is_alone=len(self.running) == 0):
                admitted.append(seq)
                self.running.add(seq)
                for other in passed:
                    other.num_passes += 1
            else:
                passed.append(seq)
        for seq in admitted:
            self.waiting.remove(seq)
            seq.status = SequenceStatus.RUNNING
            if seq.first_scheduled_s is None:
                seq.first_scheduled_s = now

    def _advance(self, seq: Sequence, chunk: Chunk) -> None:
        end = chunk.start + chunk.num_tokens
        num_again = min(end, seq.num_tokens_seen) - chunk.start
        if num_again > 0:
            seq.num_recomputed_tokens += num_again
            self._num_recomputed_tokens += num_again
        seq.num_tokens_seen = max(seq.num_tokens_seen, end)
        seq.num_computed_tokens = end
        if end // self.kv.block_size > seq.num_sealed_blocks:
            self.kv.seal_full_blocks(seq)

    def _append_token(self, seq: Sequence, token_id: int, now: float) -> SequenceOutput:
        seq.token_ids.append(token_id)
        if seq.first_token_s is None:
            seq.first_token_s = now
        reason = finish_reason(seq, self.config.eos_token_ids)
        if reason is None:
            return SequenceOutput(seq.seq_id, (token_id,))
        self.running.remove(seq)
        self._end(seq, reason)
        return SequenceOutput(seq.seq_id, (token_id,), reason, stats=seq.stats(now))

    def _fail(self, seq: Sequence, error: str, now: float) -> SequenceOutput:
        self.running.remove(seq)
        self.kv.discard(seq)
        self._end(seq, FinishReason.ERROR)
        return SequenceOutput(seq.seq_id, (), FinishReason.ERROR, error=error, stats=seq.stats(now))

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        """The one door out: whoever ends, for whatever reason, leaves no block, row or entry behind.

        The caller has taken it out of its queue.
        """
        if seq.status is SequenceStatus.RUNNING:
            self._removed_ids.append(seq.seq_id)
        self.kv.free(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        del self._seqs[seq.seq_id]
