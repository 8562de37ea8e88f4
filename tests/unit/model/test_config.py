"""Reading config.json."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from model.config import ModelConfig, config_from_directory
from model.errors import CorruptCheckpointError, ModelError, UnsupportedModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "torch_dtype": "bfloat16",
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192, "sliding_window": None}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 8192}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


def _read(tmp_path: Path, values: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return config_from_directory(tmp_path)


def test_what_is_left_out_has_the_value_that_transformers_gives_it(tmp_path: Path) -> None:
    config = _read(tmp_path, LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.max_position_embeddings) == (4, 16, 2048)
    assert (config.rms_norm_eps, config.rope.theta, config.rope.kind) == (1e-6, 10000.0, "default")
    assert (config.tie_word_embeddings, config.qkv_bias, config.o_bias, config.mlp_bias) == (False,) * 4
    assert (config.dtype, config.bos_token_id, config.eos_token_ids) == ("bfloat16", None, ())


def test_a_head_size_of_its_own_is_kept(tmp_path: Path) -> None:
    config = _read(tmp_path, LLAMA | {"head_dim": 80, "num_key_value_heads": 1})
    assert (config.head_dim, config.num_kv_heads) == (80, 1)


def test_both_spellings_of_rope_scaling_give_the_same(tmp_path: Path) -> None:
    old = _read(tmp_path, LLAMA | {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE}).rope
    new = _read(tmp_path, LLAMA | {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0}}).rope
    assert old == new
    assert (new.kind, new.theta) == ("llama3", 500000.0)
    assert new.params["high_freq_factor"] == 4.0
    assert "rope_theta" not in new.params


def test_the_oldest_spelling_and_the_top_level_length_are_read(tmp_path: Path) -> None:
    linear = _read(tmp_path, LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}).rope
    assert (linear.kind, linear.params) == ("linear", {"factor": 2.0})
    factors = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    longrope = _read(tmp_path, LLAMA | {"rope_scaling": factors, "original_max_position_embeddings": 256}).rope
    assert longrope.kind == "longrope"
    assert longrope.params["original_max_position_embeddings"] == 256


def test_biases_follow_the_architecture(tmp_path: Path) -> None:
    llama = _read(tmp_path, LLAMA | {"attention_bias": True, "mlp_bias": True})
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)
    qwen2 = _read(tmp_path, QWEN2)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias) == (True, False, False)
    mistral = _read(tmp_path, MISTRAL | {"attention_bias": True})
    assert (mistral.qkv_bias, mistral.o_bias) == (False, False)


def test_the_ends_of_generation_come_from_generation_config_first(tmp_path: Path) -> None:
    assert _read(tmp_path, LLAMA | {"eos_token_id": 2}).eos_token_ids == (2,)
    assert _read(tmp_path, LLAMA | {"eos_token_id": 2}, {"eos_token_id": [7, 9, 7]}).eos_token_ids == (7, 9)
    assert _read(tmp_path, LLAMA | {"eos_token_id": [3, 4]}, {"temperature": 0.6}).eos_token_ids == (3, 4)


def test_the_model_type_serves_where_no_architecture_is_named(tmp_path: Path) -> None:
    values = {name: value for name, value in QWEN2.items() if name != "architectures"} | {"model_type": "qwen2"}
    assert _read(tmp_path, values).architecture == "Qwen2ForCausalLM"


MINISTRAL = MISTRAL | {"architectures": ["MinistralForCausalLM"], "sliding_window": 4096}
MIXED = {"layer_types": ["full_attention", "sliding_attention"]}
USED = {"use_sliding_window": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
KV_ALONE = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": FP8}


def test_scales_of_a_cache_leave_the_weights_as_they_are(tmp_path: Path) -> None:
    assert _read(tmp_path, LLAMA | {"quantization_config": KV_ALONE}) == _read(tmp_path, LLAMA)


@pytest.mark.parametrize(
    ("values", "windows"),
    [
        (MISTRAL, ()),
        (MISTRAL | {"sliding_window": 8192}, ()),
        (MISTRAL | {"sliding_window": 4096}, (4096, 4096)),
        ({name: value for name, value in MISTRAL.items() if name != "sliding_window"}, (4096, 4096)),
        (MISTRAL | {"sliding_window": 64, "layer_types": ["sliding_attention"] * 2}, (64, 64)),
        (MINISTRAL, (4096, 4096)),
        (MINISTRAL | MIXED, (None, 4096)),
        (MINISTRAL | {"sliding_window": None}, ()),
        (MINISTRAL | {"layer_types": ["full_attention"] * 2}, ()),
        (QWEN2 | {"sliding_window": 4096, "use_sliding_window": False}, ()),
        (QWEN2 | {"sliding_window": 4096}, ()),
        (QWEN2 | USED | {"sliding_window": 4096}, ()),
        (QWEN2 | USED | {"sliding_window": 4096, "max_window_layers": 1}, (None, 4096)),
        (QWEN2 | USED | {"sliding_window": 4096, "max_window_layers": 0}, (4096, 4096)),
        (QWEN2 | USED | {"max_window_layers": 1}, (None, 4096)),
        (QWEN2 | USED | {"sliding_window": None, "max_window_layers": 1}, ()),
        (QWEN2 | USED | {"sliding_window": 4096, "max_window_layers": 0} | MIXED, (None, 4096)),
        (LLAMA | {"sliding_window": 64}, ()),
        (LLAMA | {"sliding_window": 2048} | MIXED, ()),
    ],
)
def test_a_sliding_window_is_that_of_the_layers_that_transformers_gives_it(
    tmp_path: Path, values: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    """None where no context outgrows it."""
    assert _read(tmp_path, values).windows == windows


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (
            LLAMA | {"sliding_window": 64} | MIXED,
            UnsupportedModelError,
            "a sliding window of 64, which no layer of Llama",
        ),
        (LLAMA | MIXED, CorruptCheckpointError, "sliding_window is missing"),
        (
            MISTRAL | {"sliding_window": 64} | MIXED,
            UnsupportedModelError,
            "all layers have .* name MinistralForCausalLM",
        ),
        (QWEN2 | {"sliding_window": 64} | MIXED, CorruptCheckpointError, "use_sliding_window is missing"),
        (QWEN2 | USED | {"sliding_window": None} | MIXED, CorruptCheckpointError, "sliding_window is None"),
        (QWEN2 | USED | {"sliding_window": 0}, CorruptCheckpointError, "sliding_window is 0"),
        (MINISTRAL | {"layer_types": ["sliding_attention"]}, CorruptCheckpointError, "a list of 2 names"),
        (
            QWEN2 | USED | {"max_window_layers": -1},
            CorruptCheckpointError,
            "is -1: it must be a whole number from 0 to",
        ),
    ],
)
def test_windows_that_contradict_the_architecture_are_refused_by_name(
    tmp_path: Path, values: dict[str, Any], error: type[ModelError], message: str
) -> None:
    with pytest.raises(error, match=message):
        _read(tmp_path, values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel isn't supported.*LlamaForCausalLM"),
        ({"architectures": None, "model_type": "gemma"}, "model_type 'gemma' isn't supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised by 'gptq'"),
        ({"quantization_config": KV_ALONE | {"config_groups": {"group_0": {}}}}, "quantised by 'compressed-tensors'"),
        ({"quantization_config": KV_ALONE | {"kv_cache_scheme": None}}, "quantised by 'compressed-tensors'"),
        ({"quantization_config": KV_ALONE | {"kv_cache_scheme": FP8 | {"num_bits": 4}}}, "quantised by"),
        ({"quantization_config": KV_ALONE | {"kv_cache_scheme": FP8 | {"dynamic": True}}}, "quantised by"),
        ({"hidden_act": "gelu"}, "'gelu' isn't computed"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "kind 'mrope' isn't computed"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, "differs between layers"),
        ({"torch_dtype": "float8_e4m3fn"}, "'float8_e4m3fn' aren't read"),
        ({"layer_types": ["linear_attention"]}, "'linear_attention' aren't computed"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"alibi": True}, "alibi is True"),
        ({"logits_scaling": 8.0}, "logits_scaling is 8.0"),
        ({"head_dim": 15}, "heads of 15"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        _read(tmp_path, LLAMA | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size is None: it must be a whole number from 1"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"vocab_size": 1 << 40}, "vocab_size is 1099511627776: it must be a whole number from 1 to 2147483647"),
        ({"num_key_value_heads": 3}, "can't share 3 KV heads"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"rope_theta": "big"}, "rope_theta is 'big'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"bos_token_id": -1}, "bos_token_id is -1"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, "factor is 'x'"),
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\]"),
        ({"max_position_embeddings": 1}, "max_position_embeddings is 1: it must be at least 2"),
        ({"partial_rotary_factor": 0.01}, "partial_rotary_factor is 0.01, so that 0 of the 16 elements"),
        ({"partial_rotary_factor": 0.2}, "so that 3 of the 16 elements"),
        ({"partial_rotary_factor": 1.5}, "an even number from 2 to 16"),
        ({"rope_theta": 1.0, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_theta is 1.0: with yarn"),
    ],
)
def test_a_senseless_value_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=message):
        _read(tmp_path, LLAMA | changes)


LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 512,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 32, "beta_slow": 1, "attention_factor": 1.0},
    "longrope": LONGROPE,
    "llama3": LLAMA3_ROPE,
}


@pytest.mark.parametrize("wrong", [0, -1.0, math.nan, math.inf, True], ids=repr)
@pytest.mark.parametrize("kind", SCALINGS)
def test_a_scaling_that_can_not_be_computed_names_the_file_the_field_and_what_is_allowed(
    tmp_path: Path, kind: str, wrong: float
) -> None:
    assert _read(tmp_path, LLAMA | {"rope_scaling": SCALINGS[kind]}).rope.kind == kind
    for name, value in SCALINGS[kind].items():
        if name == "rope_type":
            continue
        senseless = [wrong] * len(value) if isinstance(value, list) else wrong
        with pytest.raises(CorruptCheckpointError, match=rf"config\.json: .*\b{name} is .*: it must be "):
            _read(tmp_path, LLAMA | {"rope_scaling": SCALINGS[kind] | {name: senseless}})


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "linear"}, r"config\.json: RoPE scaling of kind 'linear' lacks factor"),
        ({"rope_type": "dynamic"}, "lacks factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 8}, "lacks long_factor"),
        ({"rope_type": "llama3", "factor": 2.0}, "lacks low_freq_factor"),
        (LONGROPE | {"long_factor": [1.0] * 7}, "long_factor is a list of 7: it must be a list of 8 numbers above 0"),
        (LLAMA3_ROPE | {"high_freq_factor": 1.0}, "high_freq_factor is 1.0: .* above low_freq_factor, which is 1.0"),
    ],
)
def test_a_scaling_without_its_numbers_is_refused(tmp_path: Path, scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=message):
        _read(tmp_path, LLAMA | {"rope_scaling": scaling})


@pytest.mark.parametrize("nothing", [None, 0, 0.0, False, 1, 1.0])
def test_what_changes_nothing_is_no_reason_to_refuse(tmp_path: Path, nothing: float | None) -> None:
    names = ("attn_logit_softcapping", "alibi") if not nothing else ("logits_scaling", "residual_multiplier")
    assert _read(tmp_path, LLAMA | dict.fromkeys(names, nothing)).hidden_size == 64


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_json_object_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=r"config\.json (isn't valid JSON|holds a list)"):
        config_from_directory(tmp_path)


@pytest.mark.parametrize("wrong", [True, -3, 0, 1.5, "x", [], ["a"], {}, {"a": 1}, None], ids=repr)
@pytest.mark.parametrize(
    "name",
    [
        *(*LLAMA, "rope_scaling", "rope_parameters", "layer_types", "quantization_config", "sliding_window", "dtype"),
        *("attn_logit_softcapping", "alibi", "max_window_layers", "use_sliding_window"),
    ],
)
def test_a_value_of_any_kind_gives_a_configuration_or_a_named_error(tmp_path: Path, name: str, wrong: Any) -> None:
    for values in (LLAMA, MISTRAL, MINISTRAL | MIXED, QWEN2 | USED):
        try:
            config = _read(tmp_path, values | {name: wrong})
        except ModelError:
            continue
        assert config.hidden_size > 0
