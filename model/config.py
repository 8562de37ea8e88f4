"""What a checkpoint is: the shape of a Llama-family decoder, read from config.json or from a GGUF header."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from model.config_values import ConfigValues
from model.errors import CorruptCheckpointError, UnsupportedModelError
from model.json_files import read_json, read_json_if_there
from model.rope_checks import check_rope
from model.windows import windows_of

DTYPES: Final = ("float32", "float16", "bfloat16")
ROPE_KINDS: Final = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")

ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}
"""The decoders that ModelConfig expresses exactly, by the model type that config.json names."""

# What other families of decoders compute, by config.json's names, and the values that change nothing. Where one of ours
# names it with another value, its weights were trained with it: no layer of ours has it.
_UNCOMPUTED: Final = {
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "alibi"), (None, 0)),
    **dict.fromkeys(
        ("logits_scaling", "logit_scale", "embedding_multiplier", "residual_multiplier"),
        (None, 0, 1),
    ),
}
# What transformers takes for a value that config.json leaves out.
_DEFAULT_POSITIONS: Final = {
    "LlamaForCausalLM": 2048,
    "MistralForCausalLM": 131072,
    "MinistralForCausalLM": 131072,
    "Qwen2ForCausalLM": 32768,
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al., arXiv 2104.09864) and its scaling.

    kind: default, linear, dynamic, yarn, longrope or llama3; `params` are the checkpoint's own numbers for that kind,
    under the names that config.json uses (factor, low_freq_factor, ...).
    """

    theta: float = 10000.0
    kind: str = "default"
    params: Mapping[str, Any] = field(default_factory=dict)
    partial_rotary_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder of the Llama family. Sizes are in elements.

    windows: for each layer how many keys a query sees, its own included; None where it sees all. Empty: all layers do.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    rope: RopeConfig = field(default_factory=RopeConfig)
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    architecture: str = "LlamaForCausalLM"
    windows: tuple[int | None, ...] = ()


