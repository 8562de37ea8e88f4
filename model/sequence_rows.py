"""Persistent rows of the sequences that the runner knows.

row   token_ids [max_model_len + 1]          block_tables [max_blocks_per_seq]
 0    | prompt | generated | unused ...      | 7 | 2 | 9 | unused ...
 1    free
 2    | prompt | unused ...                  | 4 | unused ...
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from model.errors import RunnerInputError
from model.sampling_columns import SamplingColumns
from model.step_inputs import IntArray, StepInputs
from scheduler.output import Chunks, NewRow


class SequenceRows:
    """Owns the rows. A row is taken by `add`, freed by `remove`, and reused by whoever comes next.

    token_ids int64 [num_rows, max_model_len + 1] and block_tables int32 [num_rows, max_blocks_per_seq], to be read;
    terms int64 [num_rows]: how often each row was freed; sampling: how each wants its tokens.
    """

    def __init__(self, num_rows: int, max_model_len: int, block_size: int) -> None:
        # One more than the context, so that a token drawn at the limit, which ends its sequence, has its place.
        self.token_ids = np.zeros((num_rows, max_model_len + 1), dtype=np.int64)
        self.block_tables = np.zeros((num_rows, -(-max_model_len // block_size)), dtype=np.int32)
        self.terms = np.zeros(num_rows, dtype=np.int64)
        self.sampling = SamplingColumns(num_rows)
        self._block_size = block_size
        self._num_blocks = np.zeros(num_rows, dtype=np.int64)
        self._row_of: dict[str, int] = {}
        self._free_rows = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Rows that are not in use."""
        return len(self._free_rows)

    def row_of(self, seq_id: str) -> int:
        """A sequence's row. Raises RunnerInputError where it has none."""
        row = self._row_of.get(seq_id)
        if row is None:
            raise RunnerInputError(f"sequence {seq_id!r} has no row: it must come as a NewRow before its first chunk")
        return row

    def rows_of(self, seq_ids: Iterable[str]) -> IntArray:
        """Their rows, int64. Raises RunnerInputError where one has none."""
        return np.array([self.row_of(seq_id) for seq_id in seq_ids], dtype=np.int64)

    def add(self, new_row: NewRow) -> None:
        """Take a free row for a sequence. Raises RunnerInputError where it has one, and where something has no room."""
        if new_row.seq_id in self._row_of:
            raise RunnerInputError(f"sequence {new_row.seq_id!r} already has a row: remove it first")
        if not self._free_rows:
            raise RunnerInputError(
                f"all {len(self._num_blocks)} rows are taken: max_num_seqs of the runner is too small"
            )
        num_tokens = len(new_row.token_ids)
        if num_tokens >= self.token_ids.shape[1]:
            raise RunnerInputError(
                f"sequence {new_row.seq_id!r} has {num_tokens} tokens, the runner's rows {self.token_ids.shape[1] - 1}"
            )
        row = self._free_rows.pop()
        self._row_of[new_row.seq_id] = row
        self.token_ids[row, :num_tokens] = new_row.token_ids
        self._num_blocks[row] = 0
        self._append_blocks(row, new_row.block_ids)
        self.sampling.write(row, new_row)

    def remove(self, seq_id: str) -> int:
        """Free a sequence's row; which it was. Raises RunnerInputError where it has none."""
        row = self.row_of(seq_id)
        self._free_rows.append(row)
        self.terms[row] += 1
        del self._row_of[seq_id]
        return row

    def append_blocks(self, seq_id: str, block_ids: tuple[int, ...]) -> None:
        """Add blocks to a sequence's table. Raises RunnerInputError where it has no row, or no room in it."""
        self._append_blocks(self.row_of(seq_id), block_ids)

    def put_token(self, seq_id: str, position: int, token_id: int) -> None:
        """Write one token of a sequence. Raises RunnerInputError where it has no row."""
        self.token_ids[self.row_of(seq_id), position] = token_id

    def append_drawn(self, inputs: StepInputs, token_ids: IntArray) -> None:
        """Write the drawn tokens behind their sequences: not -1, and not where the row has changed hands since."""
        rows, positions = inputs.sampled_rows, inputs.sampled_positions
        is_drawn = (token_ids >= 0) & (self.terms[rows] == inputs.sampled_terms)
        if not is_drawn.all():
            rows, positions, token_ids = rows[is_drawn], positions[is_drawn], token_ids[is_drawn]
        self.token_ids[rows, positions] = token_ids

    def check_room(self, chunks: Chunks, rows: IntArray, counts: IntArray, ends: IntArray) -> None:
        """Raises RunnerInputError for a chunk of these that is empty or passes its sequence's blocks."""
        is_wrong = (counts < 1) | (ends > self._num_blocks[rows] * self._block_size)
        if is_wrong.any():
            first = int(is_wrong.argmax())
            raise RunnerInputError(
                f"the chunk {chunks.part(first, first + 1)} is empty or passes its {self._num_blocks[rows[first]]} "
                f"blocks of {self._block_size} tokens: its blocks must come with it"
            )

    def slots(self, token_rows: IntArray, positions: IntArray) -> IntArray:
        """Slot of each token in the cache; int64, since block * block_size passes 2^31 in a large pool."""
        blocks = self.block_tables[token_rows, positions // self._block_size].astype(np.int64)
        return blocks * self._block_size + positions % self._block_size

    def tables(self, rows: IntArray, max_context_len: int) -> npt.NDArray[np.int32]:
        """Block tables of these rows, as far as so many tokens reach."""
        return self.block_tables[rows, : -(-max_context_len // self._block_size)]

    def _append_blocks(self, row: int, block_ids: tuple[int, ...]) -> None:
        start, table = int(self._num_blocks[row]), self.block_tables[row]
        if start + len(block_ids) > len(table):
            raise RunnerInputError(f"a sequence would hold {start + len(block_ids)} blocks, its row has {len(table)}")
        table[start : start + len(block_ids)] = block_ids
        self._num_blocks[row] = start + len(block_ids)
