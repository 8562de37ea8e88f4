"""The tensors of one step, made from the rows of the sequences that the runner knows.

Host work of a step is a handful of numpy calls over the scheduler's columns; the only loop is over sequence ids.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.paged_attention import AttentionMetadata
from kernels.penalties import Penalties
from model.decode_shapes import DecodeShape, DecodeShapes
from model.drawn_ids import DrawnIds
from model.sequence_rows import SequenceRows
from model.staging import Staging, transport_for
from model.step_inputs import IntArray, SamplingRows, StepInputs
from model.step_layout import StepLayout, lay_out, lay_out_nothing
from scheduler.output import Chunks, NewRow, SchedulerOutput

# Beside the block tables of the largest padded decode: what most steps bring of tokens, tables and wishes.
STAGED_BYTES = 1 << 20


class InputBatch:
    """Puts a step together: rows (`SequenceRows`), draws that are on their way (`DrawnIds`), and how to the device.

    Tokens that are drawn on the device get into their rows in one of two ways:

        drawn_on_device ─► the next `prepare` reads them from there, whose chunks need them before the host knows them
        append_sampled  ─► the host knows them: from now on they are in the row

    A row that has changed hands between the two (its term has ended) gets nothing of its former owner's.

    is_deterministic: what the attention of its steps is told (AttentionMetadata).
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
        is_deterministic: bool = False,
        shapes: DecodeShapes | None = None,
        staging: Staging | None = None,
    ) -> None:
        self.max_model_len = max_model_len
        self.shapes = shapes
        self._is_deterministic = is_deterministic
        self._device = device
        self._staging = staging or _staging_for(device, shapes, block_size)
        self._rows = SequenceRows(max_num_seqs, max_model_len, block_size)
        self._drawn = DrawnIds(max_num_seqs)
        self._aranges = np.arange(max_num_seqs + 1, dtype=np.int32)

    @property
    def num_free_rows(self) -> int:
        """Rows that are not in use."""
        return self._rows.num_free

    def apply(self, output: SchedulerOutput) -> None:
        """Drop the removed rows, make the new ones, put chosen tokens into others and append new blocks to them.

        Raises RunnerInputError for an unknown or known id, and for more rows, tokens or blocks than there is room for.
        """
        for seq_id in output.removed_ids:
            self.remove(seq_id)
        for new_row in output.new_rows:
            self.add(new_row)
        for chosen in output.row_tokens:
            self._rows.put_token(chosen.seq_id, chosen.position, chosen.token_id)
        for new_blocks in output.new_blocks:
            self._rows.append_blocks(new_blocks.seq_id, new_blocks.block_ids)

    def add(self, new_row: NewRow) -> None:
        """Take a free row for a sequence."""
        self._rows.add(new_row)

    def remove(self, seq_id: str) -> None:
        """Free a sequence's row."""
        self._drawn.forget(self._rows.remove(seq_id))

    def drawn_on_device(self, parts: list[tuple[StepInputs, torch.Tensor]]) -> None:
        """The step launched last draws these ids, int64 [num_sampled] each, which the host doesn't know yet.

        Those of the step before it are known by the time the next is prepared, and are not asked for here any more.
        """
        self._drawn.replace(parts)

    def append_sampled(self, inputs: StepInputs, token_ids: IntArray) -> None:
        """Write the drawn tokens behind their sequences; -1 (nothing could be drawn) is not written."""
        self._rows.append_drawn(inputs, token_ids)

    def prepare(self, chunks: Chunks) -> StepInputs:
        """Tensors of a step over these chunks (at least one), in their order.

        Raises RunnerInputError for a chunk of an unknown sequence, an empty one, and one that passes its blocks.
        """
        if self._staging is not None:
            self._staging.begin()
        layout = lay_out(chunks, self._rows)
        shape = None
        if self.shapes is not None and layout.is_every_token_sampled and layout.max_query_len == 1:
            shape = self.shapes.find(len(layout.rows), int(layout.ends.max()))
        inputs = self._inputs(layout, chunks.sampled_ids, shape)
        drawn_ids = self._drawn.ids
        unknown = [] if drawn_ids is None else self._unknown(inputs, layout)
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
        inputs = self._inputs(lay_out_nothing(), [], shape)
        if self._staging is not None:
            self._staging.flush()
        return inputs

    def _inputs(self, layout: StepLayout, sampled_ids: list[str], shape: DecodeShape | None) -> StepInputs:
        rows, token_rows, positions = self._rows, layout.token_rows, layout.positions
        num_tokens = len(token_rows) if shape is None else shape.num_seqs
        logits_rows = None
        # Those that a graph reads come first, so that they always lie at the same addresses.
        meta = self._attention_metadata(layout, shape)
        input_ids = self._to_device(_padded(rows.token_ids[token_rows, positions], num_tokens))
        on_device = self._to_device(_padded(positions, num_tokens))
        slot_mapping = self._to_device(_padded(rows.slots(token_rows, positions), num_tokens, -1))
        if not layout.is_every_token_sampled:
            logits_rows = self._to_device(layout.query_starts[layout.sampled + 1].astype(np.int64) - 1)
        sampled_rows, sampled_positions = layout.rows[layout.sampled], layout.ends[layout.sampled]
        return StepInputs(
            input_ids=input_ids,
            positions=on_device,
            slot_mapping=slot_mapping,
            meta=meta,
            logits_rows=logits_rows,
            sampled_ids=sampled_ids,
            sampled_rows=sampled_rows,
            sampled_positions=sampled_positions,
            wants_logprob=rows.sampling.is_choosing[sampled_rows],
            num_candidates=rows.sampling.num_candidates[sampled_rows],
            sampled_terms=rows.terms[sampled_rows],
            sampling=self._sampling_rows(sampled_rows, sampled_positions),
            shape=shape,
        )

    def _attention_metadata(self, layout: StepLayout, shape: DecodeShape | None) -> AttentionMetadata:
        longest = int(layout.ends.max(initial=0))
        num_seqs, max_context_len = (len(layout.rows), longest) if shape is None else shape
        # A graph's launches are sized by these numbers, and on the device nobody can check them without a wait.
        assert longest <= max_context_len, f"{longest} tokens of a sequence pass the {max_context_len} of {shape}"
        query_starts = layout.query_starts if shape is None else self._aranges[: num_seqs + 1]
        return AttentionMetadata(
            block_tables=self._to_device(_padded(self._rows.tables(layout.rows, max_context_len), num_seqs)),
            query_starts=self._to_device(query_starts),
            context_lens=self._to_device(_padded(layout.ends.astype(np.int32), num_seqs)),
            max_query_len=layout.max_query_len,
            max_context_len=max_context_len,
            is_deterministic=self._is_deterministic,
        )

    def _sampling_rows(self, rows: IntArray, positions: IntArray) -> SamplingRows:
        columns = self._rows.sampling
        penalties = self._penalties(rows, positions) if columns.have_penalties(rows) else None
        return columns.sampling_rows(rows, positions, penalties, self._to_device)

    def _penalties(self, rows: IntArray, positions: IntArray) -> Penalties:
        """Penalties of rows whose next tokens have these positions, read off the tokens that they hold now.

        On the CPU all rows' tokens in place; elsewhere a copy of what these rows hold.
        """
        held = self._rows.token_ids
        token_ids = held if self._device.type == "cpu" else held[rows, : positions.max()]
        return self._rows.sampling.penalties(rows, positions, token_ids, self._penalised(rows), self._to_device)

    def _penalised(self, rows: IntArray) -> IntArray:
        """Which sequence of `Penalties.token_ids` each of these rows is."""
        return rows if self._device.type == "cpu" else np.arange(len(rows))

    def _unknown(self, inputs: StepInputs, layout: StepLayout) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Tensors with tokens that the host doesn't know yet, where in them, flat, and which draws those are.

        That is only ever the last token of a chunk: among the step's own, and among those that are penalised.
        """
        last = layout.query_starts[1:].astype(np.int64) - 1
        found = [self._draws_in(inputs.input_ids, layout.rows, layout.ends, last)]
        penalties = inputs.sampling.penalties
        if penalties is not None:
            places = self._penalised(inputs.sampled_rows) * penalties.token_ids.shape[1] + inputs.sampled_positions - 1
            found.append(self._draws_in(penalties.token_ids, inputs.sampled_rows, inputs.sampled_positions, places))
        return [each for each in found if each is not None]

    def _draws_in(
        self, target: torch.Tensor, rows: IntArray, ends: IntArray, places: IntArray
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Of these rows' last tokens, before `ends` and at these places of `target`, those that are only drawn yet."""
        wanted, draws = self._drawn.find(rows, ends)
        if not len(wanted):
            return None
        return target, self._to_device(places[wanted]), self._to_device(draws)

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
