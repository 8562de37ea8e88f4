"""The shapes that pure decodes are padded to, so that a graph which was captured once serves many batches."""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

SMALLEST: Final = (1, 2, 4)
STEP: Final = 8
# Larger batches are not captured: by then the device is busy for longer than the host takes to launch.
MAX_SEQS: Final = 256
FIRST_CONTEXT: Final = 2048
CONTEXT_FACTOR: Final = 4


class DecodeShape(NamedTuple):
    """One token for each of `num_seqs` sequences, the longest of at most `max_context_len` keys."""

    num_seqs: int
    max_context_len: int


@dataclass(frozen=True, slots=True)
class DecodeShapes:
    """Every combination of a batch size and a context length, both ascending."""

    batch_sizes: tuple[int, ...]
    context_lens: tuple[int, ...]

    def find(self, num_seqs: int, max_context_len: int) -> DecodeShape | None:
        """The smallest shape that holds such a batch."""
        batch = bisect_left(self.batch_sizes, num_seqs)
        context = bisect_left(self.context_lens, max_context_len)
        if batch == len(self.batch_sizes) or context == len(self.context_lens):
            return None
        return DecodeShape(self.batch_sizes[batch], self.context_lens[context])

    def largest_first(self) -> list[DecodeShape]:
        """All of them; graphs that share memory take the least where the largest is captured first."""
        return [
            DecodeShape(size, context) for context in reversed(self.context_lens) for size in reversed(self.batch_sizes)
        ]


def decode_shapes(max_num_seqs: int, max_model_len: int) -> DecodeShapes:
    """1, 2, 4, 8, 16, 24 ... sequences, up to `max_num_seqs`; contexts of 2,048, 8,192 ... up to `max_model_len`.

    Contexts have sizes of their own, since a graph's grid is as large as its longest context asks for, and a table of
    blocks as wide: with one size for all, short contexts would pay for the longest.
    """
    limit = min(max_num_seqs, MAX_SEQS)
    sizes = [size for size in (*SMALLEST, *range(STEP, limit, STEP)) if size < limit]
    contexts = [FIRST_CONTEXT]
    while contexts[-1] < max_model_len:
        contexts.append(contexts[-1] * CONTEXT_FACTOR)
    contexts[-1] = max_model_len
    assert all(low < high for low, high in pairwise(contexts)), contexts
    return DecodeShapes((*sizes, limit), tuple(contexts))
