"""Beam search through the whole engine: the ids that transformers' generate(num_beams=...) finds."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from scheduler.sampling_params import EarlyStopping
from tests.golden.reference import load_oracle, load_reference
from tests.tiny_checkpoint import write_tiny_checkpoint
from worker import LLM, SamplingParams

MAX_TOKENS = 24
PROMPTS = [list(range(60, 75)), [7, 8, 9], [200 - i for i in range(33)], [65] * 16]
# Byte tokens that the tiny model says often enough, so that hypotheses end on the way.
ENDS = [258, 33, 120]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # As large as the tokenizer's, since transformers gives ids beyond it a share of the probability.
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), eos_token_id=ENDS, vocab_size=259)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Any:
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), num_kv_blocks=400, num_threads=1, check_invariants="step") as made:
        yield made


def search_by_oracle(
    model: Any, prompt: list[int], params: SamplingParams, ends: list[int]
) -> list[tuple[list[int], float]]:
    """Ids and score of each hypothesis, the best first."""
    inputs = torch.tensor([prompt])
    made = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        num_beams=params.beam_width,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=params.max_tokens,
        eos_token_id=ends,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = []
    for row, score in zip(made.sequences, made.sequences_scores, strict=True):
        ids = row[len(prompt) :].tolist()
        end = next((at + 1 for at, token in enumerate(ids) if token in ends), len(ids))
        found.append((ids[:end], float(score)))
    return found


def check(completion: Any, expected: list[tuple[list[int], float]]) -> None:
    assert [list(choice.token_ids) for choice in completion.choices] == [ids for ids, _ in expected]
    for choice, (ids, score) in zip(completion.choices, expected, strict=True):
        assert choice.score == pytest.approx(score, rel=1e-5)  # the oracle adds up in float32
        assert str(choice.finish_reason) == ("eos" if ids[-1] in ENDS else "length")


@pytest.mark.parametrize(
    ("width", "early_stopping", "length_penalty"),
    [
        (2, False, 1.0), (2, True, 0.0), (2, "never", -0.5),
        (4, False, 0.0), (4, True, 1.0), (4, "never", 2.0), (4, False, -0.5),
        (16, False, 1.0), (16, True, 2.0), (16, "never", 0.0),
    ],
)  # fmt: skip
def test_the_tiny_model_finds_the_hypotheses_of_transformers(
    llm: LLM, oracle: Any, width: int, early_stopping: EarlyStopping, length_penalty: float
) -> None:
    params = SamplingParams(
        beam_width=width, n=2, length_penalty=length_penalty, early_stopping=early_stopping, max_tokens=MAX_TOKENS
    )
    completions = llm.generate(PROMPTS, params)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        check(completion, search_by_oracle(oracle, prompt, params, ENDS))


def test_the_compared_hypotheses_end_in_both_ways(llm: LLM) -> None:
    params = [
        SamplingParams(beam_width=4, n=4, length_penalty=penalty, max_tokens=MAX_TOKENS) for penalty in (-0.5, 2.0)
    ]
    completions = [completion for each in params for completion in llm.generate(PROMPTS, each)]
    reasons = {str(choice.finish_reason) for completion in completions for choice in completion.choices}
    assert reasons == {"eos", "length"}


def test_one_beam_is_the_greedy_search_of_transformers(llm: LLM, oracle: Any) -> None:
    params = SamplingParams(beam_width=1, temperature=0, max_tokens=MAX_TOKENS)
    for prompt, completion in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
        inputs = torch.tensor([prompt])
        made = oracle.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=ENDS,
            pad_token_id=0,
        )
        assert list(completion.token_ids) == made[0, len(prompt) :].tolist()


def test_preempted_and_swapped_beams_find_the_same(checkpoint: Path, llm: LLM) -> None:
    """With pools that hold one search of them; the first one is never preempted."""
    params = SamplingParams(beam_width=4, n=4, max_tokens=MAX_TOKENS, ignore_eos=True)
    expected = [completion.choices for completion in llm.generate(PROMPTS, params)]
    for mode in ("recompute", "swap"):
        options: dict[str, Any] = {"preemption_mode": mode, "num_swap_blocks": 100, "block_size": 8}
        with LLM(str(checkpoint), num_kv_blocks=24, num_threads=1, check_invariants="step", **options) as small:
            found = small.generate(PROMPTS, params)
            stats = small.engine.stats()
        assert [[choice.token_ids for choice in completion.choices] for completion in found] == [
            [choice.token_ids for choice in choices] for choices in expected
        ]
        assert (stats.num_preemptions_swap > 0, stats.num_preemptions_recompute > 0) == (mode == "swap", mode != "swap")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("width", "length_penalty"), [(4, 1.0), (3, 0.0)])
def test_the_demo_model_finds_the_hypotheses_of_transformers(
    demo_model_path: Path, width: int, length_penalty: float
) -> None:
    """Of prompts whose reference is short; an end of sequence ends a hypothesis."""
    oracle = load_oracle(demo_model_path)
    params = SamplingParams(beam_width=width, n=width, length_penalty=length_penalty, max_tokens=24)
    prompts = sorted((made.prompt_ids for made in load_reference().values()), key=len)[:3]
    with LLM(str(demo_model_path), num_kv_blocks=256) as llm:
        completions = llm.generate(prompts, params)
        ends = sorted(llm.engine.scheduler.config.eos_token_ids)
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = search_by_oracle(oracle, prompt, params, ends)
        assert [list(choice.token_ids) for choice in completion.choices] == [ids for ids, _ in expected]
        for choice, (_, score) in zip(completion.choices, expected, strict=True):
            assert choice.score == pytest.approx(score, rel=1e-4)
