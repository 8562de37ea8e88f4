"""Steps that are launched before the one before was collected: drawn ids go from one to the next on the device."""

import pytest

from model.model_runner import ModelRunner, RunnerConfig
from scheduler.output import NO_CHUNKS, Chunks, NewRow, RowToken, SchedulerOutput
from scheduler.sampling_params import SamplingParams
from tests.unit.chunks import make_chunks
from tests.unit.model_runner.driver import GREEDY, Driver
from tests.unit.model_runner.test_model_runner import CONFIG, PROMPTS, WARM, WEIGHTS, alone


def make_runner(max_num_seqs: int = 4) -> ModelRunner:
    """Blocks of 8 tokens."""
    return Driver(CONFIG, WEIGHTS, runner=RunnerConfig(max_num_seqs=max_num_seqs, max_model_len=64)).runner


def new_row(
    seq_id: str, prompt: list[int], block_ids: tuple[int, ...], sampling: SamplingParams = GREEDY, seed: int = 0
) -> NewRow:
    return NewRow(seq_id, tuple(prompt), len(prompt), sampling, seed, block_ids)


def step_of(number: int, chunks: Chunks, *new_rows: NewRow, removed_ids: tuple[str, ...] = ()) -> SchedulerOutput:
    return SchedulerOutput(step=number, chunks=chunks, new_rows=new_rows, removed_ids=removed_ids)


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "drawn"])
def test_a_drawn_id_reaches_the_next_step_before_the_host_knows_it(sampling: SamplingParams) -> None:
    """A prompt ends beside a piece of another, and the order of the two changes."""
    runner, prompt, other = make_runner(), PROMPTS[1], PROMPTS[2]
    assert (len(prompt), len(other)) == (8, 21)
    first = runner.launch(
        step_of(
            1,
            make_chunks(("other", 0, 5, False), ("a", 0, 8, True)),
            new_row("other", other, (0, 1, 2)),
            new_row("a", prompt, (3, 4), sampling, seed=5),
        )
    )
    second = runner.launch(step_of(2, make_chunks(("a", 8, 1, True), ("other", 5, 16, True))))
    drawn = [runner.collect(first).sampled["a"]]
    third = runner.launch(step_of(3, make_chunks(("other", 21, 1, True), ("a", 9, 1, True))))
    drawn += [runner.collect(pending).sampled["a"] for pending in (second, third)]
    assert drawn == alone(prompt, sampling, seed=5)[:3]


@pytest.mark.parametrize("num_first", [9, 5])
def test_a_row_that_has_changed_hands_gets_nothing_of_its_former_owner(num_first: int) -> None:
    """What it had drawn would lie at the end of the new one's prompt: read at once, or after the host has it."""
    runner, prompt = make_runner(max_num_seqs=1), PROMPTS[2][:9]
    first = runner.launch(step_of(1, make_chunks(("a", 0, 8, True)), new_row("a", PROMPTS[1], (0, 1))))
    is_all = num_first == 9
    chunks = make_chunks(("b", 0, num_first, is_all))
    second = runner.launch(step_of(2, chunks, new_row("b", prompt, (2, 3)), removed_ids=("a",)))
    assert list(runner.collect(first).sampled) == ["a"]
    drawn = list(runner.collect(second).sampled.values())
    if not is_all:
        drawn += runner.execute(step_of(3, make_chunks(("b", 5, 4, True)))).sampled.values()
    assert drawn == alone(prompt)[:1]


def test_a_token_that_was_chosen_for_a_row_counts_and_not_what_was_drawn() -> None:
    """As for the beams of a search, whose next step is launched when all is known of the one before."""
    runner, prompt = make_runner(), PROMPTS[1]
    (drawn,) = runner.execute(step_of(1, make_chunks(("a", 0, 8, True)), new_row("a", prompt, (0, 1)))).sampled.values()
    chosen = (drawn + 1) % CONFIG.vocab_size
    output = SchedulerOutput(2, make_chunks(("a", 8, 1, True)), row_tokens=(RowToken("a", 8, chosen),))
    assert list(runner.execute(output).sampled.values()) == alone([*prompt, chosen])[:1] != alone([*prompt, drawn])[:1]


def test_a_step_that_computes_nothing_can_be_in_flight() -> None:
    runner = make_runner(max_num_seqs=1)
    first = runner.launch(step_of(1, make_chunks(("a", 0, 8, True)), new_row("a", PROMPTS[1], (0, 1))))
    second = runner.launch(step_of(2, NO_CHUNKS, removed_ids=("a",)))
    assert runner.collect(first).sampled == {"a": alone(PROMPTS[1])[0]}
    assert runner.collect(second).sampled == {}
