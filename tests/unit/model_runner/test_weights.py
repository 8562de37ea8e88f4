"""Weights and configurations that don't fit are refused by name, and sources are let go."""

import pytest
import torch

from model.decoder import Decoder
from model.errors import UnsupportedModelError, WeightsMismatchError
from model.weights import random_weights
from tests.unit.model_runner.driver import tiny_config


def test_missing_unexpected_and_mis_shaped_tensors_are_listed() -> None:
    """All in one message, each under its kind."""
    config = tiny_config()
    weights = random_weights(config)
    del weights["model.layers.1.mlp.up_proj.weight"]
    weights["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)
    weights["model.norm.weight"] = torch.ones(3)
    with pytest.raises(WeightsMismatchError) as caught:
        Decoder(config, weights)
    message = str(caught.value)
    assert "missing: model.layers.1.mlp.up_proj.weight;" in message
    assert "unexpected: model.layers.0.self_attn.q_norm.weight;" in message
    assert "model.norm.weight is [3], not [48]" in message


def test_a_long_list_is_cut() -> None:
    """A checkpoint of another kind does not fill the terminal."""
    with pytest.raises(WeightsMismatchError, match=r"missing: (\S+, ){7}\S+ and \d+ more"):
        Decoder(tiny_config(), {})


def test_what_follows_from_the_configuration_may_come_along() -> None:
    """A tied lm_head and old rotary buffers."""
    config = tiny_config(tie_word_embeddings=True)
    weights = random_weights(config)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    assert Decoder(config, weights).config is config


@pytest.mark.parametrize("tied", [True, False])
def test_a_mapping_is_emptied_while_it_is_read(tied: bool) -> None:
    """So that source and packed copy of a whole model never exist at once."""
    config = tiny_config(tie_word_embeddings=tied, qkv_bias=True, o_bias=True, mlp_bias=True)
    weights = random_weights(config)
    Decoder(config, weights)
    assert weights == {}


def test_random_weights_are_a_function_of_the_seed() -> None:
    """The same twice, another for another seed."""
    config = tiny_config()
    first, again, other = random_weights(config, 1), random_weights(config, 1), random_weights(config, 2)
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_kv_heads": 4}, "6 query heads don't divide into groups over 4"),
        ({"head_dim": 15}, "15 of 15 elements"),
        ({"num_layers": 0}, "no layers"),
    ],
)
def test_a_configuration_that_is_not_computed_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    """Before any weight is read."""
    with pytest.raises(UnsupportedModelError, match=message):
        Decoder(tiny_config(**changes), {})
