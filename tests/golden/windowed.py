"""Tiny random checkpoints whose layers attend over sliding windows, and transformers' own reading of them."""

from pathlib import Path
from typing import Any, Final

import torch

from tests.tiny_checkpoint import write_tiny_checkpoint

WINDOW: Final = 24
# Layers with and without a window in turn, from either.
MIXED: Final = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]

CASES: Final[dict[str, dict[str, Any]]] = {
    "Mistral, all layers": {"architectures": ["MistralForCausalLM"], "model_type": "mistral"},
    "Ministral, some layers": {
        "architectures": ["MinistralForCausalLM"],
        "model_type": "ministral",
        "layer_types": MIXED,
    },
    "Qwen2, from layer 1 on": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
    "Qwen2, some layers": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": True,
        "layer_types": MIXED,
    },
}


def write_windowed(folder: Path, seed: int = 0, **changes: Any) -> tuple[Path, Any]:
    """(the checkpoint folder, transformers' model of it in float32) with random weights, biases where there are any.

    As large a vocabulary as the tokenizer's, since ids beyond are never drawn here.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {"vocab_size": 259, "num_hidden_layers": 4, "sliding_window": WINDOW, "max_position_embeddings": 512}
    write_tiny_checkpoint(folder, **values | changes)
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(folder)
    config.initializer_range = 0.2
    oracle = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    written = (folder / "config.json").read_text()
    oracle.save_pretrained(folder)
    (folder / "config.json").write_text(written)  # as a checkpoint says it, not with every default spelt out
    oracle.generation_config.eos_token_id = None
    oracle.generation_config.pad_token_id = 0
    return folder, oracle
