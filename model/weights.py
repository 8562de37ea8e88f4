"""Which tensors a decoder of the Llama family is made of, under their Hugging Face names."""

import math
from abc import abstractmethod
from collections.abc import Mapping, MutableMapping

import torch

from model.config import ModelConfig
from model.errors import WeightsMismatchError
from model.kv_cache_dtype import is_kv_scale

Shape = tuple[int, ...]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
MAX_LISTED = 8
"""Tensors named in an error message for each kind of mismatch."""


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Shape of every tensor that a checkpoint of this configuration holds."""
    shapes: dict[str, Shape] = {EMBEDDING: (config.vocab_size, config.hidden_size), FINAL_NORM: (config.hidden_size,)}
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (query, hidden, config.qkv_bias),
        "self_attn.k_proj": (key_value, hidden, config.qkv_bias),
        "self_attn.v_proj": (key_value, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, query, config.o_bias),
        "mlp.gate_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.up_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, intermediate, config.mlp_bias),
    }
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    for name, (num_out, num_in, has_bias) in linears.items():
        shapes[f"{name}.weight"] = (num_out, num_in)
        if has_bias:
            shapes[f"{name}.bias"] = (num_out,)
    return shapes


class LazyWeights(Mapping[str, torch.Tensor]):
    """Tensors that are made, or read, anew each time one is asked for; shapes cost nothing."""

    @abstractmethod
    def shape_of(self, name: str) -> Shape:
        """The shape of a tensor, without the tensor. Raises KeyError for a name that isn't there."""

    def __contains__(self, name: object) -> bool:
        """Without the tensor, too: a mapping's own way would be to make it."""
        try:
            self.shape_of(str(name))
        except KeyError:
            return False
        return True


def check_weights(config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> None:
    """Raises WeightsMismatchError that lists what is missing, unexpected or of another shape.

    Allowed beside the expected: an lm_head where the embeddings are tied, and the rotary frequencies that old
    checkpoints carry, since both follow from the configuration; and scales of a KV cache in 8 bits.
    """
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in weights]
    unexpected = [name for name in weights if name not in expected and not _is_allowed(name, config)]
    mis_shaped = [
        f"{name} is {list(_shape_of(name, weights))}, not {list(shape)}"
        for name, shape in expected.items()
        if name in weights and _shape_of(name, weights) != shape
    ]
    found = [("missing", missing), ("unexpected", unexpected), ("of another shape", mis_shaped)]
    problems = [f"{kind}: {_listed(names)}" for kind, names in found if names]
    if problems:
        raise WeightsMismatchError(
            f"the weights don't fit the {config.architecture} of the configuration; {'; '.join(problems)}. "
            "Check that the weights and config.json are of one checkpoint"
        )


def _shape_of(name: str, weights: Mapping[str, torch.Tensor]) -> Shape:
    return weights.shape_of(name) if isinstance(weights, LazyWeights) else tuple(weights[name].shape)


def _is_allowed(name: str, config: ModelConfig) -> bool:
    is_implied = name.endswith("rotary_emb.inv_freq") or (name == LM_HEAD and config.tie_word_embeddings)
    return is_implied or is_kv_scale(name)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more


class WeightReader:
    """Takes tensors out of a mapping one by one, so that a source tensor dies as soon as it is packed.

    A mutable mapping (a dict) is emptied as it is read: what is taken twice is not there. A read-only one, that loads
    lazily, is left as it is. `quantization` is how the matrices of linear layers are kept: see quantization.py.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
        quantization: str = "none",
    ) -> None:
        self.quantization = quantization
        self._weights = weights
        self._dtype = dtype
        self._device = device

    def take(self, name: str) -> torch.Tensor:
        """The tensor in memory of its own (a source may be a view of a mapped file), converted, on the device."""
        return self._pop(name).to(device=self._device, dtype=self._dtype, copy=True).contiguous()

    def take_fused(self, names: list[str]) -> torch.Tensor:
        """The tensors stacked along their first axis, as `take` gives them."""
        return torch.cat([self._pop(name).to(device=self._device, dtype=self._dtype) for name in names])

    def _pop(self, name: str) -> torch.Tensor:
        weights = self._weights
        return weights.pop(name) if isinstance(weights, MutableMapping) else weights[name]


def random_weights(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Weights of a trained model's magnitudes, for tests and benches: a pure function of the configuration and seed.

    Logits keep a spread of about one, so that neither softmax nor argmax degenerates.
    """
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for name, shape in expected_shapes(config).items():
        tensor = torch.empty(shape, dtype=torch.float32)
        fill_randomly(name, tensor, generator)
        weights[name] = tensor.to(dtype)
    return weights


def fill_randomly(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Numbers of a trained model's magnitudes for the tensor of this name: each layer keeps the scale of its input."""
    if name.endswith("norm.weight"):
        tensor.uniform_(0.5, 1.5, generator=generator)
    elif name.endswith("bias"):
        tensor.normal_(0.0, 0.1, generator=generator)
    else:
        tensor.normal_(0.0, 1.0 / math.sqrt(tensor.shape[1]), generator=generator)
