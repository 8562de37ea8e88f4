"""The model runner over hand-made steps: rows, draws, copies, and what goes wrong by name."""

import random
from typing import Any

import pytest
import torch

from kernels import reference
from kernels.penalties import Penalties
from model.errors import RunnerInputError
from model.model_runner import RunnerConfig
from model.weights import random_weights
from scheduler.output import (
    BlockCopy,
    ModelRunnerOutput,
    NewRow,
    SchedulerOutput,
    Transfer,
    TransferResult,
)
from scheduler.sampling_params import SamplingParams
from tests.unit.chunks import make_chunks
from tests.unit.model_runner.driver import GREEDY, Driver, random_prompt, tiny_config

CONFIG = tiny_config()
WEIGHTS = random_weights(CONFIG)
NUM_NEW_TOKENS = 10
WARM = SamplingParams(temperature=1.5, top_k=50, top_p=0.95)
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": 0.4}
PENALISED = SamplingParams(temperature=0, **PENALTIES)
PENALISED_DRAWS = SamplingParams(temperature=1.2, min_p=0.01, **PENALTIES)
SAMPLINGS = pytest.mark.parametrize(
    "sampling",
    [GREEDY, WARM, PENALISED, PENALISED_DRAWS],
    ids=["greedy", "drawn", "penalised", "penalised and drawn"],
)
PROMPTS = [random_prompt(length, CONFIG.vocab_size, random.Random(length)) for length in (3, 8, 21, 33, 40)]


def alone(prompt: list[int], sampling: SamplingParams = GREEDY, seed: int = 0) -> list[int]:
    """What a prompt gives with a runner of its own."""
    driver = Driver(CONFIG, WEIGHTS)
    sequence = driver.add("a", prompt, sampling, seed)
    driver.decode(NUM_NEW_TOKENS)
    return sequence.drawn


def test_a_freed_row_serves_the_next_sequence() -> None:
    """Five sequences through two rows, the new one shorter or longer than what the row held."""
    driver = Driver(CONFIG, WEIGHTS, runner=RunnerConfig(max_num_seqs=2, max_model_len=128))
    order = [PROMPTS[4], PROMPTS[0], PROMPTS[3], PROMPTS[1], PROMPTS[2]]
    driver.add("s0", order[0])
    for number, prompt in enumerate(order[1:], 1):
        driver.add(f"s{number}", prompt)
        driver.decode(NUM_NEW_TOKENS)
        assert driver.remove(f"s{number - 1}").drawn[:NUM_NEW_TOKENS] == alone(order[number - 1])
    assert driver.remove("s4").drawn == alone(order[4])


@SAMPLINGS
def test_a_preempted_sequence_goes_on_as_if_nothing_had_happened(sampling: SamplingParams) -> None:
    """It comes back with other blocks, in another row, its tokens recomputed in chunks."""
    expected = alone(PROMPTS[2], sampling, seed=5)
    driver = Driver(CONFIG, WEIGHTS)
    sequence = driver.add("a", PROMPTS[2], sampling, seed=5)
    driver.add("b", PROMPTS[3])
    driver.decode(4)
    blocks = list(sequence.block_ids)
    driver.remove("a")
    driver.add("c", PROMPTS[4])
    driver.step({"c": len(PROMPTS[4])})
    driver.resume("a", sequence)
    while driver.num_left("a") > 1:
        driver.step({"a": min(7, driver.num_left("a")), "b": 1})
    driver.decode(NUM_NEW_TOKENS)
    assert sequence.block_ids != blocks
    assert sequence.drawn[:NUM_NEW_TOKENS] == expected


def test_a_seed_draws_the_same_tokens_in_any_row_and_batch() -> None:
    """Alone, and last among others that want other things."""
    expected = alone(PROMPTS[1], WARM, seed=-7)
    driver = Driver(CONFIG, WEIGHTS)
    for number, prompt in enumerate(PROMPTS):
        driver.add(f"s{number}", prompt, [GREEDY, WARM][number % 2], seed=number)
    sequence = driver.add("a", PROMPTS[1], WARM, seed=-7)
    driver.decode_raggedly(NUM_NEW_TOKENS, random.Random(1))
    assert sequence.drawn == expected
    assert expected != alone(PROMPTS[1], WARM, seed=8)


