"""GGUF files in the words of Hugging Face checkpoints."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from model.config import ModelConfig
from model.errors import CorruptCheckpointError, UnsupportedModelError
from model.gguf import GGUFFile
from model.gguf_config import config_from_gguf, hf_values
from model.loader import load_checkpoint, load_config
from model.weights import check_weights
from tests.unit.model.gguf_files import tiny_metadata, tiny_tensors, write_gguf


def _paired(values: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Rows as llama.cpp's converter orders them: row 2i of a head is row i, row 2i + 1 is row i + head_dim / 2."""
    heads = values.reshape(num_heads, -1, *values.shape[1:])
    half = heads.shape[1] // 2
    out = np.empty_like(heads)
    out[:, 0::2], out[:, 1::2] = heads[:, :half], heads[:, half:]
    return out.reshape(values.shape)


def test_query_and_key_rows_of_llama_files_are_put_back_in_order(tmp_path: Path) -> None:
    wanted = tiny_tensors(qkv_bias=True)
    heads = {"attn_q": 4, "attn_k": 2}
    stored = {
        name: _paired(values, heads[kind]) if (kind := name.split(".")[-2]) in heads else values
        for name, values in wanted.items()
    }
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", tiny_metadata(), stored))
    config = config_from_gguf(file)
    assert not np.array_equal(stored["blk.1.attn_q.bias"], wanted["blk.1.attn_q.bias"])
    for name, values in wanted.items():
        np.testing.assert_array_equal(hf_values(name, file, config), values)


def test_rows_of_qwen2_files_stay_where_they_are(tmp_path: Path) -> None:
    tensors = tiny_tensors(qkv_bias=True)
    checkpoint = load_checkpoint(write_gguf(tmp_path / "m.gguf", tiny_metadata("qwen2"), tensors))
    check_weights(checkpoint.config, checkpoint.weights)
    assert checkpoint.config.architecture == "Qwen2ForCausalLM"
    assert checkpoint.config.qkv_bias
    for hf, name in [("q_proj.weight", "attn_q.weight"), ("k_proj.bias", "attn_k.bias")]:
        values = checkpoint.weights[f"model.layers.1.self_attn.{hf}"].numpy()
        np.testing.assert_array_equal(values, tensors[f"blk.1.{name}"])


def test_the_demo_file_is_read_as_the_checkpoint_it_was_made_from(demo_model_path: Path) -> None:
    config = load_config(demo_model_path)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (49152, 576, 1536)
    assert config.max_position_embeddings == 8192
    assert config.rope.theta == 100000
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_ids, config.dtype) == (1, (2,), "float32")


def _config(
    tmp_path: Path, changes: dict[str, Any] | None = None, tensors: dict[str, npt.NDArray[Any]] | None = None
) -> ModelConfig:
    metadata = {name: item for name, item in (tiny_metadata() | (changes or {})).items() if item is not None}
    return config_from_gguf(GGUFFile(write_gguf(tmp_path / "m.gguf", metadata, tensors or tiny_tensors())))


def test_rope_scaling_is_read_in_each_form(tmp_path: Path) -> None:
    assert _config(tmp_path).rope.kind == "default"
    linear = _config(tmp_path, {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}).rope
    assert (linear.kind, linear.params) == ("linear", {"factor": 4.0})
    assert _config(tmp_path, {"llama.rope.scale_linear": 2.0}).rope.params == {"factor": 2.0}
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
    }
    params = _config(tmp_path, yarn).rope.params
    assert params == {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0}


def test_factors_of_llama_3_become_one_divisor_per_frequency(tmp_path: Path) -> None:
    factors = np.array([1, 1, 2.5, 8], np.float32)
    rope = _config(tmp_path, {}, tiny_tensors() | {"rope_freqs.weight": factors}).rope
    assert rope.kind == "longrope"
    assert rope.params["short_factor"] == rope.params["long_factor"] == [1.0, 1.0, 2.5, 8.0]
    assert rope.params["attention_factor"] == 1.0


PATTERN = "llama.attention.sliding_window_pattern"


