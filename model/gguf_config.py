"""What a GGUF file says about its model, in the words of the Hugging Face checkpoint that it was made from."""

import math
import re
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from model.config import ModelConfig, RopeConfig, check_config
from model.errors import CorruptCheckpointError, UnsupportedModelError
from model.gguf import GGUFFile
from model.gguf_tokenizer import gguf_eos_ids
from model.windows import Windows, windows_of_flags

ARCHITECTURES: Final = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
ROPE_FACTORS: Final = "rope_freqs.weight"

_GLOBAL_NAMES: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Of other families; 0 or 1 is nothing.
_UNCOMPUTED: Final = {
    **dict.fromkeys(
        ("attn_logit_softcapping", "final_logit_softcapping", "attention.max_alibi_bias", "attention.scale"), (None, 0)
    ),
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale"), (None, 0, 1)),
}
_LAYER_PATTERN: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_DTYPES: Final = {"F16": "float16", "BF16": "bfloat16"}


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The configuration of a GGUF file. Raises CorruptCheckpointError or UnsupportedModelError, by name."""
    values = _Values(file)
    _refuse_unexpressed(values)
    for name in file.tensors:
        if name != ROPE_FACTORS:
            hf_name(name, file)
    hidden_size, num_heads = values.count("embedding_length"), values.count("attention.head_count")
    head_dim = values.count("attention.key_length", hidden_size // num_heads)
    windows = _windows(values)
    config = ModelConfig(
        vocab_size=_shape(file, "token_embd.weight")[0],
        hidden_size=hidden_size,
        intermediate_size=values.count("feed_forward_length"),
        num_layers=values.count("block_count"),
        num_heads=num_heads,
        num_kv_heads=values.count("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=values.count("context_length"),
        rms_norm_eps=values.number("attention.layer_norm_rms_epsilon", 1e-5),
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        rope=_rope(values, head_dim),
        dtype=_dtype(file),
        bos_token_id=_token_id(file.metadata, "bos"),
        eos_token_ids=gguf_eos_ids(file.metadata),
        architecture=_hf_architecture(values.architecture, windows),
        windows=windows,
    )
    return check_config(config, file.path.name)


def hf_name(name: str, file: GGUFFile) -> str:
    """The Hugging Face name of a tensor. Raises UnsupportedModelError for one that a Llama-family decoder lacks."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match = _LAYER_PATTERN.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise UnsupportedModelError(
            f"{file.path.name} has a tensor {name!r}, which no Llama-family decoder computes with: use another model"
        )
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def hf_values(name: str, file: GGUFFile, config: ModelConfig) -> npt.NDArray[Any]:
    """The values of a tensor in the order that Hugging Face checkpoints have.

    Files of the llama architecture keep the rows of a query or key head in pairs (i, i + head_dim / 2), for a
    rotation of neighbours; ours, as Hugging Face's, rotates the first half of a head against the second.
    """
    values = file.tensor(name)
    if file.metadata["general.architecture"] != "llama":
        return values
    kind = name.split(".")[-2]
    num_heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(kind)
    if num_heads is None:
        return values
    if len(values) != num_heads * config.head_dim:
        raise CorruptCheckpointError(
            f"{file.path.name}: {name!r} has {len(values)} rows, not {num_heads} heads of {config.head_dim}"
        )
    pairs = values.reshape(num_heads, config.head_dim // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


class _Values:
    """The metadata under the prefix of the architecture, each entry checked as it is read."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        architecture = file.metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise UnsupportedModelError(
                f"{file.path.name}: the architecture {architecture!r} isn't supported: use a GGUF file of {known}"
            )
        self.architecture = architecture

    def get(self, name: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{name}")

    def count(self, name: str, default: int | None = None) -> int:
        value = default if self.get(name) is None else self.get(name)
        if isinstance(value, list):
            raise UnsupportedModelError(f"{self.file.path.name}: {name} differs between layers: use another model")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            found = "missing" if value is None else repr(value)
            raise CorruptCheckpointError(
                f"{self.file.path}: {self.architecture}.{name} is {found}, not a whole number from 1; convert it again"
            )
        return value

    def number(self, name: str, default: float) -> float:
        value = default if self.get(name) is None else self.get(name)
        if not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
            raise CorruptCheckpointError(
                f"{self.file.path}: {self.architecture}.{name} is {value!r}, not a number above 0; convert it again"
            )
        return float(value)


def _refuse_unexpressed(values: _Values) -> None:
    name = values.file.path.name
    for key, neutral in _UNCOMPUTED.items():
        if values.get(key) not in neutral:
            raise UnsupportedModelError(
                f"{name}: {key} is {values.get(key)!r}, which isn't computed: use another model"
            )
    if values.get("expert_count"):
        raise UnsupportedModelError(f"{name} is a mixture of {values.get('expert_count')} experts: use a dense model")
    if values.get("attention.causal") is False:
        raise UnsupportedModelError(f"{name} attends in both directions: it is an encoder, not a language model")
    key, value = values.get("attention.key_length"), values.get("attention.value_length")
    if key != value:
        raise UnsupportedModelError(f"{name} has keys of {key} and values of {value}: only equal sizes are computed")


def _windows(values: _Values) -> Windows:
    """Files of the llama architecture mean all layers where they don't say which; Qwen2's first ones never have it."""
    window = values.get("attention.sliding_window")
    if window is None or (window == 0 and isinstance(window, int)):
        return ()
    return windows_of_flags(
        values.count("attention.sliding_window"),
        values.get("attention.sliding_window_pattern"),
        values.count("block_count"),
        values.count("context_length"),
        origin=values.file.path.name,
        default=True if values.architecture == "llama" else None,
    )


def _hf_architecture(name: str, windows: Windows) -> str:
    """The class that computes the same: Llama with windows is Mistral, or Ministral where some layers have none."""
    if name != "llama" or not windows:
        return ARCHITECTURES[name]
    return "MinistralForCausalLM" if None in windows else "MistralForCausalLM"


def _rope(values: _Values, head_dim: int) -> RopeConfig:
    rotated = values.count("rope.dimension_count", head_dim)
    name = values.file.path.name
    if rotated != head_dim:
        raise UnsupportedModelError(f"{name} rotates {rotated} of {head_dim} elements of a head: use another model")
    theta = values.number("rope.freq_base", 10000.0)
    kind = values.get("rope.scaling.type") or ("linear" if values.get("rope.scale_linear") else "none")
    if ROPE_FACTORS in values.file.tensors:
        if kind != "none":
            raise UnsupportedModelError(f"{name} scales RoPE both by {kind!r} and by {ROPE_FACTORS}: use another file")
        return _rope_by_factors(values.file, theta, head_dim)
    if kind == "none":
        return RopeConfig(theta)
    default_factor = values.number("rope.scale_linear", 1.0)
    params: dict[str, float] = {"factor": values.number("rope.scaling.factor", default_factor)}
    if kind == "linear":
        return RopeConfig(theta, "linear", params)
    if kind != "yarn" or values.get("rope.scaling.attn_factor") or values.get("rope.scaling.yarn_log_multiplier"):
        raise UnsupportedModelError(f"{name} scales RoPE by {kind!r} in a way that isn't computed: use safetensors")
    params["original_max_position_embeddings"] = values.count("rope.scaling.original_context_length")
    params["beta_fast"] = values.number("rope.scaling.yarn_beta_fast", 32.0)
    params["beta_slow"] = values.number("rope.scaling.yarn_beta_slow", 1.0)
    return RopeConfig(theta, "yarn", params)


def _rope_by_factors(file: GGUFFile, theta: float, head_dim: int) -> RopeConfig:
    """Files of Llama 3.1 and later hold the scaling as one divisor per frequency, which is LongRoPE's form."""
    factors = np.asarray(file.tensor(ROPE_FACTORS), np.float64).tolist()
    if file.tensors[ROPE_FACTORS].quant.name != "F32" or len(factors) != head_dim // 2:
        raise CorruptCheckpointError(
            f"{file.path}: {ROPE_FACTORS} isn't {head_dim // 2} numbers of type F32; convert it again"
        )
    params = {"short_factor": factors, "long_factor": factors, "factor": 1.0, "attention_factor": 1.0}
    return RopeConfig(theta, "longrope", params)


def _shape(file: GGUFFile, name: str) -> tuple[int, ...]:
    if name not in file.tensors:
        raise CorruptCheckpointError(f"{file.path} has no tensor {name!r}: convert it again")
    return file.tensors[name].shape


def _dtype(file: GGUFFile) -> str:
    """The type of the matrices where they are plain halves, else float32: what dequantising gives."""
    names = {info.quant.name for info in file.tensors.values() if len(info.shape) > 1}
    return _DTYPES.get(names.pop(), "float32") if len(names) == 1 else "float32"


def _token_id(metadata: Mapping[str, Any], name: str) -> int | None:
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return token_id if isinstance(token_id, int) else None
