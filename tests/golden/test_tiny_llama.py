"""Our decoder and runner against transformers, on the same random weights in float32."""

import random
from typing import Any

import pytest

from tests.golden.tiny_llama import build, check_against, weights_of
from tests.unit.model_runner.driver import Driver, random_prompt

SHAPES: dict[str, dict[str, Any]] = {
    "group 1, head 16, untied": {"num_heads": 4, "num_kv_heads": 4, "head_dim": 16, "tied": False},
    "group 3, head 64, tied": {"num_heads": 3, "num_kv_heads": 1, "head_dim": 64},
    "group 3, head 80, untied, biases": {
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 80,
        "tied": False,
        "biases": True,
    },
    "group 4, head 16, tied, biases": {"num_heads": 8, "num_kv_heads": 2, "head_dim": 16, "biases": True},
    "group 4, head 64, untied": {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "tied": False},
    "group 1, head 80, tied": {"num_heads": 3, "num_kv_heads": 3, "head_dim": 80},
}
NUM_NEW_TOKENS = 12

shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def shuffled(num_blocks: int, rng: random.Random) -> list[int]:
    """Physical blocks in the order in which they are handed out."""
    return rng.sample(range(num_blocks), num_blocks)


@shapes
def test_one_sequence_gives_the_logits_and_tokens_of_transformers(shape: dict[str, Any]) -> None:
    """A prompt computed whole, then tokens one by one."""
    oracle, config = build(**shape)
    driver = Driver(config, weights_of(oracle))
    sequence = driver.add("a", random_prompt(37, config.vocab_size, random.Random(1)))
    driver.decode(NUM_NEW_TOKENS)
    check_against(oracle, sequence)


@shapes
def test_a_ragged_batch_gives_each_sequence_what_it_gets_alone(shape: dict[str, Any]) -> None:
    """Prompts cut anywhere and mixed with decodes, in shuffled blocks."""
    oracle, config = build(**shape)
    rng = random.Random(2)
    driver = Driver(config, weights_of(oracle), block_ids=shuffled(64, rng))
    sequences = [
        driver.add(f"s{length}", random_prompt(length, config.vocab_size, rng)) for length in (1, 2, 8, 17, 31, 70)
    ]
    driver.decode_raggedly(NUM_NEW_TOKENS, rng)
    for sequence in sequences:
        check_against(oracle, sequence)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_every_block_size_gives_the_same(block_size: int) -> None:
    """Contexts that end before, at and after the end of a block."""
    oracle, config = build()
    rng = random.Random(block_size)
    driver = Driver(config, weights_of(oracle), block_size=block_size, block_ids=shuffled(64, rng))
    lengths = (block_size - 1, block_size, block_size + 1, 2 * block_size)
    sequences = [driver.add(f"s{length}", random_prompt(length, config.vocab_size, rng)) for length in lengths]
    driver.decode(NUM_NEW_TOKENS)
    for sequence in sequences:
        check_against(oracle, sequence)


def test_a_prompt_may_be_cut_anywhere() -> None:
    """All cuts in two, and some in many."""
    oracle, config = build(num_heads=8, num_kv_heads=2)
    rng = random.Random(3)
    driver = Driver(config, weights_of(oracle), block_ids=shuffled(64, rng))
    prompt = random_prompt(21, config.vocab_size, rng)
    cuts = [[cut, 21 - cut] for cut in range(1, 21)] + [[1] * 21, [3] * 7, [8, 8, 5], [5, 7, 1, 8]]
    for number, cut in enumerate(cuts):
        sequence = driver.add(f"s{number}", prompt)
        for num_tokens in cut:
            driver.step({f"s{number}": num_tokens})
        driver.decode(2)
        check_against(oracle, sequence)
        driver.remove(f"s{number}")


def test_two_sequences_share_the_blocks_of_a_prefix() -> None:
    """The second computes only what follows the prefix, while the first goes on."""
    oracle, config = build()
    rng = random.Random(4)
    driver = Driver(config, weights_of(oracle), block_ids=shuffled(64, rng))
    prefix = random_prompt(24, config.vocab_size, rng)
    first = driver.add("first", prefix + random_prompt(5, config.vocab_size, rng))
    driver.decode(3)
    second = driver.add(
        "second", prefix + random_prompt(9, config.vocab_size, rng), shared_block_ids=first.block_ids[:3]
    )
    driver.decode(NUM_NEW_TOKENS)
    check_against(oracle, first)
    check_against(oracle, second)
