"""The chunks of a step laid end to end: whose each token is, and where in its sequence it stands."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from model.sequence_rows import SequenceRows
from model.step_inputs import IntArray
from scheduler.output import Chunks


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where the tokens of a step come from.

    rows, ends int64 [num_chunks]: whose chunk, and the position behind it; query_starts int32 [num_chunks + 1];
    token_rows, positions int64 [num_tokens]; sampled int64 [num_sampled]: the chunks that draw a token.
    """

    rows: IntArray
    ends: IntArray
    query_starts: npt.NDArray[np.int32]
    token_rows: IntArray
    positions: IntArray
    max_query_len: int
    sampled: IntArray

    @property
    def is_every_token_sampled(self) -> bool:
        """Whether each token draws the one behind it."""
        return len(self.sampled) == len(self.token_rows)


def lay_out(chunks: Chunks, rows: SequenceRows) -> StepLayout:
    """The layout of these chunks, at least one, in their order.

    Raises RunnerInputError for a chunk of an unknown sequence, an empty one, and one that passes its blocks.
    """
    chunk_rows = rows.rows_of(chunks.seq_ids)
    starts = np.array(chunks.starts, dtype=np.int64)
    counts = np.array(chunks.num_tokens, dtype=np.int64)
    ends = starts + counts
    rows.check_room(chunks, chunk_rows, counts, ends)
    sampled = np.flatnonzero(chunks.is_sampled)
    max_query_len = int(counts.max())
    if max_query_len == 1:
        query_starts = np.arange(len(chunks) + 1, dtype=np.int32)
        return StepLayout(chunk_rows, ends, query_starts, chunk_rows, starts, 1, sampled)
    query_starts = np.zeros(len(chunks) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_starts[1:])
    token_rows = np.repeat(chunk_rows, counts)
    positions = np.arange(len(token_rows)) + np.repeat(starts - query_starts[:-1], counts)
    return StepLayout(chunk_rows, ends, query_starts, token_rows, positions, max_query_len, sampled)


def lay_out_nothing() -> StepLayout:
    """The layout of a decode of nobody."""
    nothing: IntArray = np.zeros(0, dtype=np.int64)
    return StepLayout(nothing, nothing, np.zeros(1, dtype=np.int32), nothing, nothing, 1, nothing)
