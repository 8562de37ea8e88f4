"""Which physical block holds which tokens of one sequence."""

from collections.abc import Iterable, Iterator

from scheduler.block_pool import Block


class BlockTable:
    """The blocks of one sequence in logical order: block i holds tokens [i * block_size, (i + 1) * block_size).

    It only grows until `clear` empties it, but for a block that is replaced by a copy of its own before it is written
    to. Two equal blocks are never merged afterwards: the runner keeps a copy of the table and hears only of what is
    appended.

    blocks: to be read, where a step looks at every sequence.
    """

    __slots__ = ("blocks",)

    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def append(self, blocks: Iterable[Block]) -> None:
        """Add blocks at the end."""
        self.blocks.extend(blocks)

    def replace(self, index: int, block: Block) -> Block:
        """Put `block` in the place of logical block `index`, and return what was there."""
        old, self.blocks[index] = self.blocks[index], block
        return old

    def clear(self) -> list[Block]:
        """Empty the table and return what it held, in logical order."""
        blocks, self.blocks = self.blocks, []
        return blocks

    def head(self, end: int) -> list[Block]:
        """The blocks before logical block `end`."""
        return self.blocks[:end]

    def tail(self, start: int) -> list[Block]:
        """The blocks from logical block `start` on."""
        return self.blocks[start:]

    def block_ids(self) -> tuple[int, ...]:
        """Physical block ids in logical order."""
        return tuple([block.block_id for block in self.blocks])

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> Block:
        return self.blocks[index]

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)
