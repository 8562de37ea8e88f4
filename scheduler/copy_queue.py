"""Transfers of one direction that wait for their turn on the link."""

from collections import deque

from scheduler.output import Transfer


class CopyQueue:
    """First in, first out; a step takes transfers of at most `max_blocks` blocks, all where that is 0.

    Long copies are cut into transfers of `max_blocks` before they come here, so that a step always takes one.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._transfers: deque[Transfer] = deque()

    def add(self, transfer: Transfer) -> None:
        """Put one behind all others."""
        self._transfers.append(transfer)

    @property
    def num_blocks(self) -> int:
        """Blocks that wait to be copied."""
        return sum([len(transfer.copies) for transfer in self._transfers])

    def take(self) -> tuple[Transfer, ...]:
        """Those whose copies the next step begins, taken out."""
        taken: list[Transfer] = []
        num_left = self._max_blocks or self.num_blocks
        while self._transfers and len(self._transfers[0].copies) <= num_left:
            taken.append(self._transfers.popleft())
            num_left -= len(taken[-1].copies)
        return tuple(taken)

    def __len__(self) -> int:
        return len(self._transfers)