def test_greedy_rows_take_the_argmax_beside_rows_that_draw() -> None:
    """One pass, each row by its own wish."""
    driver = Driver(CONFIG, WEIGHTS)
    greedy = driver.add("greedy", PROMPTS[0])
    driver.add("drawn", PROMPTS[0], WARM)
    driver.decode(NUM_NEW_TOKENS)
    assert greedy.drawn == alone(PROMPTS[0])
    assert greedy.drawn == [int(logits.argmax()) for logits in greedy.logits]


def test_penalties_look_back_over_the_prompt_and_the_tokens_drawn() -> None:
    """Beside rows without any; each token is the twin's choice from the model's own logits."""
    driver = Driver(CONFIG, WEIGHTS)
    driver.add("greedy", PROMPTS[0])
    sequence = driver.add("a", PROMPTS[2], PENALISED)
    driver.add("b", PROMPTS[3], PENALISED_DRAWS)
    driver.decode(NUM_NEW_TOKENS)
    assert sequence.drawn != alone(PROMPTS[2])
    for number, token_id in enumerate(sequence.drawn):
        num_tokens = len(PROMPTS[2]) + number
        logits = sequence.logits[number].clone().unsqueeze(0)
        columns = (torch.tensor([n]) for n in (0, len(PROMPTS[2]), num_tokens))
        amounts = (torch.tensor([amount]) for amount in PENALTIES.values())
        reference.apply_penalties(logits, Penalties(torch.tensor([sequence.token_ids]), *columns, *amounts))
        assert token_id == int(logits.argmax())


def test_a_row_without_a_finite_logit_fails_alone() -> None:
    """A poisoned token makes its own sequence NaN and no other."""
    config = tiny_config(tie_word_embeddings=False)
    weights = random_weights(config)
    weights["model.embed_tokens.weight"][198] = torch.nan
    driver = Driver(config, weights, runner=RunnerConfig(16, 128, sampled_vocab_size=198))
    good = [driver.add(f"good{i}", [token % 198 for token in prompt]) for i, prompt in enumerate(PROMPTS)]
    driver.add("poisoned", [1, 198, 2])
    result = driver.step({seq_id: driver.num_left(seq_id) for seq_id in driver.sequences})
    assert list(result.failed) == ["poisoned"]
    assert "no finite logit" in result.failed["poisoned"]
    assert sorted(result.sampled) == [f"good{i}" for i in range(5)]
    driver.remove("poisoned")
    driver.decode(3)
    assert all(len(sequence.drawn) == 3 for sequence in good)


def test_ids_that_the_tokenizer_does_not_know_are_never_drawn() -> None:
    """Neither greedily nor by chance."""
    driver = Driver(CONFIG, WEIGHTS, runner=RunnerConfig(16, 128, sampled_vocab_size=5))
    greedy, drawn = driver.add("a", PROMPTS[0]), driver.add("b", PROMPTS[0], SamplingParams(temperature=50))
    driver.decode(20)
    assert max(greedy.drawn + drawn.drawn) < 5
    assert len(set(drawn.drawn)) > 1


def test_logits_of_many_rows_are_computed_in_pieces_with_the_same_result() -> None:
    """Pieces of two rows against all at once."""
    drawn = []
    for max_logits_rows in (2, 256):
        runner = RunnerConfig(max_num_seqs=16, max_model_len=128, max_logits_rows=max_logits_rows)
        driver = Driver(CONFIG, WEIGHTS, runner=runner)
        sequences = [driver.add(f"s{i}", prompt, WARM, seed=i) for i, prompt in enumerate(PROMPTS)]
        driver.decode(NUM_NEW_TOKENS)
        drawn.append([sequence.drawn for sequence in sequences])
    assert drawn[0] == drawn[1]


def test_a_copied_block_is_written_without_touching_the_other() -> None:
    """Two sequences share a half-filled block; one gets a copy before it writes."""
    driver = Driver(CONFIG, WEIGHTS)
    first = driver.add("first", PROMPTS[2])
    driver.step({"first": 20})
    second = driver.add("second", [*PROMPTS[2][:20], 7])
    copy = BlockCopy(first.block_ids[2], driver.free_blocks.pop())
    second.block_ids, second.num_computed = [*first.block_ids[:2], copy.dst], 20
    driver.step({"second": 1, "first": 1}, block_copies=(copy,))
    driver.decode(NUM_NEW_TOKENS)
    assert first.drawn == alone(PROMPTS[2])
    assert second.drawn == alone([*PROMPTS[2][:20], 7])


