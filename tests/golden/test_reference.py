"""The stored reference is what transformers says today, and what our tokenizer makes of its prompts."""

import json
from pathlib import Path

import pytest

from model.tokenizer import Tokenizer
from tests.golden.reference import (
    NUM_NEW_TOKENS,
    REFERENCE,
    Continuation,
    continue_greedily,
    load_oracle,
    load_reference,
    recompute,
    sha256_of,
)
from tests.golden.reference_prompts import reference_prompts

NEAR_TIE = 1e-4
REMADE = ["mill-0-5", "languages-60-48", "chat-0", "science-10-127"]


@pytest.fixture(scope="module")
def reference() -> dict[str, Continuation]:
    return load_reference()


def test_the_reference_is_of_this_model_and_of_these_prompts(
    reference: dict[str, Continuation], demo_model_path: Path
) -> None:
    assert json.loads(REFERENCE.read_text())["origin"]["sha256"] == sha256_of(demo_model_path)
    prompts = reference_prompts(Tokenizer.from_checkpoint(demo_model_path))
    assert {name: made.prompt_ids for name, made in reference.items()} == prompts
    lengths = [len(ids) for ids in prompts.values()]
    assert (len(lengths), min(lengths), max(lengths)) == (32, 5, 600)
    assert all(len(made.ids) == len(made.gaps) == NUM_NEW_TOKENS for made in reference.values())


def _settled(made: Continuation) -> int:
    """Tokens before the first near tie; past it, another order of additions may rightly choose another token."""
    return next((step for step, gap in enumerate(made.gaps) if gap < NEAR_TIE), NUM_NEW_TOKENS)


@pytest.mark.filterwarnings("default")
def test_transformers_makes_four_of_them_anew(reference: dict[str, Continuation], demo_model_path: Path) -> None:
    oracle = load_oracle(demo_model_path)
    for name in REMADE:
        stored = reference[name]
        settled = _settled(stored)
        assert recompute(oracle, stored)[:settled] == stored.ids[:settled], name


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("default")
def test_transformers_generates_all_of_them_anew(reference: dict[str, Continuation], demo_model_path: Path) -> None:
    oracle = load_oracle(demo_model_path)
    for name, stored in reference.items():
        made = continue_greedily(oracle, stored.prompt_ids)
        settled = _settled(stored)
        assert made.ids[:settled] == stored.ids[:settled], name
