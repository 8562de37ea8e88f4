"""The only one that hands blocks to sequences and takes them back."""

from collections import Counter

from scheduler.beam_blocks import num_held_blocks
from scheduler.block_pool import Block, BlockPool
from scheduler.config import CacheConfig
from scheduler.hit_sampling import HitSampler
from scheduler.output import BlockCopy, Transfer, TransferResult
from scheduler.prefix_cache import HashFunction, PrefixCache, chain_hash
from scheduler.sequence import Sequence, SequenceStatus
from scheduler.swap_tier import SwapTier

_NO_BLOCKS: tuple[int, ...] = ()


class KVCacheManager:
    """Blocks of both tiers: allocation, release, reuse by prefix, and moves between the tiers.

    One sequence's slots, with a chunk of this step allocated:

        |◄──────────── block_table ─────────────►|
        | cached prefix |  computed  | this chunk | empty |
        0         num_cached     num_computed         end of the last block, less than one block away

    `swap` is the CPU tier, None where there is none: a second BlockPool with a PrefixCache of its own.

    A block that others hold too, or that is found by its content, is only read. Who is about to write to one gets a
    copy in its place first; but the last of those that held it writes to it, copies being made before anything is
    computed.
    """

    def __init__(self, config: CacheConfig, hash_function: HashFunction = chain_hash) -> None:
        self.block_size = config.block_size
        self.prefix_cache = _make_prefix_cache(config, hash_function)
        evict = (lambda content: None) if self.prefix_cache is None else self.prefix_cache.evict
        self.pool = BlockPool(config.num_blocks, evict)
        self.swap: SwapTier | None = None
        if config.num_cpu_blocks:
            index = _make_prefix_cache(config, hash_function)
            self.swap = SwapTier(
                config.num_cpu_blocks, self.pool, index, config.kv_block_bytes, config.swap_step_blocks
            )
        self.sampler = HitSampler()
        # Copies of this step, (source, target). Each holds its source until the step is built, so that nobody gets it
        # before it is read.
        self._copies: list[tuple[Block, Block]] = []
        # How many of them read a block, by its id.
        self._num_readers: Counter[int] = Counter()
        self.num_copied_blocks = 0
        self.num_forks = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_tier_hit_tokens = 0

    @property
    def num_available_blocks(self) -> int:
        """Blocks that nobody owns, whether or not they still hold a cached prefix."""
        return self.pool.num_free

    @property
    def num_owned_blocks(self) -> int:
        """Blocks that at least one sequence or transfer owns; a shared one counts once."""
        return self.pool.num_blocks - self.pool.num_free

    @property
    def num_leaving_blocks(self) -> int:
        """Owned blocks that are free as soon as the transfers on their way have ended."""
        return 0 if self.swap is None else self.swap.num_leaving_blocks

    @property
    def has_transfers(self) -> bool:
        """Whether any copy between the tiers is on its way."""
        return self.swap is not None and bool(self.swap.flights)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, seq: Sequence) -> list[Block]:
        """Cached blocks that `seq`, which has none yet, could begin with. At least one token is left to compute."""
        found = self.prefix_cache.find(seq) if self.prefix_cache is not None and self._follows(seq) else []
        seq.num_found_blocks = len(found)
        return found

    def num_found_at_most(self, seq: Sequence) -> int:
        """Blocks that `find_all` finds at most. As long as what was missing when it last looked is not there, no more.

        A look at two numbers, where `find_all` compares tokens: most of those that wait are passed by again and again.
        """
        cache = self.prefix_cache
        is_alone = seq.family is None and seq.beams is None
        if is_alone and cache is not None and cache.lacks(seq, seq.num_found_blocks):
            return seq.num_found_blocks
        return self.pool.num_blocks

    def find_all(self, seq: Sequence) -> list[Block]:
        """What `seq`, or all its beams that were swapped, could begin with, each block once."""
        if seq.beams is None or seq.status is not SequenceStatus.SWAPPED:
            return self.find_prefix(seq)
        found = [block for beam in seq.beams for block in self._find_swapped(beam)]
        return list({block.block_id: block for block in found}.values())

    def _find_swapped(self, beam: Sequence) -> list[Block]:
        """What a beam that comes back could begin with, in the place of what it has in the CPU tier."""
        return self.find_prefix(beam)[: beam.num_swapped_tokens // self.block_size]

    def num_found_tokens(self, seq: Sequence) -> int:
        """Tokens that `seq`, which has no blocks yet, need not compute if it is admitted now: found in either tier."""
        return max(len(self.find_prefix(seq)), len(self._find_in_tier(seq))) * self.block_size

    def _find_in_tier(self, seq: Sequence) -> list[Block]:
        return self.swap.find_prefix(seq) if self.swap is not None and self._follows(seq) else []

    def _follows(self, seq: Sequence) -> bool:
        """Whether blocks of `seq` are looked up and entered. Decided once, but for one that was preempted: all are."""
        if not seq.use_prefix_cache:
            return False
        if seq.is_followed is None and self.prefix_cache is not None:
            first_hash = self.prefix_cache.first_hash(seq)
            seq.is_followed = first_hash is None or self.sampler.follows(first_hash)
        return bool(seq.is_followed) or seq.num_preemptions > 0

    def take_prefix(self, seq: Sequence, blocks: list[Block]) -> None:
        """Make what `find_prefix` has found the beginning of `seq`: it owns the blocks, their tokens are computed."""
        assert len(seq.block_table) == 0, f"{seq} takes a prefix, but has blocks already"
        if seq.num_preemptions == 0 and seq.is_followed:
            self.num_queried_tokens += seq.num_tokens
            self.num_hit_tokens += len(blocks) * self.block_size
            if seq.num_tokens > self.block_size:
                self.sampler.observe(seq, len(blocks) * self.block_size)
            seq.num_cached_tokens = len(blocks) * self.block_size
        if not blocks:
            return
        self.pool.touch(blocks)
        seq.block_table.append(blocks)
        seq.num_computed_tokens = len(blocks) * self.block_size
        seq.num_sealed_blocks = len(blocks)
        content = blocks[-1].content
        if content is None:  # not one of the cache's, but of another sequence that has computed the same
            seq.num_sealed_blocks = 0
            self.seal_full_blocks(seq)
        else:
            seq.sealed_name = content.name

    def find_common(self, seq: Sequence, other: Sequence) -> list[Block]:
        """The full blocks of the prompt that `other`, of the same family, holds computed: `seq` could begin with them.

        At least one token is left to compute.
        """
        num_tokens = min(seq.num_prompt_tokens, other.num_computed_tokens, seq.num_tokens - 1)
        return other.block_table.head(num_tokens // self.block_size)

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Let `child`, which holds nothing, share the blocks of the first `num_tokens` tokens, computed by `parent`.

        Both have the same tokens so far. At least one known token of the child is left to compute. The last block may
        be shared in part: whoever writes to it first gets a copy.
        """
        assert len(child.block_table) == 0, f"{child} forks from {parent}, but has blocks already"
        assert 0 < num_tokens <= parent.num_computed_tokens, f"{child} forks {num_tokens} tokens from {parent}"
        assert num_tokens < child.num_tokens, f"{child} forks all its {num_tokens} tokens from {parent}"
        blocks = parent.block_table.head(self.num_blocks_for(num_tokens))
        self.pool.touch(blocks)
        child.block_table.append(blocks)
        child.num_computed_tokens = num_tokens
        num_full = num_tokens // self.block_size
        child.block_hashes.extend(parent.block_hashes[len(child.block_hashes) : num_full])
        self.seal_full_blocks(child)
        self.num_forks += 1

    def share(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` hold all blocks of `parent`, whose known tokens it has, in the place of its own."""
        self.free(child)
        blocks = parent.block_table.head(len(parent.block_table))
        self.pool.touch(blocks)
        child.block_table.append(blocks)
        child.block_hashes[:] = parent.block_hashes
        child.num_computed_tokens, child.num_tokens_seen = parent.num_computed_tokens, parent.num_tokens_seen
        child.num_sealed_blocks, child.sealed_name = parent.num_sealed_blocks, parent.sealed_name
        child.is_followed = parent.is_followed
        self.num_forks += 1

    def must_copy(self, seq: Sequence) -> bool:
        """Whether the next token of `seq` is written to a block that is not its own alone.

        Others hold it too; or they did, and the prefix cache still knows it by what they had written.
        """
        index, blocks = seq.num_computed_tokens // self.block_size, seq.block_table.blocks
        if index >= len(blocks):
            return False
        block = blocks[index]
        return block.content is not None or (block.ref_cnt > 1 and self.num_holders(block.block_id) > 1)

    def num_holders(self, block_id: int) -> int:
        """References to a device block, but for those of copies of this step."""
        return self.pool.blocks[block_id].ref_cnt - self._num_readers[block_id]

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """The copies on the device that chunks since the last call need before they are computed."""
        if not self._copies:
            return ()
        copies = tuple([BlockCopy(source.block_id, target.block_id) for source, target in self._copies])
        self.pool.free([source for source, _ in self._copies])
        self._copies.clear()
        self._num_readers.clear()
        return copies

    def allocate_slots(self, seq: Sequence, num_tokens: int) -> tuple[int, ...] | None:
        """Give `seq` slots for `num_tokens` more than it has computed; the ids of the blocks added, often none.

        None, and nothing changed, where the free blocks don't suffice. Never allocates a block of which no slot
        is used by this chunk. Where the first of them lies in a block that others hold too, that is replaced by a
        copy, which the ids don't tell (see `must_copy`).
        """
        num_new = self.num_new_blocks(seq, num_tokens)
        if num_new <= 0:
            return _NO_BLOCKS
        blocks = self.pool.allocate(num_new)
        if blocks is None:
            return None
        if self.must_copy(seq):
            self._copy_on_write(seq, blocks.pop())
        seq.block_table.append(blocks)
        return tuple([block.block_id for block in blocks])

    def try_append_block_to_each(self, seqs: list[Sequence]) -> list[Block] | None:
        """Give each of `seqs`, whose blocks are full, one more: these. None, and nothing changed, if they lack."""
        blocks = self.pool.allocate(len(seqs))
        if blocks is not None:
            for seq, block in zip(seqs, blocks, strict=True):
                seq.block_table.blocks.append(block)
        return blocks

    def _copy_on_write(self, seq: Sequence, copy: Block) -> None:
        """Put `copy` in the place of the block that `seq` writes to next, and note what is to be copied.

        A block that itself is a copy of this step is not there yet: its own source is taken then, and is the same in
        all that `seq` shares of it.
        """
        shared = seq.block_table.replace(seq.num_computed_tokens // self.block_size, copy)
        source = next((source for source, target in self._copies if target is shared), shared)
        if source is not shared:
            self.pool.touch([source])
            self.pool.free([shared])
        self._copies.append((source, copy))
        self._num_readers[source.block_id] += 1
        self.num_copied_blocks += 1

    def num_new_blocks(self, seq: Sequence, num_tokens: int) -> int:
        """Free blocks that `allocate_slots` would take; not above 0 where it would take none."""
        num_blocks = -(-(seq.num_computed_tokens + num_tokens) // self.block_size)
        return num_blocks - len(seq.block_table.blocks) + self.must_copy(seq)

    def seal_full_blocks(self, seq: Sequence) -> None:
        """Offer the blocks that are full of computed tokens, and were not when last asked, to the prefix cache.

        Tokens in flight don't count: should their step fail, nobody may have found what it left behind.

        A sequence that is not followed is entered when it is preempted: then its blocks may be worth something to it.
        """
        if self.prefix_cache is None or not self._follows(seq):
            return
        for index in range(seq.num_sealed_blocks, seq.num_settled_tokens // self.block_size):
            content, loser = self.prefix_cache.seal(seq, index)
            if loser is not None:
                self.pool.drop_content(loser)
            if content is not None:
                self.pool.set_content(seq.block_table[index], content)

    def num_blocks_to_copy(self, seq: Sequence) -> tuple[int, int]:
        """Blocks that would be copied out, and later in again, if `seq` were swapped now.

        Those at its beginning that others own as well will most likely still be there when it comes back.
        """
        assert self.swap is not None, f"{seq} is to be swapped, but there is no CPU tier"
        if seq.beams is not None:
            return self.swap.num_blocks_to_copy(seq, self.block_size), num_held_blocks(seq.beams)
        num_out = self.swap.num_blocks_to_copy(seq, self.block_size)
        return num_out, len(seq.block_table) - self.num_shared_blocks(seq)

    def num_shared_blocks(self, seq: Sequence) -> int:
        """Blocks at the beginning of `seq` that others own as well."""
        for index, block in enumerate(seq.block_table):
            if block.ref_cnt == 1:
                return index
        return len(seq.block_table)

    def try_begin_swap_out(self, seq: Sequence) -> bool:
        """Begin to move a running sequence to the CPU tier; False, and nothing changed, where that has no room.

        SWAPPING_OUT or SWAPPED afterwards: none of its blocks is its own any more, but those that are being copied
        are free only when their transfer has ended.
        """
        if self.swap is None or len(seq.block_table) == 0 or not self.swap.try_begin_out(seq, self.block_size):
            return False
        for beam in seq.all_beams:
            beam.num_swapped_tokens = beam.num_computed_tokens
            self._reset(beam)
        return True

    def swap_in(self, seq: Sequence, hit: list[Block]) -> bool:
        """Bring a swapped sequence back to the device, beginning with `hit`, which `find_prefix` has found.

        The caller has made sure that there are enough free blocks. True where blocks must be copied: it is
        SWAPPING_IN then. False where `hit` covers all that was swapped: nothing of it lies in the CPU tier any more.
        """
        assert self.swap is not None, f"{seq} is to be swapped in, but there is no CPU tier"
        if seq.beams is None:
            self.take_prefix(seq, hit)
        else:
            for beam, found in [(beam, self._find_swapped(beam)) for beam in seq.beams]:
                self.take_prefix(beam, found)
        num_missing = self.swap.num_blocks_to_copy_in(seq)
        if num_missing <= 0:
            for beam in seq.all_beams:
                self.swap.free(beam)
            return False
        blocks = self.pool.allocate(num_missing)
        assert blocks is not None, f"{seq} is swapped in, but {self.num_available_blocks} free blocks fail it"
        self.swap.begin_in(seq, blocks)
        return True

    def try_begin_tier_hit(self, seq: Sequence, hit: list[Block]) -> bool:
        """Begin to copy in the prefix of waiting `seq` that the CPU tier holds, if it is longer than `hit`.

        `hit` is what `find_prefix` has found; there are enough free blocks. SWAPPING_IN afterwards: the rest of it is
        computed when the copies have ended.
        """
        if self.swap is None or self.swap.lacks(seq, len(hit)):
            return False
        found = self._find_in_tier(seq)
        if len(found) <= len(hit):
            return False
        self.swap.adopt(seq, found)
        seq.num_swapped_tokens = len(found) * self.block_size
        has_begun = self.swap_in(seq, hit)
        assert has_begun, f"{seq} finds {len(found)} blocks in the CPU tier, {len(hit)} on the device"
        num_tokens = (len(found) - len(hit)) * self.block_size
        if seq.num_preemptions == 0:
            self.num_hit_tokens += num_tokens
            seq.num_cached_tokens += num_tokens
        self.num_tier_hit_tokens += num_tokens
        return True

    def take_transfers(self) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
        """The transfers that this step begins: out, in."""
        return ((), ()) if self.swap is None else self.swap.take_transfers()

    def end_transfer(self, result: TransferResult) -> list[Sequence]:
        """Take in the end of a transfer; the sequences that waited for it, and for nothing else any more.

        One that was SWAPPING_OUT is SWAPPED; one that was SWAPPING_IN has its tokens computed and is RUNNING. Where a
        copy has failed it is WAITING and holds nothing.
        """
        assert self.swap is not None, f"{result} has ended, but there is no CPU tier"
        ready = self.swap.end(result)
        for seq in ready:
            if seq.is_damaged:
                self._forget_lookup(seq)
                for beam in seq.all_beams:
                    self.free(beam)
                seq.status = SequenceStatus.WAITING
            elif seq.status is SequenceStatus.SWAPPING_OUT:
                seq.status = SequenceStatus.SWAPPED
            else:
                for beam in seq.all_beams:
                    beam.num_computed_tokens = beam.num_swapped_tokens
                    self.swap.free(beam)
                    self.seal_full_blocks(beam)
                seq.status = SequenceStatus.RUNNING
        return ready

    def _forget_lookup(self, seq: Sequence) -> None:
        """Where a sequence never ran, and so was being copied in as a prefix, it will be looked up once more."""
        if seq.num_preemptions == 0 and seq.is_followed:
            self.num_queried_tokens -= seq.num_tokens
            self.num_hit_tokens -= seq.num_cached_tokens
            seq.num_cached_tokens = 0

    def free(self, seq: Sequence) -> None:
        """Take all blocks back; what they hold stays in the prefix cache until they are handed out again."""
        self.pool.free(reversed(seq.block_table.clear()))
        self._reset(seq)
        if self.swap is not None:
            self.swap.free(seq)

    def discard(self, seq: Sequence) -> None:
        """Take all blocks back and forget what they hold: the numbers that were computed can't be trusted.

        Nor can those that an earlier swap has left in the CPU tier.
        """
        if self.swap is not None:
            self.swap.forget(seq, seq.num_settled_tokens // self.block_size)
        for block in seq.block_table:
            if block.content is not None and self.prefix_cache is not None:
                self.prefix_cache.evict(block.content)
                self.pool.drop_content(block)
        self.free(seq)

    @staticmethod
    def _reset(seq: Sequence) -> None:
        seq.num_computed_tokens = 0
        seq.num_in_flight_tokens = 0
        seq.num_sealed_blocks = 0
        seq.num_written_blocks = 0
        seq.written_content = None
        seq.sealed_name = None


def _make_prefix_cache(config: CacheConfig, hash_function: HashFunction) -> PrefixCache | None:
    """One for a tier. All hash alike: a sequence keeps its hashes for both."""
    if not config.enable_prefix_caching:
        return None
    return PrefixCache(
        config.block_size, is_shared_by_tenants=config.is_prefix_shared_by_tenants, hash_function=hash_function
    )
