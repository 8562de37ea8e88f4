"""Seeds and whole-prompt hits on a real engine: the same draws wherever a sequence is computed."""

import random

import pytest

from scheduler.output import SequenceStats
from scheduler.sampling_params import SamplingParams
from tests.tiny_checkpoint import write_tiny_checkpoint
from worker.engine import Engine, EngineRequest
from worker.engine_builder import build_engine
from worker.engine_config import EngineConfig

NUM_NEW_TOKENS = 32


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    config = EngineConfig(
        str(folder), max_model_len=256, num_kv_blocks=200, num_threads=1, check_invariants="step", max_num_seqs=8
    )
    return build_engine(config)[0]


def prompt_of(num_tokens: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(256) for _ in range(num_tokens))


def drawn(engine: Engine, *prompts: tuple[int, ...], seed: int = 7) -> list[list[int]]:
    """The tokens of each prompt, all in one batch and of one seed."""
    sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    tokens: dict[str, list[int]] = {f"{number}": [] for number in range(len(prompts))}
    for seq_id, prompt in zip(tokens, prompts, strict=True):
        engine.add(EngineRequest(seq_id, prompt, sampling, seed=0))
    while engine.has_work:
        for output in engine.step():
            tokens[output.seq_id] += output.new_token_ids
    return list(tokens.values())


def test_one_seed_draws_one_text_again_and_in_two_rows_of_a_batch(engine: Engine) -> None:
    prompt = prompt_of(20, 1)
    (first,) = drawn(engine, prompt)
    assert drawn(engine, prompt) == [first]
    assert drawn(engine, prompt, prompt_of(9, 2), prompt)[::2] == [first, first]
    assert drawn(engine, prompt, seed=8) != [first]


def test_a_seed_is_not_started_anew_at_each_token(engine: Engine) -> None:
    (tokens,) = drawn(engine, prompt_of(20, 1))
    assert len(set(tokens)) > NUM_NEW_TOKENS // 2


def test_a_prompt_of_whole_blocks_that_is_all_cached_computes_a_token_and_draws_the_same(engine: Engine) -> None:
    """Again after a preemption in its midst, when its own blocks are found."""
    prompt = prompt_of(64, 3)
    assert len(prompt) % engine.scheduler.kv.block_size == 0
    expected = run_preempted(engine, prompt, steps_before=None)
    assert expected[1].num_cached_tokens == 0
    # After 9 steps 72 tokens were computed, of which 64 lie in full blocks.
    for steps_before, num_recomputed in ((None, 0), (1, 0), (9, 8)):
        tokens, stats = run_preempted(engine, prompt, steps_before)
        assert tokens == expected[0]
        assert stats.num_cached_tokens == 48
        assert (stats.num_preemptions > 0) == (steps_before is not None)
        assert stats.num_recomputed_tokens == num_recomputed


def run_preempted(engine: Engine, prompt: tuple[int, ...], steps_before: int | None) -> tuple[list[int], SequenceStats]:
    """Greedily beside a leader, preempted after so many steps; the tokens, and what it has cost."""
    greedy = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    engine.add(EngineRequest("leader", (1, 2, 3), SamplingParams(max_tokens=100, ignore_eos=True), seed=0))
    engine.step()
    engine.add(EngineRequest("a", prompt, greedy, seed=0))
    tokens: list[int] = []
    stats = None
    step = 0
    while stats is None:
        for output in engine.step():
            if output.seq_id == "a":
                tokens += output.new_token_ids
                stats = output.stats or stats
        step += 1
        if step == steps_before:
            assert engine.scheduler.preempt("a")
    engine.abort("leader")
    while engine.has_work:
        engine.step()
    return tokens, stats
