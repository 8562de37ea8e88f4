"""Persistent rows of the sequences that the runner knows, and the tensors of one step made from them.

    row   token_ids [max_model_len + 1]          block_tables [max_blocks_per_seq]
     0    | prompt | generated | unused ...      | 7 | 2 | 9 | unused ...
     1    free
     2    | prompt | unused ...                  | 4 | unused ...

Host work of a step is a handful of numpy calls over the scheduler's columns; the only loop is over sequence ids.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.paged_attention import AttentionMetadata
from kernels.penalties import Penalties
from model.decode_shapes import DecodeShape, DecodeShapes
from model.errors import RunnerInputError
from model.staging import Staging, transport_for
from scheduler.output import Chunks, NewRow, SchedulerOutput

IntArray = npt.NDArray[np.int64]

# Beside the block tables of the largest padded decode: what most steps bring of tokens, tables and wishes.
STAGED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each sampled row wants its token, one element a row; `positions` are the indices of the tokens to be drawn
    in their whole sequences, so that a draw is the same alone, in any batch and after a preemption. `penalties` is None
    where no row has any."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    penalties: Penalties | None

    def rows(self, start: int, end: int) -> "SamplingRows":
        """Rows [start, end) of them."""
        cut = slice(start, end)
        return SamplingRows(
            *(self.temperature[cut], self.top_k[cut], self.top_p[cut], self.min_p[cut]),
            *(self.seeds[cut], self.positions[cut]),
            None if self.penalties is None else self.penalties.rows(start, end),
        )


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What one forward pass reads, on the device.

    input_ids, positions, slot_mapping int64 [num_tokens]; logits_rows int64 [num_sampled], or None when every token
    is sampled. `sampled_ids`, `sampled_rows` and `sampled_positions` say whose tokens are drawn, and their indices;
    `wants_logprob` bool [num_sampled], on the host, which of them want the log probability as well, `num_candidates`
    int64 [num_sampled] how many candidates: 0 but for beams; `sampled_terms` int64 [num_sampled] whose rows they were.

    shape: what the step was padded to (None: not at all). Its rows beyond those of `sampled_ids` are nobody's: no keys,
    slot -1, token 0.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    meta: AttentionMetadata
    logits_rows: torch.Tensor | None
    sampled_ids: list[str]
    sampled_rows: IntArray
    sampled_positions: IntArray
    wants_logprob: npt.NDArray[np.bool_]
    num_candidates: IntArray
    sampled_terms: IntArray
    sampling: SamplingRows
    shape: DecodeShape | None = None


class InputBatch:
    """Owns the rows. A row is taken by `add`, freed by `remove`, and reused by whoever comes next.

    Tokens that are drawn on the device get into their rows in one of two ways:

        drawn_on_device ─► the next `prepare` reads them from there, whose chunks need them before the host knows them
        append_sampled  ─► the host knows them: from now on they are in the row

    A row that has changed hands between the two (its term has ended) gets nothing of its former owner's.

    shapes: what pure decodes are padded to; None pads nothing. It may be set to None later.
    staging: how arrays get to the device; by default one of its own on CUDA, and none on the CPU, where a tensor is the
    array's own memory.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        *,
        shapes: DecodeShapes | None = None,
        staging: Staging | None = None,
    ) -> None:
        self.max_model_len = max_model_len
        self.shapes = shapes
        self._block_size = block_size
        self._device = device
        self._staging = staging or _staging_for(device, shapes, block_size)
        max_num_blocks = -(-max_model_len // block_size)
        # One more than the context, so that a token drawn at the limit, which ends its sequence, has its place.
        self._token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int64)
        self._block_tables = np.zeros((max_num_seqs, max_num_blocks), dtype=np.int32)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self._temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self._top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self._top_p = np.ones(max_num_seqs, dtype=np.float32)
        self._min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self._seeds = np.zeros(max_num_seqs, dtype=np.int64)
        self._has_penalties = np.zeros(max_num_seqs, dtype=np.bool_)
        self._num_prompt = np.zeros(max_num_seqs, dtype=np.int64)
        self._repetition = np.ones(max_num_seqs, dtype=np.float32)
        self._frequency = np.zeros(max_num_seqs, dtype=np.float32)
        self._presence = np.zeros(max_num_seqs, dtype=np.float32)
        self._is_choosing = np.zeros(max_num_seqs, dtype=np.bool_)
        self._num_candidates = np.zeros(max_num_seqs, dtype=np.int64)
        # How often each row was freed. And of the draws that the host doesn't know yet: which of them is each row's
        # (-1: none), at what position, and all their ids.
        self._terms = np.zeros(max_num_seqs, dtype=np.int64)
        self._draw_of = np.full(max_num_seqs, -1, dtype=np.int64)
        self._draw_positions = np.zeros(max_num_seqs, dtype=np.int64)
        self._drawn_ids: torch.Tensor | None = None
        self._row_of: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._aranges = np.arange(max_num_seqs + 1, dtype=np.int32)

    @property
    def num_free_rows(self) -> int:
        """Rows that are not in use."""
        return len(self._free_rows)

    def apply(self, output: SchedulerOutput) -> None:
        """Drop the removed rows, make the new ones, put chosen tokens into others and append new blocks to them.

        Raises RunnerInputError for an unknown or known id, and for more rows, tokens or blocks than there is room for.
        """
        for seq_id in output.removed_ids:
            self.remove(seq_id)
        for new_row in output.new_rows:
            self.add(new_row)
        for chosen in output.row_tokens:
            self._token_ids[self._row(chosen.seq_id), chosen.position] = chosen.token_id
        for new_blocks in output.new_blocks:
            self._append_blocks(self._row(new_blocks.seq_id), new_blocks.block_ids)

    def add(self, new_row: NewRow) -> None:
        """Take a free row for a sequence."""
        if new_row.seq_id in self._row_of:
            raise RunnerInputError(f"sequence {new_row.seq_id!r} already has a row: remove it first")
        if not self._free_rows:
            raise RunnerInputError(
                f"all {len(self._num_blocks)} rows are taken: max_num_seqs of the runner is too small"
            )
        num_tokens, sampling = len(new_row.token_ids), new_row.sampling
        if num_tokens >= self._token_ids.shape[1]:
            raise RunnerInputError(
                f"sequence {new_row.seq_id!r} has {num_tokens} tokens, the runner's rows {self._token_ids.shape[1] - 1}"
            )
        row = self._free_rows.pop()
        self._row_of[new_row.seq_id] = row
        self._token_ids[row, :num_tokens] = new_row.token_ids
        self._num_blocks[row] = 0
        self._append_blocks(row, new_row.block_ids)
        # Nobody follows what is drawn of a beam: the largest logit is the least work.
        self._temperature[row] = 0.0 if new_row.num_candidates else sampling.temperature
        self._top_k[row] = sampling.top_k
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._seeds[row] = new_row.seed
        self._has_penalties[row] = sampling.has_penalties
        self._num_prompt[row] = new_row.num_prompt_tokens
        self._repetition[row] = sampling.repetition_penalty
        self._frequency[row] = sampling.frequency_penalty
        self._presence[row] = sampling.presence_penalty
        self._is_choosing[row] = sampling.is_choosing
        self._num_candidates[row] = new_row.num_candidates

    def remove(self, seq_id: str) -> None:
        """Free a sequence's row."""
        row = self._row(seq_id)
        self._free_rows.append(row)
        self._terms[row] += 1
        self._draw_of[row] = -1
        del self._row_of[seq_id]

    def drawn_on_device(self, parts: list[tuple[StepInputs, torch.Tensor]]) -> None:
        """The step launched last draws these ids, int64 [num_sampled] each, which the host doesn't know yet.

        Those of the step before it are known by the time the next is prepared, and are not asked for here any more.
        """
        self._drawn_ids = None
        if not parts:
            return
        self._draw_of.fill(-1)
        start = 0
        for inputs, ids in parts:
            rows = inputs.sampled_rows
            self._draw_of[rows] = np.arange(start, start + len(ids))
            self._draw_positions[rows] = inputs.sampled_positions
            start += len(ids)
        ids_of_parts = [ids for _, ids in parts]
        self._drawn_ids = None if start == 0 else torch.cat(ids_of_parts) if len(parts) > 1 else ids_of_parts[0]

    def append_sampled(self, inputs: StepInputs, token_ids: IntArray) -> None:
        """Write the drawn tokens behind their sequences; -1 (nothing could be drawn) is not written."""
        rows, positions = inputs.sampled_rows, inputs.sampled_positions
        is_drawn = (token_ids >= 0) & (self._terms[rows] == inputs.sampled_terms)
        if not is_drawn.all():
            rows, positions, token_ids = rows[is_drawn], positions[is_drawn], token_ids[is_drawn]
        self._token_ids[rows, positions] = token_ids

    def _row(self, seq_id: str) -> int:
        row = self._row_of.get(seq_id)
        if row is None:
            raise RunnerInputError(f"sequence {seq_id!r} has no row: it must come as a NewRow before its first chunk")
        return row

    def _append_blocks(self, row: int, block_ids: tuple[int, ...]) -> None:
        start, table = int(self._num_blocks[row]), self._block_tables[row]
        if start + len(block_ids) > len(table):
            raise RunnerInputError(f"a sequence would hold {start + len(block_ids)} blocks, its row has {len(table)}")
        table[start : start + len(block_ids)] = block_ids
        self._num_blocks[row] = start + len(block_ids)

    def prepare(self, chunks: Chunks) -> StepInputs:
        """Tensors of a step over these chunks (at least one), in their order.

        Raises RunnerInputError for a chunk of an unknown sequence, an empty one, and one that passes its blocks.
        """
        if self._staging is not None:
            self._staging.begin()
        rows = np.array([self._row(seq_id) for seq_id in chunks.seq_ids], dtype=np.int64)
        starts = np.array(chunks.starts, dtype=np.int64)
        counts = np.array(chunks.num_tokens, dtype=np.int64)
        ends = starts + counts
        self._check_room(chunks, rows, counts, ends)
        max_query_len = int(counts.max())
        if max_query_len == 1:
            query_starts, token_rows, positions = self._aranges[: len(chunks) + 1], rows, starts
        else:
            query_starts, token_rows, positions = _ragged(rows, starts, counts)
        sampled = np.flatnonzero(chunks.is_sampled)
        every_token_is_sampled = len(sampled) == len(token_rows)
        shape = None
        if self.shapes is not None and every_token_is_sampled and max_query_len == 1:
            shape = self.shapes.find(len(rows), int(ends.max()))
        # Those that a graph reads come first, so that they always lie at the same addresses.
        meta = self._attention_metadata(rows, query_starts, ends, max_query_len, shape)
        num_tokens = len(token_rows) if shape is None else shape.num_seqs
        inputs = StepInputs(
            input_ids=self._to_device(_padded(self._token_ids[token_rows, positions], num_tokens)),
            positions=self._to_device(_padded(positions, num_tokens)),
            slot_mapping=self._to_device(_padded(self._slots(token_rows, positions), num_tokens, -1)),
            meta=meta,
            logits_rows=(
                None if every_token_is_sampled else self._to_device(query_starts[sampled + 1].astype(np.int64) - 1)
            ),
            sampled_ids=chunks.sampled_ids,
            sampled_rows=rows[sampled],
            sampled_positions=ends[sampled],
            wants_logprob=self._is_choosing[rows[sampled]],
            num_candidates=self._num_candidates[rows[sampled]],
            sampled_terms=self._terms[rows[sampled]],
            sampling=self._sampling_rows(rows[sampled], ends[sampled]),
            shape=shape,
        )
        drawn_ids = self._drawn_ids
        unknown = [] if drawn_ids is None else self._unknown(inputs, rows, query_starts, ends)
        if self._staging is not None:
            self._staging.flush()
        if drawn_ids is not None:
            # In place, where a graph reads them, and not before the copy, which would write over them. Nothing waits
            # for the device. Where nothing could be drawn (-1) it is any id: that sequence fails.
            for target, places, draws in unknown:
                target.view(-1)[places] = drawn_ids[draws].clamp(min=0)
        return inputs

    def idle_decode(self, shape: DecodeShape) -> StepInputs:
        """Inputs of this shape in which every row is nobody's, where `prepare` puts those of its steps."""
        if self._staging is not None:
            self._staging.begin()
        nothing = np.zeros(0, dtype=np.int64)
        meta = self._attention_metadata(nothing, self._aranges[:1], nothing, 1, shape)
        inputs = StepInputs(
            input_ids=self._to_device(_padded(nothing, shape.num_seqs)),
            positions=self._to_device(_padded(nothing, shape.num_seqs)),
            slot_mapping=self._to_device(_padded(nothing, shape.num_seqs, -1)),
            meta=meta,
            logits_rows=None,
            sampled_ids=[],
            sampled_rows=nothing,
            sampled_positions=nothing,
            wants_logprob=np.zeros(0, dtype=np.bool_),
            num_candidates=nothing,
            sampled_terms=nothing,
            sampling=self._sampling_rows(nothing, nothing),
            shape=shape,
        )
        if self._staging is not None:
            self._staging.flush()
        return inputs

    def _unknown(
        self, inputs: StepInputs, rows: IntArray, query_starts: npt.NDArray[np.int32], ends: IntArray
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Tensors with tokens that the host doesn't know yet, where in them, flat, and which draws those are.

        That is only ever the last token of a chunk: among the step's own, and among those that are penalised.
        """
        found = [self._draws_in(inputs.input_ids, rows, ends, query_starts[1:].astype(np.int64) - 1)]
        penalties = inputs.sampling.penalties
        if penalties is not None:
            places = self._penalised(inputs.sampled_rows) * penalties.token_ids.shape[1] + inputs.sampled_positions - 1
            found.append(self._draws_in(penalties.token_ids, inputs.sampled_rows, inputs.sampled_positions, places))
        return [each for each in found if each is not None]

    def _draws_in(
        self, target: torch.Tensor, rows: IntArray, ends: IntArray, places: IntArray
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Of these rows' last tokens, before `ends` and at these places of `target`, those that are only drawn yet."""
        draws = self._draw_of[rows]
        wanted = np.flatnonzero((draws >= 0) & (self._draw_positions[rows] == ends - 1))
        if not len(wanted):
            return None
        return target, self._to_device(places[wanted]), self._to_device(draws[wanted])

    def _penalised(self, rows: IntArray) -> IntArray:
        """Which sequence of `Penalties.token_ids` each of these rows is."""
        return rows if self._device.type == "cpu" else np.arange(len(rows))

    def _check_room(self, chunks: Chunks, rows: IntArray, counts: IntArray, ends: IntArray) -> None:
        is_wrong = (counts < 1) | (ends > self._num_blocks[rows] * self._block_size)
        if is_wrong.any():
            first = int(is_wrong.argmax())
            raise RunnerInputError(
                f"the chunk {chunks.part(first, first + 1)} is empty or passes its {self._num_blocks[rows[first]]} "
                f"blocks of {self._block_size} tokens: its blocks must come with it"
            )

    def _slots(self, token_rows: IntArray, positions: IntArray) -> IntArray:
        """Slot of each token in the cache; int64, since block * block_size passes 2^31 in a large pool."""
        blocks = self._block_tables[token_rows, positions // self._block_size].astype(np.int64)
        return blocks * self._block_size + positions % self._block_size

    def _attention_metadata(
        self,
        rows: IntArray,
        query_starts: npt.NDArray[np.int32],
        ends: IntArray,
        max_query_len: int,
        shape: DecodeShape | None,
    ) -> AttentionMetadata:
        num_seqs, max_context_len = (len(rows), int(ends.max())) if shape is None else shape
        if shape is not None:
            # A graph's launches are sized by these numbers, and on the device nobody can check them without a wait.
            longest = int(ends.max(initial=0))
            assert longest <= max_context_len, f"{longest} tokens of a sequence pass the {max_context_len} of {shape}"
            query_starts = self._aranges[: num_seqs + 1]
        num_blocks = -(-max_context_len // self._block_size)
        return AttentionMetadata(
            block_tables=self._to_device(_padded(self._block_tables[rows, :num_blocks], num_seqs)),
            query_starts=self._to_device(query_starts),
            context_lens=self._to_device(_padded(ends.astype(np.int32), num_seqs)),
            max_query_len=max_query_len,
            max_context_len=max_context_len,
        )

    def _sampling_rows(self, rows: IntArray, positions: IntArray) -> SamplingRows:
        return SamplingRows(
            temperature=self._to_device(self._temperature[rows]),
            top_k=self._to_device(self._top_k[rows]),
            top_p=self._to_device(self._top_p[rows]),
            min_p=self._to_device(self._min_p[rows]),
            seeds=self._to_device(self._seeds[rows]),
            positions=self._to_device(positions),
            penalties=self._penalties(rows, positions) if self._has_penalties[rows].any() else None,
        )

    def _penalties(self, rows: IntArray, positions: IntArray) -> Penalties:
        """Penalties of rows whose next tokens have these positions, read off the tokens that they hold now.

        On the CPU all rows' tokens in place; elsewhere a copy of what these rows hold.
        """
        token_ids = self._token_ids if self._device.type == "cpu" else self._token_ids[rows, : positions.max()]
        columns = (self._penalised(rows), self._num_prompt[rows], positions)
        amounts = (self._repetition[rows], self._frequency[rows], self._presence[rows])
        return Penalties(*(self._to_device(each) for each in (token_ids, *columns, *amounts)))

    def _to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """The array's own memory on the CPU; staged, it is there for what is launched once `prepare` has returned."""
        return torch.from_numpy(array) if self._staging is None else self._staging.put(array)


def _staging_for(device: torch.device, shapes: DecodeShapes | None, block_size: int) -> Staging | None:
    transport = transport_for(device)
    if transport is None:
        return None
    tables = 0 if shapes is None else 4 * shapes.batch_sizes[-1] * -(-shapes.context_lens[-1] // block_size)
    return Staging(transport, tables + STAGED_BYTES)


def _padded(array: npt.NDArray[Any], num_rows: int, value: int = 0) -> npt.NDArray[Any]:
    """The array with rows of `value` behind its own, `num_rows` in all."""
    if len(array) == num_rows:
        return array
    padded = np.full((num_rows, *array.shape[1:]), value, dtype=array.dtype)
    padded[: len(array)] = array
    return padded


def _ragged(rows: IntArray, starts: IntArray, counts: IntArray) -> tuple[npt.NDArray[np.int32], IntArray, IntArray]:
    """(query_starts [num_chunks + 1], row of each token, position of each token) of chunks laid end to end."""
    query_starts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_starts[1:])
    token_rows = np.repeat(rows, counts)
    positions = np.arange(len(token_rows)) + np.repeat(starts - query_starts[:-1], counts)
    return query_starts, token_rows, positions
