"""What a workload costs at least, in bytes and in operations: the denominators are the machine's limits."""

from collections.abc import Sequence

from model.config import ModelConfig
from ops.bench.workload import Lengths


def num_layer_parameters(config: ModelConfig) -> int:
    """Weights of all layers' products; norms and biases are too few to matter."""
    projected = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    attention = config.hidden_size * projected + config.num_heads * config.head_dim * config.hidden_size
    return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def num_head_parameters(config: ModelConfig) -> int:
    """Weights of the product that makes logits."""
    return config.vocab_size * config.hidden_size


def step_weight_bytes(config: ModelConfig, itemsizes: tuple[float, float]) -> float:
    """Bytes of weights that every step reads, of layers and of the output layer; `itemsizes` are those of a weight.

    The few rows of an embedding table of its own are left out.
    """
    return num_layer_parameters(config) * itemsizes[0] + num_head_parameters(config) * itemsizes[1]


def slot_bytes(config: ModelConfig, itemsize: int) -> int:
    """Keys and values of one token in all layers."""
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * itemsize


def num_operations(config: ModelConfig, lengths: Sequence[Lengths]) -> int:
    """Floating-point operations that these requests need: additions and multiplications, each token computed once.

    Logits are needed only where a token is drawn. A token at position p attends to p + 1 keys.
    """
    attention_per_key = 4 * config.num_layers * config.num_heads * config.head_dim
    total = 0
    for each in lengths:
        num_tokens = each.num_slots
        total += 2 * num_layer_parameters(config) * num_tokens
        total += 2 * num_head_parameters(config) * each.num_output
        total += attention_per_key * num_tokens * (num_tokens + 1) // 2
    return total
