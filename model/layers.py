"""One decoder layer of the Llama family, made of fused kernels: nine calls a layer."""

from dataclasses import dataclass

import torch

from kernels.activation import silu_and_mul
from kernels.kv_cache_write import rope_and_write
from kernels.paged_attention import AttentionMetadata, AttentionOptions, paged_attention
from model.config import ModelConfig
from model.quantization import Linear, make_linear
from model.weights import WeightReader


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What every layer of one forward pass reads beside its input.

    cos_sin float32 [max_positions, rotary_dim]; positions, slot_mapping int64 [num_tokens]; kv_cache is written to.
    """

    cos_sin: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    kv_cache: torch.Tensor
    meta: AttentionMetadata


class Attention:
    """Grouped-query attention over the paged cache; q, k and v come from one product."""

    def __init__(
        self, config: ModelConfig, layer: int, reader: WeightReader, dtype: torch.dtype, options: AttentionOptions
    ) -> None:
        prefix = f"model.layers.{layer}.self_attn"
        names = [f"{prefix}.{name}_proj" for name in ("q", "k", "v")]
        self.layer = layer
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.scale = config.head_dim**-0.5
        self.options = options
        self.qkv_proj = fused_linear(reader, names, config.qkv_bias, dtype)
        self.o_proj = fused_linear(reader, [f"{prefix}.o_proj"], config.o_bias, dtype)

    def attend(self, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[num_tokens, hidden_size] to [num_tokens, num_heads * head_dim], before the output projection.

        Writes this step's keys and values of the layer into the cache.
        """
        query = rope_and_write(
            self.qkv_proj(hidden),
            context.cos_sin,
            context.positions,
            context.slot_mapping,
            context.kv_cache,
            self.layer,
            self.num_heads,
            self.num_kv_heads,
            self.options.k_scale,
            self.options.v_scale,
        )
        return paged_attention(
            query, context.kv_cache, self.layer, context.meta, self.scale, options=self.options
        ).flatten(1)


class GatedMLP:
    """down(silu(gate(x)) * up(x)); gate and up come from one product."""

    def __init__(self, config: ModelConfig, layer: int, reader: WeightReader, dtype: torch.dtype) -> None:
        prefix = f"model.layers.{layer}.mlp"
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self.gate_up_proj = fused_linear(reader, names, config.mlp_bias, dtype)
        self.down_proj = fused_linear(reader, [f"{prefix}.down_proj"], config.mlp_bias, dtype)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] to the same."""
        return self.down_proj(silu_and_mul(self.gate_up_proj(hidden)))


class DecoderLayer:
    """The weights of one layer, packed. `options` are what its attention wants beside them."""

    def __init__(
        self, config: ModelConfig, layer: int, reader: WeightReader, dtype: torch.dtype, options: AttentionOptions
    ) -> None:
        self.attention = Attention(config, layer, reader, dtype, options)
        self.mlp = GatedMLP(config, layer, reader, dtype)
        self.input_norm = reader.take(f"model.layers.{layer}.input_layernorm.weight")
        self.post_attention_norm = reader.take(f"model.layers.{layer}.post_attention_layernorm.weight")


def fused_linear(reader: WeightReader, names: list[str], has_bias: bool, dtype: torch.dtype) -> Linear:
    """One packed product of several projections that read the same input, their outputs side by side."""
    weight = reader.take_fused([f"{name}.weight" for name in names])
    bias = reader.take_fused([f"{name}.bias" for name in names]) if has_bias else None
    return make_linear(weight, bias, dtype, reader.quantization)