def config_from_directory(directory: Path, default_dtype: str = "float32") -> ModelConfig:
    """The configuration of a Hugging Face checkpoint: config.json, and generation_config.json for the ends.

    `default_dtype` is taken where config.json names none. Raises CorruptCheckpointError for values that can't be, and
    UnsupportedModelError, by name, for what the decoder doesn't compute exactly.
    """
    path = directory / "config.json"
    values = ConfigValues(read_json(path), str(path))
    architecture = _architecture(values)
    _refuse_quantized(values)
    _refuse_uncomputed(values)
    hidden_size, num_heads = values.count("hidden_size"), values.count("num_attention_heads")
    num_layers = values.count("num_hidden_layers")
    max_positions = values.count("max_position_embeddings", _DEFAULT_POSITIONS[architecture])
    config = ModelConfig(
        vocab_size=values.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=values.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=values.count("num_key_value_heads", num_heads),
        head_dim=values.count("head_dim", hidden_size // num_heads),
        max_position_embeddings=max_positions,
        rms_norm_eps=values.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=values.flag("tie_word_embeddings"),
        qkv_bias=architecture == "Qwen2ForCausalLM" or _llama_flag(values, architecture, "attention_bias"),
        o_bias=_llama_flag(values, architecture, "attention_bias"),
        mlp_bias=_llama_flag(values, architecture, "mlp_bias"),
        hidden_act=str(values.get("hidden_act") or "silu"),
        rope=_rope(values),
        dtype=_dtype(values, default_dtype),
        bos_token_id=values.token_id("bos_token_id"),
        eos_token_ids=declared_eos_ids(directory),
        architecture=architecture,
        windows=windows_of(values, architecture, num_layers, max_positions),
    )
    return check_config(config, str(path))


def declared_eos_ids(directory: Path) -> tuple[int, ...]:
    """The ends of a generation that the checkpoint declares: generation_config.json before config.json."""
    for name in ("generation_config.json", "config.json"):
        ids = read_json_if_there(directory / name).get("eos_token_id")
        if ids is None:
            continue
        listed = ids if isinstance(ids, list) else [ids]
        if not all(type(token_id) is int and token_id >= 0 for token_id in listed):
            raise CorruptCheckpointError(f"{directory / name}: eos_token_id is {ids!r}, not token ids; correct it")
        return tuple(dict.fromkeys(listed))
    return ()


def check_config(config: ModelConfig, origin: str) -> ModelConfig:
    """The same configuration, once its numbers agree with one another. `origin` names the file in the errors."""
    if config.num_heads % config.num_kv_heads:
        raise CorruptCheckpointError(
            f"{origin}: {config.num_heads} attention heads can't share {config.num_kv_heads} KV heads; fetch it again"
        )
    if config.head_dim % 2:
        raise UnsupportedModelError(
            f"{origin}: heads of {config.head_dim} can't be rotated in pairs; use another model"
        )
    if config.hidden_act not in ("silu", "swish"):
        raise UnsupportedModelError(f"{origin}: the activation {config.hidden_act!r} isn't computed, only silu is")
    if config.rope.kind not in ROPE_KINDS:
        known = ", ".join(ROPE_KINDS)
        raise UnsupportedModelError(f"{origin}: RoPE scaling of kind {config.rope.kind!r} isn't computed: {known} are")
    if config.max_position_embeddings < 2:
        raise CorruptCheckpointError(
            f"{origin}: max_position_embeddings is {config.max_position_embeddings}: it must be at least 2, for one "
            "token of a prompt and one of its answer"
        )
    check_rope(config, origin)
    return config


def _architecture(values: ConfigValues) -> str:
    named = values.get("architectures")
    name = named[0] if isinstance(named, list) and named else ARCHITECTURES.get(str(values.get("model_type")))
    if name not in ARCHITECTURES.values():
        found = name or f"model_type {values.get('model_type')!r}"
        known = ", ".join(ARCHITECTURES.values())
        raise UnsupportedModelError(f"{values.origin}: {found} isn't supported: use a checkpoint of {known}")
    return str(name)


def _llama_flag(values: ConfigValues, architecture: str, name: str) -> bool:
    """A bias that only Llama's configuration can switch on; the others' classes don't look at it."""
    return architecture == "LlamaForCausalLM" and values.flag(name)


def _refuse_quantized(values: ConfigValues) -> None:
    """Weights in integers; a cache in 8 bits alone leaves the weights as they are."""
    quantization = values.get("quantization_config")
    if quantization and not _is_of_cache_alone(quantization):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UnsupportedModelError(
            f"{values.origin}: weights quantised by {method!r} aren't read: use the original checkpoint or a GGUF file"
        )


def _is_of_cache_alone(quantization: Any) -> bool:
    """Whether compressed-tensors says no more than one scale each for a layer's keys and values in FP8."""
    if not isinstance(quantization, dict) or quantization.get("config_groups") != {}:
        return False
    scheme, wanted = quantization.get("kv_cache_scheme"), {"num_bits": 8, "type": "float", "strategy": "tensor"}
    return (
        quantization.get("quant_method") == "compressed-tensors"
        and isinstance(scheme, dict)
        and scheme.items() >= wanted.items()
        and not scheme.get("dynamic")
    )


def _refuse_uncomputed(values: ConfigValues) -> None:
    for name, neutral in _UNCOMPUTED.items():
        if values.get(name) not in neutral:
            raise UnsupportedModelError(
                f"{values.origin}: {name} is {values.get(name)!r}, which no layer here computes: use another model"
            )


def _rope(values: ConfigValues) -> RopeConfig:
    """Both spellings: rope_theta with rope_scaling, and rope_parameters, which holds everything."""
    named = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if isinstance(named, dict) and set(named) == {"full_attention"}:
        named = named["full_attention"]
    if not isinstance(named, dict):
        values.fail("rope_parameters" if values.get("rope_parameters") else "rope_scaling", "an object")
    if any(isinstance(value, dict) for value in named.values()):
        raise UnsupportedModelError(f"{values.origin}: RoPE that differs between layers isn't computed")
    names = ("rope_theta", "partial_rotary_factor")
    inner = ConfigValues({name: values.get(name) for name in names} | named, values.origin)
    kind = str(named.get("rope_type") or named.get("type") or "default")
    params = {
        name: value for name, value in named.items() if name not in ("rope_type", "type", *names) and value is not None
    }
    for name, value in params.items():
        if not isinstance(value, int | float | list):
            inner.fail(name, "a number")
    trained = values.get("original_max_position_embeddings")
    if kind != "default" and trained is not None:
        params.setdefault("original_max_position_embeddings", trained)
    return RopeConfig(
        theta=inner.number("rope_theta", 10000.0),
        kind="longrope" if kind == "su" else kind,
        params={} if kind == "default" else params,
        partial_rotary_factor=inner.number("partial_rotary_factor", 1.0),
    )


def _dtype(values: ConfigValues, default: str) -> str:
    named = values.get("dtype") or values.get("torch_dtype") or default
    name = str(named).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModelError(f"{values.origin}: weights of type {name!r} aren't read: {', '.join(DTYPES)} are")
    return name
