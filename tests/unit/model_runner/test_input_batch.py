"""The tensors of a step against the same made token by token."""

import random

import pytest
import torch

from model.decode_shapes import DecodeShape, DecodeShapes
from model.input_batch import InputBatch
from model.step_inputs import StepInputs
from scheduler.output import Chunks, NewRow
from scheduler.sampling_params import SamplingParams
from tests.unit.chunks import make_chunks

BLOCK_SIZE = 8


def some_rows(rng: random.Random, num_rows: int) -> list[NewRow]:
    """Sequences of any length with scattered blocks, some of them past the 2^31st slot."""
    rows = []
    for number in range(num_rows):
        num_tokens = rng.randint(1, 60)
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        sampling = SamplingParams(temperature=rng.random(), top_k=rng.randint(0, 9), top_p=rng.uniform(0.1, 1))
        token_ids = tuple(rng.randrange(1000) for _ in range(num_tokens))
        blocks = tuple(rng.randrange(2**31 - 1) for _ in range(num_blocks))
        rows.append(NewRow(f"s{number}", token_ids, num_tokens, sampling, rng.randrange(-(2**63), 2**63), blocks))
    return rows


def prepared(rows: list[NewRow], chunks: Chunks) -> StepInputs:
    """A batch of these rows, and the step over these chunks."""
    batch = InputBatch(max_num_seqs=len(rows), max_model_len=64, block_size=BLOCK_SIZE, device=torch.device("cpu"))
    for row in rows:
        batch.add(row)
    return batch.prepare(chunks)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("is_decode", [True, False], ids=["decodes", "chunks"])
def test_a_step_is_laid_out_token_by_token(seed: int, is_decode: bool) -> None:
    """Ids, positions, slots, tables, lengths and the sampled rows."""
    rng = random.Random(seed)
    rows = some_rows(rng, 7)
    chosen = rng.sample(rows, rng.randint(1, 7))
    spelt = []
    for row in chosen:
        start = rng.randrange(len(row.token_ids))
        count = 1 if is_decode else rng.randint(1, len(row.token_ids) - start)
        spelt.append((row.seq_id, start, count, start + count == len(row.token_ids)))
    inputs = prepared(rows, make_chunks(*spelt))

    ids, positions, slots, last_rows = [], [], [], []
    for row, (_, start, count, _) in zip(chosen, spelt, strict=True):
        for position in range(start, start + count):
            ids.append(row.token_ids[position])
            positions.append(position)
            slots.append(row.block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        last_rows.append(len(ids) - 1)
    context_lens = [start + count for _, start, count, _ in spelt]
    assert inputs.input_ids.tolist() == ids
    assert inputs.positions.tolist() == positions
    assert inputs.slot_mapping.tolist() == slots
    assert inputs.meta.query_starts.tolist() == [0, *(last + 1 for last in last_rows)]
    assert inputs.meta.context_lens.tolist() == context_lens
    assert inputs.meta.max_query_len == max(count for _, _, count, _ in spelt)
    assert inputs.meta.max_context_len == max(context_lens)
    for table, row, length in zip(inputs.meta.block_tables.tolist(), chosen, context_lens, strict=True):
        num_blocks = -(-length // BLOCK_SIZE)
        assert table[:num_blocks] == list(row.block_ids[:num_blocks])

    sampled = [number for number, (*_, is_sampled) in enumerate(spelt) if is_sampled]
    is_all = len(sampled) == len(ids)
    assert (inputs.logits_rows is None) == is_all
    if inputs.logits_rows is not None:
        assert inputs.logits_rows.tolist() == [last_rows[number] for number in sampled]
    assert inputs.sampled_ids == [spelt[number][0] for number in sampled]
    assert inputs.sampling.positions.tolist() == [context_lens[number] for number in sampled]
    assert inputs.sampling.seeds.tolist() == [chosen[number].seed for number in sampled]
    assert inputs.sampling.top_k.tolist() == [chosen[number].sampling.top_k for number in sampled]
    wanted = torch.tensor([chosen[number].sampling.temperature for number in sampled], dtype=torch.float32)
    assert torch.equal(inputs.sampling.temperature, wanted)


def test_a_drawn_token_is_the_next_step_s_input() -> None:
    """And a token that could not be drawn is not written."""
    batch = InputBatch(max_num_seqs=2, max_model_len=16, block_size=BLOCK_SIZE, device=torch.device("cpu"))
    sampling = SamplingParams(temperature=0)
    for seq_id, block in (("a", 1), ("b", 0)):
        batch.add(NewRow(seq_id, (5, 6, 7), 3, sampling, 0, (block,)))
    inputs = batch.prepare(make_chunks(("b", 0, 3, True), ("a", 1, 2, True)))
    batch.append_sampled(inputs, torch.tensor([-1, 42]).numpy())
    following = batch.prepare(make_chunks(("a", 3, 1, True), ("b", 3, 1, True)))
    assert following.input_ids.tolist() == [42, 0]
    assert following.slot_mapping.tolist() == [11, 3]


class TooShort(DecodeShapes):
    """Finds a shape that doesn't hold the longest sequence."""

    def find(self, num_seqs: int, max_context_len: int) -> DecodeShape | None:
        return DecodeShape(num_seqs, max_context_len - 1)


def test_a_sequence_longer_than_what_its_step_is_padded_to_stops_the_step() -> None:
    """A graph's launches are made for so many keys; on the device nobody looks."""
    batch = InputBatch(2, 16, BLOCK_SIZE, torch.device("cpu"), shapes=TooShort((1, 2), (16,)))
    batch.add(NewRow("a", (5, 6, 7), 3, SamplingParams(temperature=0), 0, (1,)))
    with pytest.raises(AssertionError, match="3 tokens of a sequence pass the 2 of DecodeShape"):
        batch.prepare(make_chunks(("a", 2, 1, True)))