@pytest.mark.parametrize(
    ("changes", "windows", "architecture"),
    [
        ({"llama.attention.sliding_window": 64}, (64, 64), "MistralForCausalLM"),
        ({"llama.attention.sliding_window": 128}, (), "LlamaForCausalLM"),
        ({"llama.attention.sliding_window": 0}, (), "LlamaForCausalLM"),
        ({"llama.attention.sliding_window": 64, PATTERN: [True, False]}, (64, None), "MinistralForCausalLM"),
        ({"llama.attention.sliding_window": 64, PATTERN: [False, False]}, (), "LlamaForCausalLM"),
    ],
)
def test_a_sliding_window_is_of_all_layers_or_of_those_that_are_flagged(
    tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None, ...], architecture: str
) -> None:
    config = _config(tmp_path, changes)
    assert (config.windows, config.architecture) == (windows, architecture)


def test_a_window_of_qwen2_must_say_its_layers(tmp_path: Path) -> None:
    """Its first layers never have one, and how many those are is nowhere in the file."""
    metadata = tiny_metadata("qwen2") | {"qwen2.attention.sliding_window": 64}
    tensors = tiny_tensors(qkv_bias=True)
    with pytest.raises(UnsupportedModelError, match="64, and doesn't say layer by layer"):
        config_from_gguf(GGUFFile(write_gguf(tmp_path / "m.gguf", metadata, tensors)))
    metadata["qwen2.attention.sliding_window_pattern"] = [False, True]
    config = config_from_gguf(GGUFFile(write_gguf(tmp_path / "n.gguf", metadata, tensors)))
    assert (config.windows, config.architecture) == ((None, 64), "Qwen2ForCausalLM")


@pytest.mark.parametrize(("window", "flags"), [(2.5, None), (True, None), (64, [True]), (64, ["a", "b"]), (64, "yes")])
def test_a_window_that_can_not_be_is_named(tmp_path: Path, window: Any, flags: Any) -> None:
    changes = {"llama.attention.sliding_window": window, PATTERN: flags}
    with pytest.raises(CorruptCheckpointError, match="sliding_window"):
        _config(tmp_path, {name: item for name, item in changes.items() if item is not None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma2"}, "'gemma2' isn't supported: use a GGUF file of llama, qwen2"),
        ({"llama.expert_count": 8}, "8 experts"),
        ({"llama.attention.sliding_window": 64, PATTERN: 4}, "64, and doesn't say layer by layer"),
        ({"llama.attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({"llama.attention.max_alibi_bias": 8.0}, "max_alibi_bias is 8.0"),
        ({"llama.attention.scale": 0.5}, "attention.scale is 0.5"),
        ({"llama.attention.causal": False}, "encoder"),
        ({"llama.attention.value_length": 16}, "only equal sizes"),
        ({"llama.attention.head_count_kv": [2, 1]}, "differs between layers"),
        ({"llama.rope.dimension_count": 4}, "rotates 4 of 8"),
        ({"llama.rope.scaling.type": "su"}, "scales RoPE by 'su'"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        _config(tmp_path, changes)


def test_a_tensor_that_no_llama_has_is_refused_by_name(tmp_path: Path) -> None:
    extra = {"blk.0.ffn_gate_inp.weight": np.ones((8, 32), np.float32)}
    with pytest.raises(UnsupportedModelError, match=r"'blk\.0.ffn_gate_inp\.weight', which no Llama-family decoder"):
        _config(tmp_path, {}, tiny_tensors() | extra)


def test_missing_or_senseless_sizes_are_named(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"llama\.block_count is missing"):
        _config(tmp_path, {"llama.block_count": None})
    with pytest.raises(CorruptCheckpointError, match="4 attention heads can't share 3 KV heads"):
        _config(tmp_path, {"llama.attention.head_count_kv": 3})
    with pytest.raises(CorruptCheckpointError, match=r"no tensor 'token_embd\.weight'"):
        _config(tmp_path, {}, {"output_norm.weight": np.ones(32, np.float32)})
