"""The blocks of one tier: who is free, who is owned, and in which order free ones are handed out again."""

from collections.abc import Callable, Iterable
from typing import NamedTuple


class BlockContent(NamedTuple):
    """What a full, cached block holds: enough to prove that it is the continuation somebody looks for.

    A tuple, since one is made for each block that becomes full, and a frozen dataclass takes several times as long.

    hash: the chained hash, its key in the prefix cache.
    parent: the name of the content before it, or the root key (a tuple) of its sequence for a first block.
    tokens: the block's token ids, 4 bytes each.
    name: a number that no other content of this cache has had. A name stands for one exact prefix, which a hash
        does not.
    """

    hash: int
    parent: int | tuple[str, ...]
    tokens: bytes
    name: int


class Block:
    """One block of KV memory. `ref_cnt` counts the block tables that hold it; 0 exactly while it is free.

    The links of the free list live in the block itself, so that taking it out of the middle costs no search
    and no allocation; outside the list they lead to the block itself. Only its BlockPool changes a block.
    """

    __slots__ = ("block_id", "content", "next", "prev", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.content: BlockContent | None = None
        self.prev: Block = self
        self.next: Block = self

    @property
    def hash(self) -> int | None:
        """The chained hash of its content; None where it is not cached."""
        return None if self.content is None else self.content.hash

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_cnt={self.ref_cnt}, hash={self.hash})"


class BlockPool:
    """All blocks of one tier (device or CPU), made once, and their free list.

        handed out next                                 freed last
          head ⇄ [nothing cached] ⇄ … ⇄ [cached, oldest] ⇄ … ⇄ [cached, newest] ⇄ head

    A block that is freed keeps its content, and so can be hit, until it is handed out again: only then does
    `on_evict` hear of it. Blocks that hold nothing go to the front, so that they are used up before any cached
    one is lost. `head` is a sentinel which closes the ring, so no link is ever missing.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[BlockContent], None]) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._on_evict = on_evict
        self._head = Block(-1)
        self.num_free = 0
        self.num_free_cached = 0
        for block in self.blocks:
            self._insert_before(self._head, block)

    @property
    def num_blocks(self) -> int:
        """Blocks of this tier, free or owned."""
        return len(self.blocks)

    def allocate(self, num_blocks: int) -> list[Block] | None:
        """Hand out `num_blocks` free blocks, each with one reference; None, and nothing changed, if there are fewer.

        Their cached contents, if any, are evicted.
        """
        if num_blocks > self.num_free:
            return None
        allocated = []
        block = self._head.next
        for _ in range(num_blocks):
            assert block.ref_cnt == 0, f"the free list hands out {block}"
            block.ref_cnt = 1
            if block.content is not None:
                self._on_evict(block.content)
                block.content = None
                self.num_free_cached -= 1
            allocated.append(block)
            after = block.next
            block.prev = block.next = block
            block = after
        # All of them stood in a row, so the ring is closed once.
        self._head.next, block.prev = block, self._head
        self.num_free -= num_blocks
        return allocated

    def touch(self, blocks: Iterable[Block]) -> None:
        """Add one reference to each, taking those that are free out of the free list with their content."""
        for block in blocks:
            if block.ref_cnt == 0:
                before, after = block.prev, block.next
                before.next, after.prev = after, before
                block.prev = block.next = block
                self.num_free -= 1
                self.num_free_cached -= block.content is not None
            block.ref_cnt += 1

    def free(self, blocks: Iterable[Block]) -> None:
        """Drop one reference of each; those without any become free, in the order given.

        Give a sequence's blocks tail first: a tail is worth less than the head it builds on, and is thus
        handed out again before it.
        """
        for block in blocks:
            assert block.ref_cnt > 0, f"{block} is freed, but nobody owns it"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self._insert_before(self._head.next if block.content is None else self._head, block)

    def set_content(self, block: Block, content: BlockContent) -> None:
        """Say what an owned block holds from now on."""
        assert block.ref_cnt > 0, f"{block} is sealed, but nobody owns it"
        assert block.content is None, f"{block} is sealed twice"
        block.content = content

    def drop_content(self, block: Block) -> None:
        """Forget what a block holds, without telling `on_evict`. Its place in the free list stays."""
        if block.ref_cnt == 0 and block.content is not None:
            self.num_free_cached -= 1
        block.content = None

    def free_list(self) -> list[Block]:
        """The free blocks, the one that is handed out next first. For checks: it walks the whole list."""
        blocks: list[Block] = []
        block = self._head.next
        while block is not self._head:
            assert len(blocks) <= self.num_blocks, f"the free list of {self.num_blocks} blocks runs in a circle"
            blocks.append(block)
            block = block.next
        return blocks

    def _insert_before(self, anchor: Block, block: Block) -> None:
        before = anchor.prev
        block.prev, block.next = before, anchor
        before.next = anchor.prev = block
        self.num_free += 1
        self.num_free_cached += block.content is not None
