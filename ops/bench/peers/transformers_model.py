"""A model of `transformers` with the weights that our engine has."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from model.config import ModelConfig
from model.loader import load_checkpoint
from model.weights import LM_HEAD
from model.windows import FULL, SLIDING
from ops.bench.errors import BenchError

if TYPE_CHECKING:
    import torch

PAD_ID: Final = 0


class LoadedModel:
    """A peer's model, in this process. num_threads: of torch in this process; None leaves them."""

    def __init__(
        self,
        model_path: str,
        cache_dir: str | None,
        dtype: str,
        device: str,
        num_threads: int | None,
        load_format: str = "auto",
    ) -> None:
        self._path = Path(model_path)
        self._cache_dir = None if cache_dir is None else Path(cache_dir)
        self._dtype = dtype
        self._device = device
        self._num_threads = num_threads
        self._load_format = load_format
        self._model: Any = None

    def _load(self) -> dict[str, Any]:
        """Have the checkpoint's model, ready to generate; answers what it runs with."""
        import torch

        if self._model is None:
            if self._num_threads is not None:
                torch.set_num_threads(self._num_threads)
            # Random weights of another dtype, or made on another device, would be others than our engine's.
            given: dict[str, Any] = {}
            if self._load_format != "auto":
                given = {"load_format": self._load_format, "dtype": self._dtype, "device": self._device}
            checkpoint = load_checkpoint(self._path, cache_dir=self._cache_dir, **given)
            model = build_model(checkpoint.config, checkpoint.weights, getattr(torch, self._dtype))
            self._model = model.to(self._device)
        return {
            "threads": torch.get_num_threads(),
            "attention": self._model.config._attn_implementation,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "class": type(self._model).__name__,
        }


def build_model(config: ModelConfig, weights: Any, dtype: "torch.dtype") -> Any:
    """The `transformers` model of this configuration, with weights of Hugging Face names.

    Raises BenchError where a weight is missing or left over: it would be another model.
    """
    import transformers

    model_class = getattr(transformers, config.architecture)
    peer_config = model_class.config_class(**config_values(config))
    model = model_class._from_config(peer_config, dtype=dtype, attn_implementation="sdpa").eval()
    missing, unexpected = model.load_state_dict(dict(weights), strict=False)
    missing = [name for name in missing if not (config.tie_word_embeddings and name == LM_HEAD)]
    if missing or unexpected:
        raise BenchError(f"transformers' {config.architecture} lacks {missing} or doesn't know {unexpected}")
    # The workload says how long replies are: nothing else ends one.
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, use_cache=True, eos_token_id=None, bos_token_id=None, pad_token_id=PAD_ID
    )
    return model


def config_values(config: ModelConfig) -> dict[str, Any]:
    """The values of a `transformers` configuration that say the same."""
    values: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": config.hidden_act,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_parameters": {
            "rope_type": config.rope.kind,
            "rope_theta": config.rope.theta,
            "partial_rotary_factor": config.rope.partial_rotary_factor,
            **config.rope.params,
        },
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": PAD_ID,
    }
    if config.architecture == "LlamaForCausalLM":
        values |= {"attention_bias": config.o_bias, "mlp_bias": config.mlp_bias}
    if config.architecture != "LlamaForCausalLM":
        values |= _window_values(config)
    return values


def _window_values(config: ModelConfig) -> dict[str, Any]:
    """One window, and in words which layers have it; a Mistral has it in all."""
    window = next((window for window in config.windows if window is not None), None)
    values: dict[str, Any] = {"sliding_window": window}
    if config.architecture != "MistralForCausalLM":
        windows = config.windows or (None,) * config.num_layers
        values["layer_types"] = [FULL if window is None else SLIDING for window in windows]
    if config.architecture == "Qwen2ForCausalLM":
        values["use_sliding_window"] = window is not None
    if config.architecture == "MinistralForCausalLM" and window is None:  # its class wants a number all the same
        values["sliding_window"] = config.max_position_embeddings
    return values
