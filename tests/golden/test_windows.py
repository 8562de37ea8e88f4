"""Sliding windows against transformers: logits of ragged batches, and greedy tokens in every way they come about."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.dispatch import has_compiled, implementation
from model.decoder import Decoder
from model.loader import load_checkpoint, load_config
from tests.golden.reference import NUM_NEW_TOKENS, continue_greedily
from tests.golden.tiny_llama import check_against
from tests.golden.windowed import CASES, WINDOW, write_windowed
from tests.unit.engine.deterministic_runs import all_ways, check, target_of
from tests.unit.model_runner.driver import Driver, random_prompt
from worker.engine_config import EngineConfig

NEAR_TIE = 1e-4
SEED = 3

cases = pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
pytestmark = pytest.mark.filterwarnings("default")


@cases
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_ragged_batch_gives_the_logits_of_transformers(tmp_path: Path, changes: dict[str, Any], kernels: str) -> None:
    """Prompts below, at and above the window, cut anywhere, mixed with decodes, in shuffled blocks."""
    folder, oracle = write_windowed(tmp_path, **changes)
    rng = random.Random(SEED)
    checkpoint = load_checkpoint(folder)
    with implementation(kernels):
        driver = Driver(checkpoint.config, checkpoint.weights, block_ids=rng.sample(range(64), 64))
        lengths = (1, WINDOW - 1, WINDOW, WINDOW + 1, 90, 130)
        sequences = [driver.add(f"s{n}", random_prompt(n, 256, rng)) for n in lengths]
        driver.decode_raggedly(8, rng)
    for sequence in sequences:
        check_against(oracle, sequence)


@pytest.mark.skipif(not has_compiled(), reason="torch's operators make no such promise")
@cases
def test_greedy_tokens_are_those_of_transformers_however_the_engine_comes_by_them(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Alone, in a batch, behind a cached prefix, swapped and recomputed; prompts cut, and the window long outgrown."""
    folder, oracle = write_windowed(tmp_path, seed=SEED, **changes)
    prompt = [random.Random(SEED).randrange(256) for _ in range(70)]
    expected = continue_greedily(oracle, prompt)
    assert min(expected.gaps) > NEAR_TIE, f"a near tie in seed {SEED}: take another"
    config = EngineConfig(
        str(folder), max_model_len=256, num_kv_blocks=400, max_num_seqs=40, max_num_batched_tokens=60, num_threads=1,
        deterministic=True, check_invariants="step",
    )  # fmt: skip
    outcomes = all_ways(config, target_of(tuple(prompt), 0.0, NUM_NEW_TOKENS), max_prompt=60)
    check(outcomes)
    assert outcomes["alone"][0] == expected.ids


@pytest.mark.parametrize(("max_positions", "window"), [(WINDOW, None), (WINDOW + 1, WINDOW), (512, WINDOW)])
def test_a_window_that_no_position_outgrows_is_not_computed(
    tmp_path: Path, max_positions: int, window: int | None
) -> None:
    """The usual case: max_model_len ends before the window does. The kernels take the call as any other."""
    checkpoint = load_checkpoint(write_windowed(tmp_path, **CASES["Qwen2, from layer 1 on"])[0])
    decoder = Decoder(checkpoint.config, checkpoint.weights, max_positions=max_positions)
    assert [layer.attention.options.window for layer in decoder.layers] == [None, window, window, window]


@cases
def test_the_window_shows_in_the_logits(tmp_path: Path, changes: dict[str, Any]) -> None:
    """So the tests above would see one that is missing."""
    _, oracle = write_windowed(tmp_path, **changes)
    ids = torch.tensor([random_prompt(WINDOW + 20, 256, random.Random(SEED))])
    _, wide = write_windowed(tmp_path, **changes | {"sliding_window": 400})
    with torch.inference_mode():
        one, other = oracle(ids).logits[0], wide(ids).logits[0]
    torch.testing.assert_close(one[:WINDOW], other[:WINDOW], rtol=0, atol=1e-5)
    assert float((one[-1] - other[-1]).abs().max()) > 0.01


@cases
def test_the_layers_that_have_it_are_those_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder, oracle = write_windowed(tmp_path, **changes)
    kinds = getattr(oracle.config, "layer_types", ["sliding_attention"] * 4)
    assert load_config(folder).windows == tuple(WINDOW if kind == "sliding_attention" else None for kind in kinds)
