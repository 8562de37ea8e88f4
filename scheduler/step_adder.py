"""One step in the making."""

from collections.abc import Iterable
from math import inf

from scheduler.beam_group import BeamGroup, num_new_blocks
from scheduler.block_pool import Block
from scheduler.kv_cache_manager import KVCacheManager
from scheduler.output import Chunks, NewBlocks, NewRow, RowToken, SchedulerOutput
from scheduler.sequence import Sequence, SequenceStatus
from scheduler.tier_hits import TierHits

# A sequence that comes back from its k-th preemption must find room for 2^k blocks more than it has tokens for;
# beyond 2^10 that is more than any context.
MAX_BACKOFF_DOUBLINGS = 10


class StepAdder:
    """Carries one step's token budget from sequence to sequence, and gathers what the step will do.

    Lives within one `Scheduler.schedule`. `num_tokens_left` is what is left of the budget, `seqs` are those that have
    their chunk, in the order of the chunks; `num_admitted` were admitted.
    """

    def __init__(self, kv: KVCacheManager, num_tokens: int, tier_hits: TierHits | None = None) -> None:
        self._kv = kv
        self._tier_hits = tier_hits
        self.num_tokens_left = num_tokens
        self.num_admitted = 0
        self.seqs: list[Sequence] = []
        self._counts: list[int] = []
        self._is_sampled: list[bool] = []
        self._new_blocks: list[NewBlocks] = []
        self._new_rows: list[NewRow] = []
        self._row_tokens: list[RowToken] = []
        self._renewed_ids: list[str] = []
        self._num_promised_blocks = 0
        self._num_reserved_blocks = 0

    def may_lack_blocks(self, growing: Iterable[Sequence]) -> bool:
        """Whether the free blocks may be too few for those that are no mere decodes."""
        num_left = self._kv.num_available_blocks
        for seq in growing:
            if num_left < 0:
                break
            num_left -= 1 if seq.num_decode_slots else max(0, self._num_new_blocks(seq, 0))
        return num_left < 0

    def serve_decodes(self, seqs: list[Sequence]) -> None:
        """Serve mere decodes, as far as the budget goes.

        Nearly all chunks are such (`Sequence.num_decode_slots`), so each costs no call and no object.
        """
        served = seqs[: self.num_tokens_left]
        num_served = len(served)
        self.seqs += served
        self._counts += [1] * num_served
        self._is_sampled += [True] * num_served
        self.num_tokens_left -= num_served

    def try_serve_decodes(self, seqs: list[Sequence], full: list[Sequence]) -> bool:
        """Serve decodes; False, and nothing changed, where the budget or the free blocks don't suffice for all.

        `full` are those of them whose blocks are full, as one of sixteen's are, in the same order. False, too, where
        one of these is no decode.
        """
        if len(seqs) > self.num_tokens_left or not all(seq.num_decode_slots for seq in full):
            return False
        blocks = self._kv.try_append_block_to_each(full)
        if blocks is None:
            return False
        self.serve_decodes(seqs)
        block_size = self._kv.block_size
        for seq, block in zip(full, blocks, strict=True):
            self._new_blocks.append(NewBlocks(seq.seq_id, (block.block_id,)))
            num_slots = seq.num_decode_slots = seq.num_decode_slots + block_size
            seq.num_promised_blocks = int(num_slots < seq.max_num_tokens - 1)
        return True

    def try_serve(self, seq: Sequence, num_behind: int) -> bool:
        """Add the next chunk of a running sequence; False, and nothing changed, if its blocks don't fit.

        A chunk of a prompt leaves a token of the budget to each of the `num_behind` others, so that no prefill
        stops a decode; but takes at least one itself.
        """
        if 0 < seq.num_decode_slots == seq.num_computed_tokens and not self._num_reserved_blocks:
            return self.try_serve_decodes([seq], [seq])
        if self._num_reserved_blocks > 0 and self.num_missing_blocks(seq, num_behind) > 0:
            return False
        if seq.beams is not None:
            return self._try_serve_beams(seq.beams, num_behind)
        return self._try_serve_chunk(seq, self._num_chunk_tokens(seq, num_behind))

    def _try_serve_beams(self, group: BeamGroup, num_behind: int) -> bool:
        """All beams that can have a chunk, or, where their blocks don't fit, none."""
        plan = group.plan(self._kv, self.num_tokens_left, num_behind)
        if num_new_blocks(plan, self._kv) > self._kv.num_available_blocks:
            return False
        for beam, num_tokens in plan:
            is_served = self._try_serve_chunk(beam, num_tokens)
            assert is_served, f"{beam} was planned, but {self._kv.num_available_blocks} free blocks fail it"
        return True

    def _try_serve_chunk(self, seq: Sequence, num_tokens: int) -> bool:
        is_row_stale = seq.has_row and self._kv.must_copy(seq)
        new_block_ids = self._kv.allocate_slots(seq, num_tokens)
        if new_block_ids is None:
            return False
        if is_row_stale:  # a block in the middle of its table has changed, so the runner gets the row anew
            self._renewed_ids.append(seq.seq_id)
            seq.has_row = False
        self._add(seq, num_tokens, new_block_ids)
        return True

    def num_missing_blocks(self, seq: Sequence, num_behind: int) -> int:
        """Blocks that the next chunk of a running sequence needs beyond those that are free and not reserved."""
        num_new = self._num_new_blocks(seq, num_behind)
        return max(0, min(num_new, num_new - self._kv.num_available_blocks + self._num_reserved_blocks))

    def try_reserve(self, seq: Sequence, num_behind: int) -> bool:
        """Let a running sequence that was not served sit out this step, if copies on their way free what it lacks.

        Its blocks are kept for it: nobody who is served after it takes them, and nobody else is preempted for
        them. False, and nothing changed, where that is not enough.
        """
        num_new = self._num_new_blocks(seq, num_behind)
        num_coming = self._kv.num_available_blocks + self._kv.num_leaving_blocks
        if num_new > num_coming - self._num_reserved_blocks:
            return False
        self._num_reserved_blocks += num_new
        return True

    def open_admission(self, admitted: Iterable[Sequence]) -> None:
        """Count the blocks that are promised to those that run or are being swapped in.

        Call it once, after all the running ones are served.
        """
        self._num_promised_blocks = sum(
            # What beams may need changes with every step.
            [seq.num_promised_blocks if seq.beams is None else self._num_future_blocks(seq, 1) for seq in admitted]
        )

    @property
    def is_full(self) -> bool:
        """Whether nobody can be admitted beside others any more: whoever is takes a token and a block at least."""
        return self.num_tokens_left == 0 or self._kv.num_available_blocks <= self._num_promised_blocks

    def try_admit(self, seq: Sequence, *, is_alone: bool) -> bool:
        """Admit a waiting or swapped sequence; False, and nothing changed, if it should wait.

        It needs blocks for all tokens that it has, not just for this chunk, and spare ones to grow into, out of
        the free ones that are not promised to those that run. Where nothing runs, and nothing is on its way between
        the tiers, there is nobody to disturb: whatever `Scheduler.add` has let in fits.

        It gets its first chunk at once, but for one whose blocks must be copied first: that is SWAPPING_IN now.

        One of a family forks from a member that holds more of what it needs than the prefix cache. Of a beam search
        that was recomputed the head alone gets a chunk now.
        """
        num_room = inf if is_alone else self._kv.num_available_blocks - self._num_promised_blocks
        num_needed = self._num_future_blocks(seq, 1 << min(seq.num_preemptions, MAX_BACKOFF_DOUBLINGS))
        if num_room <= 0 or num_needed - self._kv.num_found_at_most(seq) > num_room:
            return False
        hit = self._kv.find_all(seq)
        source = None if seq.family is None else seq.family.source(seq)
        num_forked = 0
        if source is not None:
            common = self._kv.find_common(seq, source)
            hit = common if len(common) > len(hit) else hit
            num_forked = self._num_forked_tokens(seq, hit)
        # What is hit and owned takes no free block.
        if num_needed - sum([block.ref_cnt > 0 for block in hit]) > num_room:
            return False
        if source is not None and num_forked > 0:
            self._kv.fork(source, seq, num_forked)
            self._serve_first_chunk(seq)
        elif self._must_copy_in(seq, hit):
            seq.num_promised_blocks = self._num_future_blocks(seq, 1)
        else:
            self._serve_first_chunk(seq)
        self._num_promised_blocks += seq.num_promised_blocks if seq.beams is None else self._num_future_blocks(seq, 1)
        self.num_admitted += 1
        return True

    def _must_copy_in(self, seq: Sequence, hit: list[Block]) -> bool:
        """Begin one that is admitted with `hit`, and whether blocks of the CPU tier are copied in first."""
        if seq.status is SequenceStatus.SWAPPED:
            return self._kv.swap_in(seq, hit)
        if self._tier_hits is not None and self._tier_hits.try_begin(seq, hit):
            return True
        self._kv.take_prefix(seq, hit)
        return False

    def _serve_first_chunk(self, seq: Sequence) -> None:
        num_available = self._kv.num_available_blocks
        if seq.beams is not None:
            is_served = self._try_serve_beams(seq.beams, 0)
        else:
            num_tokens = min(len(seq.token_ids) - seq.num_computed_tokens, self.num_tokens_left)
            is_served = self._try_serve_chunk(seq, num_tokens)
        assert is_served, f"{seq} was admitted, but {num_available} free blocks fail it"

    def build(self, step: int, removed_ids: tuple[str, ...]) -> SchedulerOutput:
        """The step, ready for the runner."""
        swap_outs, swap_ins = self._kv.take_transfers()
        block_copies = self._kv.take_copies()
        return SchedulerOutput(
            step=step,
            chunks=Chunks(
                seq_ids=tuple([seq.seq_id for seq in self.seqs]),
                starts=tuple([seq.num_computed_tokens for seq in self.seqs]),
                num_tokens=tuple(self._counts),
                is_sampled=tuple(self._is_sampled),
            ),
            new_rows=tuple(self._new_rows),
            new_blocks=tuple(self._new_blocks),
            removed_ids=(*removed_ids, *self._renewed_ids) if self._renewed_ids else removed_ids,
            block_copies=block_copies,
            swap_outs=swap_outs,
            swap_ins=swap_ins,
            row_tokens=tuple(self._row_tokens),
        )

    def _num_forked_tokens(self, seq: Sequence, hit: list[Block]) -> int:
        """Tokens that a waiting sequence shares by a fork from one that holds the prompt; 0 if `hit` serves it better.

        The last of what it knows is left to compute, so one without tokens of its own computes the prompt's last
        again: its first token is drawn from that.
        """
        num_tokens = min(seq.num_prompt_tokens, seq.num_tokens - 1)
        is_waiting = seq.status is SequenceStatus.WAITING
        return num_tokens if is_waiting and num_tokens >= len(hit) * self._kv.block_size else 0

    def _num_new_blocks(self, seq: Sequence, num_behind: int) -> int:
        """Free blocks that serving `seq`, with all its beams, would take; not above 0 where it would take none."""
        if seq.beams is not None:
            return num_new_blocks(seq.beams.plan(self._kv, self.num_tokens_left, num_behind), self._kv)
        return self._kv.num_new_blocks(seq, self._num_chunk_tokens(seq, num_behind))

    def _num_chunk_tokens(self, seq: Sequence, num_behind: int) -> int:
        num_tokens = len(seq.token_ids) - seq.num_computed_tokens
        return num_tokens if num_tokens == 1 else min(num_tokens, max(1, self.num_tokens_left - num_behind))

    def _add(self, seq: Sequence, num_tokens: int, new_block_ids: tuple[int, ...]) -> None:
        """Note the chunk of one whose blocks have been allocated, and what the runner's row of it lacks."""
        is_sampled = seq.num_computed_tokens + num_tokens == len(seq.token_ids)
        self.seqs.append(seq)
        self._counts.append(num_tokens)
        self._is_sampled.append(is_sampled)
        self.num_tokens_left -= num_tokens
        if not seq.has_row:
            seq.has_row = True
            self._new_rows.append(
                NewRow(
                    seq_id=seq.seq_id,
                    token_ids=tuple(seq.token_ids),
                    num_prompt_tokens=seq.num_prompt_tokens,
                    sampling=seq.sampling,
                    seed=seq.seed,
                    block_ids=seq.block_table.block_ids(),
                    num_candidates=0 if seq.beams is None else seq.beams.num_candidates,
                )
            )
        else:
            if new_block_ids:
                self._new_blocks.append(NewBlocks(seq.seq_id, new_block_ids))
            if seq.beams is not None:
                # The runner has put in what it has drawn, but a beam goes on with what was chosen.
                self._row_tokens.append(RowToken(seq.seq_id, len(seq.token_ids) - 1, seq.token_ids[-1]))
        is_decoding = is_sampled and seq.family is None and seq.beams is None
        seq.num_decode_slots = len(seq.block_table.blocks) * self._kv.block_size if is_decoding else 0
        # Until it needs a block again, it is promised as many: one more token of a decode changes nothing.
        if seq.beams is None:
            seq.num_promised_blocks = self._num_future_blocks(seq, 1)

    def _num_future_blocks(self, seq: Sequence, num_spare: int) -> int:
        """Blocks that `seq` lacks for the tokens it has and `num_spare` blocks more, or to its end if that is closer.

        The last token that may be generated needs no slot: nothing comes after it that would attend to it.
        """
        if seq.beams is not None:
            return seq.beams.num_future_blocks(self._kv, num_spare)
        block_size = self._kv.block_size
        num_tokens = min(len(seq.token_ids) + num_spare * block_size, seq.max_num_tokens - 1)
        num_missing = -(-num_tokens // block_size) - len(seq.block_table.blocks)
        # One on its way in shares the blocks that it will write to with nobody but the transfer.
        return num_missing + (seq.status is not SequenceStatus.SWAPPING_IN and self._kv.must_copy(seq))
