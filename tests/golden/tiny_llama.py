"""Tiny random Llamas: one set of weights in transformers, the oracle, and in our decoder."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from model.config import ModelConfig, RopeConfig
from tests.unit.model_runner.driver import DrivenSequence

TOLERANCE = 1e-4
"""Of logits. Where the two largest are closer, the token may be either."""


def build(
    *,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    tied: bool = True,
    biases: bool = False,
    rope: dict[str, Any] | None = None,
    max_positions: int = 256,
    seed: int = 0,
) -> tuple[LlamaForCausalLM, ModelConfig]:
    """The oracle with random weights, and our configuration of the same model."""
    torch.manual_seed(seed)
    rope = {"rope_type": "default", "rope_theta": 10000.0, **(rope or {})}
    oracle = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=199,
            hidden_size=num_heads * 16,
            intermediate_size=72,
            num_hidden_layers=3,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rms_norm_eps=1e-5,
            tie_word_embeddings=tied,
            attention_bias=biases,
            mlp_bias=biases,
            rope_parameters=dict(rope),
            initializer_range=0.2,
            attn_implementation="eager",
        )
    ).eval()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    params = {key: value for key, value in rope.items() if key not in ("rope_type", "rope_theta")}
    config = ModelConfig(
        vocab_size=199,
        hidden_size=num_heads * 16,
        intermediate_size=72,
        num_layers=3,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        qkv_bias=biases,
        o_bias=biases,
        mlp_bias=biases,
        rope=RopeConfig(theta=rope["rope_theta"], kind=rope["rope_type"], params=params),
    )
    return oracle, config


def weights_of(oracle: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the oracle's tensors under their Hugging Face names."""
    return {name: tensor.detach().clone() for name, tensor in oracle.state_dict().items()}


@torch.inference_mode()
def check_against(oracle: Any, sequence: DrivenSequence) -> None:
    """Every logits row of a driven sequence equals the oracle's, and every drawn token is the oracle's argmax."""
    token_ids = torch.tensor([sequence.token_ids])
    expected = oracle(token_ids).logits[0, sequence.num_prompt_tokens - 1 : -1]
    check_rows(expected, sequence)


def check_rows(expected: torch.Tensor, sequence: DrivenSequence) -> None:
    """As `check_against`, with the oracle's logits [num_drawn, vocab_size] given."""
    assert len(sequence.logits) == len(sequence.drawn) == len(expected) > 0
    torch.testing.assert_close(torch.stack(sequence.logits), expected, rtol=0, atol=TOLERANCE)
    best = expected.topk(2, dim=-1)
    is_close = best.values[:, 0] - best.values[:, 1] < TOLERANCE
    is_equal = best.indices[:, 0] == torch.tensor(sequence.drawn)
    assert bool((is_equal | is_close).all())
