"""The only one that hands blocks to sequences and takes them back."""

from scheduler.block_pool import Block, BlockPool
from scheduler.config import CacheConfig
from scheduler.prefix_cache import HashFunction, PrefixCache, chain_hash
from scheduler.sequence import Sequence

_NO_BLOCKS: tuple[int, ...] = ()


class KVCacheManager:
    """Blocks of the device tier: allocation, release and reuse by prefix.

    One sequence's slots, with a chunk of this step allocated:

        |◄──────────── block_table ─────────────►|
        | cached prefix |  computed  | this chunk | empty |
        0         num_cached     num_computed         end of the last block, less than one block away

    A tier for swapped sequences is a second BlockPool beside `pool`, with a PrefixCache of its own.
    """

    def __init__(self, config: CacheConfig, hash_function: HashFunction = chain_hash) -> None:
        self.block_size = config.block_size
        self.prefix_cache: PrefixCache | None = None
        if config.enable_prefix_caching:
            self.prefix_cache = PrefixCache(
                config.block_size,
                is_shared_by_tenants=config.is_prefix_shared_by_tenants,
                hash_function=hash_function,
            )
        evict = (lambda content: None) if self.prefix_cache is None else self.prefix_cache.evict
        self.pool = BlockPool(config.num_blocks, evict)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    @property
    def num_available_blocks(self) -> int:
        """Blocks that nobody owns, whether or not they still hold a cached prefix."""
        return self.pool.num_free

    @property
    def num_owned_blocks(self) -> int:
        """Blocks that at least one sequence owns; a shared one counts once."""
        return self.pool.num_blocks - self.pool.num_free

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, seq: Sequence) -> list[Block]:
        """Cached blocks that `seq`, which has none yet, could begin with. At least one token is left to compute."""
        return [] if self.prefix_cache is None else self.prefix_cache.find(seq)

    def take_prefix(self, seq: Sequence, blocks: list[Block]) -> None:
        """Make what `find_prefix` has found the beginning of `seq`: it owns the blocks, their tokens are computed."""
        assert len(seq.block_table) == 0, f"{seq} takes a prefix, but has blocks already"
        if seq.num_preemptions == 0:
            self.num_queried_tokens += seq.num_tokens
            self.num_hit_tokens += len(blocks) * self.block_size
            seq.num_cached_tokens = len(blocks) * self.block_size
        if not blocks:
            return
        self.pool.touch(blocks)
        seq.block_table.append(blocks)
        seq.num_computed_tokens = len(blocks) * self.block_size
        seq.num_sealed_blocks = len(blocks)
        content = blocks[-1].content
        assert content is not None, f"{seq} takes {blocks[-1]}, which holds nothing"
        seq.sealed_name = content.name

    def allocate_slots(self, seq: Sequence, num_tokens: int) -> tuple[int, ...] | None:
        """Give `seq` slots for `num_tokens` more than it has computed; the ids of the blocks added, often none.

        None, and nothing changed, where the free blocks don't suffice. Never allocates a block of which no slot
        is used by this chunk.
        """
        table = seq.block_table
        num_new = -(-(seq.num_computed_tokens + num_tokens) // self.block_size) - len(table)
        if num_new <= 0:
            return _NO_BLOCKS
        blocks = self.pool.allocate(num_new)
        if blocks is None:
            return None
        table.append(blocks)
        return tuple([block.block_id for block in blocks])

    def seal_full_blocks(self, seq: Sequence) -> None:
        """Offer the blocks that are full of computed tokens, and were not when last asked, to the prefix cache."""
        if self.prefix_cache is None:
            return
        for index in range(seq.num_sealed_blocks, seq.num_computed_tokens // self.block_size):
            content, loser = self.prefix_cache.seal(seq, index)
            if loser is not None:
                self.pool.drop_content(loser)
            if content is not None:
                self.pool.set_content(seq.block_table[index], content)

    def free(self, seq: Sequence) -> None:
        """Take all blocks back; what they hold stays in the prefix cache until they are handed out again."""
        self.pool.free(reversed(seq.block_table.clear()))
        seq.num_computed_tokens = 0
        seq.num_sealed_blocks = 0
        seq.sealed_name = None

    def discard(self, seq: Sequence) -> None:
        """Take all blocks back and forget what they hold: the numbers that were computed can't be trusted."""
        for block in seq.block_table:
            if block.content is not None and self.prefix_cache is not None:
                self.prefix_cache.evict(block.content)
                self.pool.drop_content(block)
        self.free(seq)
