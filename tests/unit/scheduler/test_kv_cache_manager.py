"""Slots for chunks, and release; then any order of such calls, against a model that keeps nothing but token lists."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.config import CacheConfig
from scheduler.kv_cache_manager import KVCacheManager
from scheduler.output import BlockCopy, Transfer, TransferResult
from scheduler.sampling_params import SamplingParams
from scheduler.sequence import Sequence, SequenceStatus

NUM_BLOCKS = 10
NUM_CPU_BLOCKS = 8
BLOCK_SIZE = 2


def make(seq_id: str, tokens: list[int], tenant: str = "") -> Sequence:
    return Sequence(seq_id, tokens, SamplingParams(), tenant=tenant)


def test_blocks_are_added_only_when_the_last_one_is_full() -> None:
    kv = KVCacheManager(CacheConfig(num_blocks=10, block_size=4))
    seq = make("a", [0] * 20)
    table = [(3, (0,)), (1, ()), (1, (1,)), (3, ()), (9, (2, 3, 4))]
    for num_tokens, block_ids in table:
        assert kv.allocate_slots(seq, num_tokens) == block_ids
        seq.num_computed_tokens += num_tokens
    assert seq.block_table.block_ids() == (0, 1, 2, 3, 4)
    assert (kv.num_owned_blocks, kv.num_available_blocks) == (5, 5)


def test_what_does_not_fit_is_refused_whole() -> None:
    kv = KVCacheManager(CacheConfig(num_blocks=3, block_size=4))
    seq = make("a", [0] * 20)
    assert kv.allocate_slots(seq, 13) is None
    assert (len(seq.block_table), kv.num_available_blocks) == (0, 3)
    assert kv.allocate_slots(seq, 12) == (0, 1, 2)
    seq.num_computed_tokens = 12
    assert kv.allocate_slots(seq, 1) is None
    kv.free(seq)
    assert (len(seq.block_table), seq.num_computed_tokens, kv.num_available_blocks) == (0, 0, 3)


def test_only_a_sequence_without_blocks_takes_a_prefix() -> None:
    kv = KVCacheManager(CacheConfig(num_blocks=3, block_size=4))
    seq = make("a", [0] * 20)
    kv.allocate_slots(seq, 4)
    with pytest.raises(AssertionError, match="has blocks already"):
        kv.take_prefix(seq, [])


def test_the_manager_counts_what_it_was_asked_for_and_what_it_found() -> None:
    kv = KVCacheManager(CacheConfig(num_blocks=9, block_size=4))
    first = make("a", [0] * 9)
    kv.take_prefix(first, kv.find_prefix(first))
    kv.allocate_slots(first, 9)
    first.num_computed_tokens = 9
    kv.seal_full_blocks(first)
    second = make("b", [0] * 10)
    kv.take_prefix(second, kv.find_prefix(second))
    assert (kv.num_queried_tokens, kv.num_hit_tokens) == (19, 8)
    assert [block.ref_cnt for block in second.block_table] == [2, 2]


def test_who_shares_a_part_of_a_full_block_does_not_write_to_it_even_when_nobody_else_is_left() -> None:
    """The prefix cache still knows it by what the other had written there."""
    kv = KVCacheManager(CacheConfig(num_blocks=6, block_size=4))
    parent, child = make("a", list(range(8))), make("b", [0, 1, 2, 3, 4, 5, 9])
    assert kv.allocate_slots(parent, 8) == (0, 1)
    parent.num_computed_tokens = 8
    kv.seal_full_blocks(parent)
    kv.fork(parent, child, 6)
    kv.free(parent)
    assert child.block_table[1].ref_cnt == 1
    assert kv.allocate_slots(child, 1) == ()
    assert kv.take_copies() == (BlockCopy(1, 2),)
    assert child.block_table.block_ids() == (0, 2)
    assert [block.block_id for block in kv.find_prefix(make("c", list(range(9))))] == [0, 1]


class KVCacheMachine(RuleBasedStateMachine):
    """Begins, grows, forks, swaps, writes behind, fails and frees; few blocks and tokens, so that prefixes meet.

    `written` is the model: what each block would hold, told by what the sequences have computed into it; and
    `cpu_written` the same of the CPU tier. Copies are made when they end, which is as late as they may be.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seqs: list[Sequence] = []
        self.away: list[Sequence] = []
        self.sent_away: list[tuple[list[int], str]] = []
        self.transfers: list[tuple[bool, Transfer]] = []
        self.written: dict[tuple[int, int], tuple[Any, ...] | None] = {}
        self.cpu_written: dict[tuple[int, int], tuple[Any, ...] | None] = {}
        self.num_started = 0

    @initialize(is_hash_constant=st.booleans(), is_caching=st.booleans())
    def start(self, is_hash_constant: bool, is_caching: bool) -> None:
        config = CacheConfig(NUM_BLOCKS, BLOCK_SIZE, NUM_CPU_BLOCKS, enable_prefix_caching=is_caching)
        self.kv = KVCacheManager(config, lambda _, tokens: 7) if is_hash_constant else KVCacheManager(config)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12), tenant=st.sampled_from(["", "t"]))
    def begin(self, tokens: list[int], tenant: str) -> None:
        """Admit a sequence with what the cache has of it, and compute the rest if it fits."""
        self.num_started += 1
        seq = make(f"s{self.num_started}", tokens, tenant)
        hit = self.kv.find_prefix(seq)
        assert len(hit) * BLOCK_SIZE < len(tokens)
        self.kv.take_prefix(seq, hit)
        self.seqs.append(seq)
        for position in range(seq.num_computed_tokens):
            assert self.written[self.slot(seq, position)] == self.prefix(seq, position), "a hit on another prefix"
        self.compute(seq, len(tokens) - seq.num_computed_tokens)

    @precondition(lambda self: self.sent_away)
    @rule(data=st.data(), num_kept=st.integers(BLOCK_SIZE, 12))
    def begin_in_the_cpu_tier(self, data: st.DataObject, num_kept: int) -> None:
        """Admit a sequence that begins as one that was sent there, if more of that lies there than on the device."""
        known, tenant = data.draw(st.sampled_from(self.sent_away))
        tokens = [*known[:num_kept], 0]
        seq = make(f"s{self.num_started + 1}", tokens, tenant)
        hit = self.kv.find_prefix(seq)
        num_needed = self.kv.num_blocks_for(len(tokens)) - len(hit) + sum(block.ref_cnt == 0 for block in hit)
        if num_needed > self.kv.num_available_blocks or not self.kv.try_begin_tier_hit(seq, hit):
            return
        self.num_started += 1
        assert seq.status is SequenceStatus.SWAPPING_IN
        assert len(hit) * BLOCK_SIZE < seq.num_swapped_tokens < len(tokens)
        self.away.append(seq)
        self.take_transfers()

    @precondition(lambda self: self.seqs and self.kv.prefix_cache is not None)
    @rule(data=st.data(), num_blocks=st.integers(1, 3))
    def write_behind(self, data: st.DataObject, num_blocks: int) -> None:
        """Copy full blocks of a sequence that goes on meanwhile."""
        seq = data.draw(st.sampled_from(self.seqs))
        assert self.kv.swap is not None
        num_full = min(seq.num_computed_tokens // BLOCK_SIZE, self.kv.swap.pool.num_free)
        if num_full > seq.num_written_blocks:
            assert self.kv.swap.write_behind(seq, num_full, num_blocks) <= num_blocks
            self.sent_away.append((seq.token_ids.tolist(), seq.tenant))
            self.take_transfers()

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        """Tokens become known and are computed, those before them too if they did not fit then."""
        seq = data.draw(st.sampled_from(self.seqs))
        seq.token_ids.extend(tokens)
        self.compute(seq, seq.num_tokens - seq.num_computed_tokens)

    @precondition(lambda self: any(seq.num_computed_tokens for seq in self.seqs))
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=3), is_computed=st.booleans())
    def fork(self, data: st.DataObject, tokens: list[int], is_computed: bool) -> None:
        """Another one shares any beginning of a sequence, and goes on in its own way, at once or later."""
        parent = data.draw(st.sampled_from([seq for seq in self.seqs if seq.num_computed_tokens]))
        num_shared = data.draw(st.integers(1, parent.num_computed_tokens))
        self.num_started += 1
        child = make(f"s{self.num_started}", [*parent.token_ids[:num_shared], *tokens], parent.tenant)
        num_available = self.kv.num_available_blocks
        self.kv.fork(parent, child, num_shared)
        assert self.kv.num_available_blocks == num_available, "a fork takes no block"
        self.seqs.append(child)
        if is_computed:
            self.compute(child, len(tokens))

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), is_discarded=st.booleans())
    def end(self, data: st.DataObject, is_discarded: bool) -> None:
        seq = data.draw(st.sampled_from(self.seqs))
        self.seqs.remove(seq)
        if is_discarded:
            self.kv.discard(seq)
        else:
            self.kv.free(seq)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """Free a sequence and take it back at once: it may find its own blocks."""
        seq = data.draw(st.sampled_from(self.seqs))
        self.kv.free(seq)
        seq.num_preemptions += 1
        self.kv.take_prefix(seq, self.kv.find_prefix(seq))
        assert seq.num_computed_tokens < seq.num_tokens
        self.compute(seq, seq.num_tokens - seq.num_computed_tokens)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.seqs))
        num_tokens = seq.num_computed_tokens
        if num_tokens == 0:
            return
        if num_tokens == seq.num_tokens:
            seq.token_ids.append(0)  # the one that was drawn from what is computed
        assert self.kv.swap is not None
        num_free = self.kv.swap.pool.num_free
        num_blocks = len(seq.block_table)
        if not self.kv.try_begin_swap_out(seq):
            assert (seq.num_computed_tokens, len(seq.block_table)) == (num_tokens, num_blocks)
            assert self.kv.swap.pool.num_free == num_free < num_blocks
            return
        self.seqs.remove(seq)
        self.away.append(seq)
        self.sent_away.append((seq.token_ids.tolist(), seq.tenant))
        seq.num_preemptions += 1
        self.take_transfers()

    @precondition(lambda self: any(seq.status is SequenceStatus.SWAPPED for seq in self.away))
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from([seq for seq in self.away if seq.status is SequenceStatus.SWAPPED]))
        hit = self.kv.find_prefix(seq)
        num_needed = len(seq.cpu_table) - len(hit) + sum(block.ref_cnt == 0 for block in hit)
        if num_needed > self.kv.num_available_blocks:
            return
        if not self.kv.swap_in(seq, hit):
            self.come_back(seq)
        self.take_transfers()

    @precondition(lambda self: self.transfers)
    @rule(data=st.data(), is_failed=st.booleans())
    def end_transfer(self, data: st.DataObject, is_failed: bool) -> None:
        index = data.draw(st.integers(0, len(self.transfers) - 1))
        is_out, transfer = self.transfers.pop(index)
        source, target = (self.written, self.cpu_written) if is_out else (self.cpu_written, self.written)
        failed = {copy.dst for copy in transfer.copies if is_failed and data.draw(st.booleans())}
        for copy in transfer.copies:
            for slot in range(BLOCK_SIZE):
                target[copy.dst, slot] = None if copy.dst in failed else source.get((copy.src, slot))
        for seq in self.kv.end_transfer(TransferResult(transfer.transfer_id, tuple(failed))):
            if seq.status is SequenceStatus.WAITING:
                self.away.remove(seq)
                assert len(seq.block_table) == len(seq.cpu_table) == 0
            elif seq.status is not SequenceStatus.SWAPPED:
                self.come_back(seq)

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def abort_away(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.away))
        self.away.remove(seq)
        self.kv.free(seq)
        seq.status = SequenceStatus.FINISHED

    def come_back(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.RUNNING
        self.away.remove(seq)
        self.seqs.append(seq)

    def take_transfers(self) -> None:
        outs, ins = self.kv.take_transfers()
        self.transfers += [(True, transfer) for transfer in outs] + [(False, transfer) for transfer in ins]

    def compute(self, seq: Sequence, num_tokens: int) -> None:
        num_needed = -(-(seq.num_computed_tokens + num_tokens) // BLOCK_SIZE) - len(seq.block_table)
        if num_tokens == 0:
            return
        must_copy = self.kv.must_copy(seq)
        num_free = self.kv.num_available_blocks
        new_ids = self.kv.allocate_slots(seq, num_tokens)
        assert (new_ids is None) == (num_needed + must_copy > num_free)
        if new_ids is None:
            return
        assert len(new_ids) == max(0, num_needed)
        for copy in self.kv.take_copies():
            for slot in range(BLOCK_SIZE):
                self.written[copy.dst, slot] = self.written.get((copy.src, slot))
        for position in range(seq.num_computed_tokens, seq.num_computed_tokens + num_tokens):
            assert seq.block_table[position // BLOCK_SIZE].ref_cnt == 1, "what others hold too is written"
            self.written[self.slot(seq, position)] = self.prefix(seq, position)
        seq.num_computed_tokens += num_tokens
        self.kv.seal_full_blocks(seq)

    def slot(self, seq: Sequence, position: int) -> tuple[int, int]:
        return seq.block_table[position // BLOCK_SIZE].block_id, position % BLOCK_SIZE

    def prefix(self, seq: Sequence, position: int) -> tuple[Any, ...]:
        return (seq.tenant, *seq.token_ids[: position + 1])

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for seq in self.seqs:
            for position in range(seq.num_computed_tokens):
                assert self.written[self.slot(seq, position)] == self.prefix(seq, position)

    @invariant()
    def references_are_those_of_the_tables(self) -> None:
        if not hasattr(self, "kv"):
            return
        swap = self.kv.swap
        assert swap is not None
        seqs, flights = [*self.seqs, *self.away], list(swap.flights.values())
        owned = [block for seq in seqs for block in seq.block_table]
        owned += [block for flight in flights for block in flight.device]
        cpu_owned = [block for seq in seqs for block in seq.cpu_table]
        cpu_owned += [block for flight in flights for block in flight.cpu]
        for pool, owners in ((self.kv.pool, owned), (swap.pool, cpu_owned)):
            free = {block.block_id for block in pool.free_list()}
            assert len(free) == pool.num_free
            for block in pool.blocks:
                assert block.ref_cnt == owners.count(block)
                assert (block.block_id in free) == (block.ref_cnt == 0)

    @invariant()
    def what_is_swapped_is_kept(self) -> None:
        for seq in self.away:
            if seq.status is not SequenceStatus.SWAPPING_OUT:
                for position in range(seq.num_swapped_tokens):
                    block = seq.cpu_table[position // BLOCK_SIZE]
                    held = self.cpu_written[block.block_id, position % BLOCK_SIZE]
                    assert held == self.prefix(seq, position)

    @invariant()
    def the_cache_and_the_blocks_agree(self) -> None:
        if not hasattr(self, "kv"):
            return
        swap = self.kv.swap
        assert swap is not None
        for pool, cache in ((self.kv.pool, self.kv.prefix_cache), (swap.pool, swap.index)):
            contents = {block.block_id: block.hash for block in pool.blocks if block.content is not None}
            entries = {} if cache is None else dict(cache.items())
            assert {block.block_id: key for key, block in entries.items()} == contents
            num_cached = sum(block.content is not None for block in pool.free_list())
            assert num_cached == pool.num_free_cached


KVCacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, print_blob=True)
test_any_order_of_calls_keeps_blocks_and_cache_consistent = KVCacheMachine.TestCase
