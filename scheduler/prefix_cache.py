"""Finds blocks that already hold the beginning of a prompt."""

from collections.abc import Callable
from itertools import count

from scheduler.block_pool import Block, BlockContent
from scheduler.sequence import Sequence

HashFunction = Callable[[int, bytes], int]


def chain_hash(parent_hash: int, tokens: bytes) -> int:
    """Hash of a block: of its tokens and of all before them.

    Python's own hash of bytes is keyed by a secret of the process, so nobody can prepare two prompts that
    collide. Nothing rests on that: whatever a hash finds is compared.
    """
    return hash((parent_hash, tokens))


class PrefixCache:
    """Full blocks by the chained hash of all tokens up to their end.

          root key      block 0        block 1
        (tenant, …) ─► [t0 … t15] ─► [t16 … t31] ─► …      hash i = chain_hash(hash i-1, tokens of block i)

    A hit counts only if the block's tokens and its parent are those looked for. The parent is compared by a
    name that is given once per content and not by hash: two blocks of equal tokens below different prefixes are
    told apart even where every hash is the same.

    Only full blocks: a partial one is still written to. One entry per hash, and at most one per block of the pool,
    so its memory is bounded by the pool. It changes no block: its owner does, as the return values tell.
    """

    def __init__(
        self, block_size: int, *, is_shared_by_tenants: bool = False, hash_function: HashFunction = chain_hash
    ) -> None:
        self._block_size = block_size
        self._is_shared_by_tenants = is_shared_by_tenants
        self._hash_function = hash_function
        self._blocks: dict[int, Block] = {}
        self._names = count(1)

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, seq: Sequence, max_blocks: int | None = None) -> list[Block]:
        """The longest run of cached blocks that `seq` begins with, free or owned; changes nothing but hash notes.

        It never covers the last known token, since that one must be computed to draw the next. `max_blocks` is a
        limit beside that.
        """
        found: list[Block] = []
        blocks, hashes, token_ids, block_size = self._blocks, seq.block_hashes, seq.token_ids, self._block_size
        num_blocks = (len(token_ids) - 1) // block_size
        if max_blocks is not None:
            num_blocks = min(num_blocks, max_blocks)
        parent: int | tuple[str, ...] = self._root(seq)
        # This runs for each block of each prompt that waits, step by step: nothing is called but where it must be.
        for index in range(num_blocks):
            start = index * block_size
            tokens = token_ids[start : start + block_size].tobytes()
            block = blocks.get(hashes[index] if index < len(hashes) else self._hash(seq, index, tokens))
            if block is None:
                break
            content = block.content
            if content is None or content.tokens != tokens or content.parent != parent:
                break
            parent = content.name
            found.append(block)
        return found

    def holder(self, content: BlockContent) -> Block | None:
        """The block that holds `content`; None where that was evicted."""
        block = self._blocks.get(content.hash)
        return block if block is not None and block.content is content else None

    def lacks(self, seq: Sequence, index: int) -> bool:
        """Whether a look at its hashes, as far as they are noted, shows that block `index` of `seq` is not cached."""
        hashes = seq.block_hashes
        return index < len(hashes) and hashes[index] not in self._blocks

    def first_hash(self, seq: Sequence) -> int | None:
        """Hash of its first block; None where none could be found of it, since it is too short."""
        return self._hash(seq, 0, self._tokens(seq, 0)) if len(seq.token_ids) > self._block_size else None

    def seal(self, seq: Sequence, index: int) -> tuple[BlockContent | None, Block | None]:
        """Enter block `index` of `seq`, which is full and computed; all before it are sealed.

        Returns the content that the block gets, and the block that loses its own because it had the same hash.
        The content is None where another block holds the same already: the first one stays, and this one is known
        to its owner alone. Changes the notes that `seq` carries.
        """
        name, content, loser = self.enter(seq, index, seq.sealed_name, seq.block_table[index])
        seq.num_sealed_blocks = index + 1
        seq.sealed_name = name
        return content, loser

    def enter(
        self, seq: Sequence, index: int, parent_name: int | None, block: Block
    ) -> tuple[int, BlockContent | None, Block | None]:
        """Enter `block` as block `index` of `seq`; `parent_name` names the content before it, None for the first.

        Returns the name of the content in this place, and what `seal` returns.
        """
        tokens = self._tokens(seq, index)
        parent = self._root(seq) if parent_name is None else parent_name
        key = self._hash(seq, index, tokens)
        rival = self._blocks.get(key)
        if rival is not None and _holds(rival, parent, tokens):
            assert rival.content is not None
            return rival.content.name, None, None
        # A rival of other content is a collision, or hangs below a parent that was evicted and can't be reached.
        content = BlockContent(key, parent, tokens, next(self._names))
        self._blocks[key] = block
        return content.name, content, rival

    def evict(self, content: BlockContent) -> None:
        """Forget a content: its block is about to hold something else."""
        del self._blocks[content.hash]

    def items(self) -> list[tuple[int, Block]]:
        """All entries, for checks."""
        return list(self._blocks.items())

    def _root(self, seq: Sequence) -> tuple[str, ...]:
        """What must agree before any token does. A tuple: a salt "a" is no adapter "a"."""
        return ("" if self._is_shared_by_tenants else seq.tenant, seq.adapter, seq.cache_salt)

    def _tokens(self, seq: Sequence, index: int) -> bytes:
        return seq.token_ids[index * self._block_size : (index + 1) * self._block_size].tobytes()

    def _hash(self, seq: Sequence, index: int, tokens: bytes) -> int:
        """Hash of full block `index`, kept with the sequence so that it is computed once in its life."""
        hashes = seq.block_hashes
        if index < len(hashes):
            return hashes[index]
        assert index == len(hashes), f"block {index} of {seq} is hashed after {len(hashes)} blocks"
        key = self._hash_function(hashes[-1] if hashes else hash(self._root(seq)), tokens)
        hashes.append(key)
        return key


def _holds(block: Block, parent: int | tuple[str, ...], tokens: bytes) -> bool:
    content = block.content
    return content is not None and content.tokens == tokens and content.parent == parent
