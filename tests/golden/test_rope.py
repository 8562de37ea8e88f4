"""Rotary tables against transformers' own functions, and whole models for the kinds that depend on the context."""

import random
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, Phi3Config, Phi3ForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from model.config import ModelConfig, RopeConfig
from model.errors import UnsupportedModelError
from model.rope import cos_sin_table, inverse_frequencies
from tests.golden.tiny_llama import build, check_against, check_rows, weights_of
from tests.unit.model_runner.driver import Driver, random_prompt, tiny_config

PAIRS = 8
SHORT, LONG = [1.0 + 0.1 * i for i in range(PAIRS)], [2.0 + 0.7 * i for i in range(PAIRS)]
KINDS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "linear", "factor": 2.5, "partial_rotary_factor": 0.5},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 16, "beta_slow": 2},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "truncate": False,
    },
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 1.3},
    {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 64},
    {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": 64,
        "factor": 16.0,
        "attention_factor": 1.1,
    },
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
]


def config_with(rope: dict[str, Any], **changes: Any) -> ModelConfig:
    """Our configuration for the parameters that config.json would hold."""
    params = {key: value for key, value in rope.items() if key not in ("rope_type", "partial_rotary_factor")}
    partial = rope.get("partial_rotary_factor", 1.0)
    return tiny_config(rope=RopeConfig(5000.0, rope["rope_type"], params, partial), **changes)


@pytest.mark.parametrize("rope", KINDS, ids=lambda rope: "-".join(str(v) for v in rope.values())[:40])
@pytest.mark.parametrize("num_positions", [48, 256, 700])
def test_inverse_frequencies_are_those_of_transformers(rope: dict[str, Any], num_positions: int) -> None:
    """For contexts below and above the trained length."""
    oracle = LlamaConfig(
        hidden_size=96,
        num_attention_heads=6,
        head_dim=16,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 5000.0, **rope},
    )
    expected, expected_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](oracle, torch.device("cpu"), num_positions)
    frequencies, factor = inverse_frequencies(config_with(rope, max_position_embeddings=256), num_positions)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=1e-9)
    assert factor == pytest.approx(expected_factor, rel=1e-9)


@pytest.mark.parametrize("rope", KINDS[3:], ids=lambda rope: "-".join(str(v) for v in rope.values())[:40])
def test_a_model_of_each_kind_gives_the_logits_of_transformers(rope: dict[str, Any]) -> None:
    """Attention factors reach the scores; a prompt of 90 tokens is past the trained 64."""
    oracle, config = build(rope=rope, max_positions=256)
    driver = Driver(config, weights_of(oracle))
    sequence = driver.add("a", random_prompt(90, config.vocab_size, random.Random(5)))
    driver.decode(6)
    check_against(oracle, sequence)


@torch.inference_mode()
def test_dynamic_scaling_decodes_as_transformers_does_past_the_trained_length() -> None:
    """Each new token is rotated with the base of the context that ends at it; cached keys keep theirs."""
    oracle, config = build(rope={"rope_type": "dynamic", "factor": 2.0}, max_positions=32)
    driver = Driver(config, weights_of(oracle), max_positions=64)
    sequence = driver.add("a", random_prompt(20, config.vocab_size, random.Random(6)))
    driver.decode(40)
    cache = DynamicCache()
    expected = [oracle(torch.tensor([sequence.token_ids[:20]]), cache=cache).logits[0, -1]]
    expected += [oracle(torch.tensor([[token_id]]), cache=cache).logits[0, -1] for token_id in sequence.drawn[:-1]]
    check_rows(torch.stack(expected), sequence)


def test_a_part_of_each_head_can_be_rotated() -> None:
    """Phi-3 is a Llama whose projections are stored fused and whose heads are rotated in part."""
    torch.manual_seed(7)
    rope = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}
    oracle = Phi3ForCausalLM(
        Phi3Config(
            vocab_size=199,
            hidden_size=96,
            intermediate_size=72,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=256,
            original_max_position_embeddings=256,
            rms_norm_eps=1e-5,
            rope_parameters=rope,
            initializer_range=0.2,
            pad_token_id=0,
        )
    ).eval()
    weights = weights_of(oracle)
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        query, key, value = torch.split(weights.pop(f"{prefix}.self_attn.qkv_proj.weight"), [96, 32, 32])
        gate, up = weights.pop(f"{prefix}.mlp.gate_up_proj.weight").chunk(2)
        parts = {"self_attn.q": query, "self_attn.k": key, "self_attn.v": value, "mlp.gate": gate, "mlp.up": up}
        weights.update({f"{prefix}.{name}_proj.weight": tensor for name, tensor in parts.items()})
    config = config_with(rope, hidden_size=96, intermediate_size=72, max_position_embeddings=256)
    driver = Driver(config, weights)
    sequence = driver.add("a", random_prompt(40, config.vocab_size, random.Random(7)))
    driver.decode(8)
    check_against(oracle, sequence)


def test_an_unknown_kind_is_refused_by_name() -> None:
    """The message lists what is known."""
    with pytest.raises(UnsupportedModelError, match=r"'spiral'.*known are default, dynamic.*yarn"):
        cos_sin_table(config_with({"rope_type": "spiral"}), 32, torch.device("cpu"))


def test_a_kind_without_its_numbers_is_refused_by_name() -> None:
    """The message names the missing key."""
    with pytest.raises(UnsupportedModelError, match=r"'llama3' lacks 'low_freq_factor'"):
        cos_sin_table(config_with({"rope_type": "llama3", "factor": 2.0}), 32, torch.device("cpu"))


def test_longrope_needs_one_factor_for_each_pair() -> None:
    """Not the factors of another head size."""
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0],
        "long_factor": [1.0],
        "original_max_position_embeddings": 64,
    }
    with pytest.raises(UnsupportedModelError, match="1 factors where the head has 8 pairs"):
        cos_sin_table(config_with(rope), 32, torch.device("cpu"))
