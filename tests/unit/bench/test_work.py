"""The work of a workload, counted another way."""

from pathlib import Path

import pytest
import torch

from model.loader import load_checkpoint
from ops.bench.peers.transformers_model import build_model
from ops.bench.work import num_layer_parameters, num_operations, slot_bytes, step_weight_bytes
from ops.bench.workload import Lengths
from tests.tiny_checkpoint import write_tiny_checkpoint
from worker.engine_sizes import num_parameters


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path)


def test_weights_of_a_step_are_all_but_norms(folder: Path) -> None:
    checkpoint = load_checkpoint(folder)
    matrices = sum(tensor.numel() for tensor in checkpoint.weights.values() if tensor.ndim == 2)
    assert step_weight_bytes(checkpoint.config, (4, 4)) == 4 * matrices
    assert step_weight_bytes(checkpoint.config, (4, 4)) == 4 * num_parameters(checkpoint.config)


def test_a_slot_is_keys_and_values_of_all_layers(folder: Path) -> None:
    config = load_checkpoint(folder).config
    assert slot_bytes(config, 2) == config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2


def test_operations_are_those_of_a_model_s_products(folder: Path) -> None:
    """A prompt of 9 and 4 new tokens, computed by transformers without a cache's help: 12 tokens, 4 rows of logits."""
    from torch.utils.flop_counter import FlopCounterMode

    checkpoint = load_checkpoint(folder)
    config = checkpoint.config
    model = build_model(config, checkpoint.weights, torch.float32)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model(torch.arange(12)[None], logits_to_keep=4)
    products = sum(count for name, count in counter.get_flop_counts()["Global"].items() if "mm" in str(name))
    # Attention's operations beside them: 12 queries, which see 1, 2, ... 12 keys, products with keys and with values.
    seen = sum(range(1, 13))
    attention = 2 * 2 * config.num_layers * config.num_heads * config.head_dim * seen
    found = num_operations(config, [Lengths(9, 4)])
    assert found - attention == 2 * num_layer_parameters(config) * 12 + 2 * config.vocab_size * config.hidden_size * 4
    assert products == pytest.approx(found - attention, rel=0.01)
    assert num_operations(config, [Lengths(9, 4), Lengths(9, 4)]) == 2 * found