def test_a_sequence_survives_being_swapped_out_and_in_to_other_blocks() -> None:
    """Its old blocks are overwritten meanwhile."""
    driver = Driver(CONFIG, WEIGHTS, num_cpu_blocks=8)
    sequence = driver.add("a", PROMPTS[3])
    driver.decode(4)
    blocks = list(sequence.block_ids)
    outs = Transfer(1, tuple(BlockCopy(block, slot) for slot, block in enumerate(blocks)))
    ended = driver.runner.execute(SchedulerOutput(step=0, removed_ids=("a",), swap_outs=(outs,))).transfers
    assert ended == (TransferResult(1),)
    driver.kv_cache.blocks[blocks] = torch.nan
    sequence.block_ids = [60 - slot for slot in range(len(blocks))]
    sequence.has_row = False
    ins = Transfer(2, tuple(BlockCopy(slot, block) for slot, block in enumerate(sequence.block_ids)))
    assert driver.runner.execute(SchedulerOutput(step=0, swap_ins=(ins,))).transfers == (TransferResult(2),)
    driver.decode(NUM_NEW_TOKENS)
    assert sequence.drawn == alone(PROMPTS[3])


def test_a_step_without_chunks_only_frees_rows() -> None:
    """The scheduler may have nothing to compute."""
    driver = Driver(CONFIG, WEIGHTS, runner=RunnerConfig(max_num_seqs=1, max_model_len=128))
    driver.add("a", PROMPTS[0])
    driver.decode(1)
    assert driver.runner.execute(SchedulerOutput(step=9, removed_ids=("a",))) == ModelRunnerOutput({})
    assert driver.runner.last_forward_s == 0
    driver.add("b", PROMPTS[1])
    driver.sequences.pop("a")
    driver.decode(1)
    assert driver.runner.last_forward_s > 0


def test_warming_up_leaves_no_trace() -> None:
    """Rows are free again, and tokens are what they were."""
    driver = Driver(CONFIG, WEIGHTS, runner=RunnerConfig(max_num_seqs=1, max_model_len=128))
    driver.runner.warm_up()
    sequence = driver.add("a", PROMPTS[2])
    driver.decode(NUM_NEW_TOKENS)
    assert sequence.drawn == alone(PROMPTS[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(dtype: torch.dtype) -> None:
    """Logits of a prompt and its decodes, to the precision of the type."""
    driver = Driver(CONFIG, WEIGHTS, dtype=dtype)
    sequence = driver.add("a", PROMPTS[3])
    driver.decode(3)
    exact = Driver(CONFIG, WEIGHTS)
    expected = exact.add("a", sequence.token_ids[:-1])
    exact.step({"a": len(expected.token_ids)})
    error = (sequence.logits[-1].float() - expected.logits[-1]).norm() / expected.logits[-1].norm()
    assert error < {torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]


def row(seq_id: str, num_tokens: int, block_ids: tuple[int, ...]) -> NewRow:
    """A greedy row of zeros."""
    return NewRow(seq_id, (0,) * num_tokens, num_tokens, GREEDY, 0, block_ids)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (SchedulerOutput(1, chunks=make_chunks(("x", 0, 1, True))), "'x' has no row"),
        (SchedulerOutput(1, removed_ids=("x",)), "'x' has no row"),
        (SchedulerOutput(1, new_rows=(row("a", 4, (0,)), row("a", 4, (1,)))), "'a' already has a row"),
        (SchedulerOutput(1, new_rows=tuple(row(str(i), 4, (i,)) for i in range(3))), "all 2 rows are taken"),
        (SchedulerOutput(1, new_rows=(row("a", 33, (0,)),)), "has 33 tokens, the runner's rows 32"),
        (SchedulerOutput(1, new_rows=(row("a", 4, (0, 1, 2, 3, 4)),)), "would hold 5 blocks, its row has 4"),
        (SchedulerOutput(1, make_chunks(("a", 0, 9, True)), (row("a", 9, (0,)),)), "passes its 1 blocks of 8 tokens"),
        (SchedulerOutput(1, make_chunks(("a", 4, 0, True)), (row("a", 4, (0,)),)), "is empty"),
        (SchedulerOutput(1, swap_outs=(Transfer(1, (BlockCopy(0, 0),)),)), "no CPU tier"),
    ],
)
def test_a_step_that_does_not_fit_the_runner_is_refused_by_name(output: SchedulerOutput, message: str) -> None:
    """The error says which sequence and what is missing."""
    driver = Driver(CONFIG, WEIGHTS, runner=RunnerConfig(max_num_seqs=2, max_model_len=32))
    with pytest.raises(RunnerInputError, match=message):
        driver.runner.execute(output)
