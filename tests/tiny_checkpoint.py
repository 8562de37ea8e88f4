"""A tiny random Llama with a byte-level tokenizer and a chat template, written as a checkpoint folder.

It answers nonsense, but through every real part: files, tokenizer, decoder, KV cache. Milliseconds a step.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "torch_dtype": "float32",
}


def write_tiny_checkpoint(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write the checkpoint into `folder` and return it; `changes` replace values of config.json."""
    config = CONFIG | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"})
    )
    return folder


def _tokenizer() -> Tokenizer:
    """One token a byte, and three special ones from 256 on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    return tokenizer


def _weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]

    def random(*shape: int) -> torch.Tensor:
        # Wide enough that greedy text wanders instead of repeating one token.
        return torch.randn(shape, generator=generator).mul_(2.0 / float(shape[-1]) ** 0.5)

    weights = {
        "model.embed_tokens.weight": random(config["vocab_size"], hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": torch.ones(hidden),
            prefix + "post_attention_layernorm.weight": torch.ones(hidden),
            prefix + "self_attn.q_proj.weight": random(q_size, hidden),
            prefix + "self_attn.k_proj.weight": random(kv_size, hidden),
            prefix + "self_attn.v_proj.weight": random(kv_size, hidden),
            prefix + "self_attn.o_proj.weight": random(hidden, q_size),
            prefix + "mlp.gate_proj.weight": random(inner, hidden),
            prefix + "mlp.up_proj.weight": random(inner, hidden),
            prefix + "mlp.down_proj.weight": random(hidden, inner),
        }
    return weights
