"""The whole engine on the device: greedy tokens of `transformers`, and the same with graphs, without, and swapped."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from scheduler.sampling_params import SamplingParams
from tests.golden.reference import NUM_NEW_TOKENS, Continuation, continue_greedily
from tests.golden.swapped_runs import run_swapped
from tests.golden.windowed import CASES, WINDOW, write_windowed
from tests.tiny_checkpoint import write_tiny_checkpoint
from worker.llm import LLM

pytestmark = pytest.mark.gpu

NEAR_TIE = 1e-4
LENGTHS = [1, 15, 16, 17, 31, 33, 48, 65, 90, 128]
SEED = 1
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), vocab_size=259)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Continuation]:
    """What transformers makes of each prompt, in float32 on the CPU."""
    from transformers import LlamaForCausalLM

    oracle = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    oracle.generation_config.eos_token_id = None
    oracle.generation_config.pad_token_id = 0
    rng = random.Random(SEED)
    prompts = {f"of {length}": [rng.randrange(256) for _ in range(length)] for length in LENGTHS}
    made = {name: continue_greedily(oracle, prompt) for name, prompt in prompts.items()}
    assert all(min(each.gaps) > NEAR_TIE for each in made.values()), f"seed {SEED} has a near tie: take another"
    return made


def generate(folder: Path, device: torch.device, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    options = {**options, "dtype": "float32", "num_kv_blocks": 400, "max_num_seqs": 16}
    with LLM(str(folder), device=device.type, cache_dir=folder, **options) as llm:
        if device.type == "cuda":
            assert (llm.info.num_cuda_graphs > 0) is options.get("cuda_graphs", True), "decodes are captured"
        made = llm.generate(list(prompts), GREEDY)
    return [list(completion.token_ids) for completion in made]


@pytest.mark.parametrize("overlaps", [True, False], ids=["overlapping", "one by one"])
@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "eager"])
def test_all_prompts_at_once_give_the_tokens_of_transformers(
    device: torch.device, folder: Path, expected: dict[str, Continuation], cuda_graphs: bool, overlaps: bool
) -> None:
    prompts = [each.prompt_ids for each in expected.values()]
    made = generate(folder, device, prompts, cuda_graphs=cuda_graphs, overlap_scheduling=overlaps)
    assert made == [each.ids for each in expected.values()]


def test_prompts_in_small_pieces_give_the_same(
    device: torch.device, folder: Path, expected: dict[str, Continuation]
) -> None:
    prompts = [each.prompt_ids for each in expected.values()]
    made = generate(folder, device, prompts, max_num_batched_tokens=16)
    assert made == [each.ids for each in expected.values()]


def test_sequences_that_are_swapped_every_few_tokens_give_the_same(
    device: torch.device, folder: Path, expected: dict[str, Continuation]
) -> None:
    prompts = {name: each.prompt_ids for name, each in expected.items()}
    options: dict[str, Any] = {"device": device.type, "dtype": "float32", "cache_dir": folder}
    run = run_swapped(str(folder), prompts, NUM_NEW_TOKENS, num_kv_blocks=60, num_swap_blocks=200, **options)
    run.check()
    assert run.ids == {name: each.ids for name, each in expected.items()}


@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "eager"])
def test_sliding_windows_that_are_outgrown_give_the_tokens_of_transformers(
    device: torch.device, tmp_path: Path, cuda_graphs: bool
) -> None:
    windowed, oracle = write_windowed(tmp_path, seed=SEED, **CASES["Qwen2, some layers"])
    rng = random.Random(SEED)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (1, WINDOW - 1, WINDOW + 1, 90)]
    expected = [continue_greedily(oracle, prompt) for prompt in prompts]
    assert all(min(each.gaps) > NEAR_TIE for each in expected), f"seed {SEED} has a near tie: take another"
    assert generate(windowed, device, prompts, cuda_graphs=cuda_graphs) == [each.ids for each in expected]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_overlapping_steps_draw_the_tokens_that_steps_one_by_one_draw(
    device: torch.device, folder: Path, dtype: str
) -> None:
    """Of random weights in the shapes of a real model; batches of all sizes as sequences end.

    With graphs, and kernel by kernel. Between the two, batches are padded or not, for which a product in half precision
    may take another order of sums: nearly all of the first tokens that a graph computes are the same, not every one.
    """
    model = "SmolLM2-135M" if device.type == "cuda" else str(folder)
    rng = random.Random(SEED)
    prompts = [[rng.randrange(200) for _ in range(rng.randrange(1, 90))] for _ in range(13)]
    params = [SamplingParams(temperature=0, max_tokens=5 + 3 * n, ignore_eos=True) for n in range(13)]
    params[4] = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=40, ignore_eos=True)
    penalties: dict[str, Any] = {"repetition_penalty": 1.3, "frequency_penalty": 0.2}
    params[5] = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, **penalties)
    second = []
    for cuda_graphs in (True, False):
        made = []
        for overlaps in (True, False):
            options: dict[str, Any] = {"load_format": "dummy", "dtype": dtype, "cuda_graphs": cuda_graphs}
            options["overlap_scheduling"] = overlaps
            with LLM(model, device=device.type, cache_dir=folder, num_kv_blocks=400, max_num_seqs=13, **options) as llm:
                made.append([completion.token_ids for completion in llm.generate(prompts, params)])
        assert made[0] == made[1]
        assert any(len(set(ids)) > 3 for ids in made[0])
        second.append([ids[:2] for ids in made[0]])
    assert sum(one == other for one, other in zip(*second, strict=True)) >= 10
