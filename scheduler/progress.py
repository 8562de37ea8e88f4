"""Takes in what a step has computed: tokens, and the ends that come with them."""

from collections.abc import Sequence as SequenceABC
from dataclasses import replace

from scheduler.beam_group import BeamGroup
from scheduler.kv_cache_manager import KVCacheManager
from scheduler.output import Chunks, FinishReason, ModelRunnerOutput, SequenceOutput
from scheduler.queues import Queues
from scheduler.roster import Roster
from scheduler.sequence import Sequence, SequenceStatus
from scheduler.stopping import finish_reason


class Progress:
    """Moves the running sequences on.

    num_recomputed_tokens: computed again, since a preemption had taken their blocks. It only grows.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        queues: Queues,
        roster: Roster,
        *,
        eos_token_ids: frozenset[int],
        drops_hopeless: bool,
    ) -> None:
        self.num_recomputed_tokens = 0
        self._kv = kv
        self._queues = queues
        self._roster = roster
        self._eos_token_ids = eos_token_ids
        self._drops_hopeless = drops_hopeless

    def take_in(
        self, seqs: SequenceABC[Sequence], chunks: Chunks, runner_output: ModelRunnerOutput, now: float
    ) -> list[SequenceOutput]:
        """`chunks`, of `seqs`, were computed, with this result; what is to be told of them.

        Who has ended meanwhile is passed over.
        """
        outputs: list[SequenceOutput] = []
        sampled, failed, logprobs = runner_output.sampled, runner_output.failed, runner_output.logprobs
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
            elif self._drops_hopeless and self._roster.deadlines.is_hopeless(seq.head, now):
                self._roster.drop(seq.head, now)
        return outputs

    def _advance(self, seq: Sequence, num_tokens: int) -> None:
        if seq.num_in_flight_tokens == 0:
            seq.num_computed_tokens += num_tokens
        seq.num_in_flight_tokens = 0  # else it counted already, since the next step was scheduled
        end = seq.num_computed_tokens
        start = end - num_tokens
        if start < seq.num_tokens_seen:
            num_again = min(end, seq.num_tokens_seen) - start
            seq.head.num_recomputed_tokens += num_again
            self.num_recomputed_tokens += num_again
        seq.num_tokens_seen = max(seq.num_tokens_seen, end)
        block_size = self._kv.block_size
        if end // block_size > start // block_size:
            self._kv.seal_full_blocks(seq)

    def _append_token(self, seq: Sequence, token_id: int, logprob: float | None, now: float) -> SequenceOutput:
        if seq.has_placeholder:
            seq.token_ids[-1] = token_id
        else:
            seq.token_ids.append(token_id)
        if seq.first_token_s is None:
            seq.first_token_s = now
        reason = finish_reason(seq, self._eos_token_ids)
        if reason is None:
            return SequenceOutput(seq.seq_id, (token_id,), logprob=logprob)
        self._queues.take_out(seq)
        self._roster.end(seq, reason)
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
        if not group.advance(self._kv, self._roster.remove_row):
            return []
        self._queues.running.remove(head)
        hypotheses = group.hypotheses
        self._roster.end(head, hypotheses[0].finish_reason)
        num_tokens = sum([len(hypothesis.token_ids) for hypothesis in hypotheses])
        stats = replace(head.stats(now), num_generated_tokens=num_tokens)
        return [SequenceOutput(head.seq_id, (), head.finish_reason, stats=stats, hypotheses=hypotheses)]

    def _fail(self, seq: Sequence, error: str, now: float, *, is_out_of_memory: bool) -> SequenceOutput:
        self._queues.take_out(seq)
        for beam in seq.all_beams:
            self._kv.discard(beam)
        self._roster.end(seq, FinishReason.ERROR)
        return SequenceOutput(seq.seq_id, (), FinishReason.ERROR, error, seq.stats(now), is_out_of_memory)
