"""The decoder of the Llama family: one forward pass over a ragged batch of chunks, with a paged KV cache."""

from collections.abc import Mapping

import torch

from kernels.paged_attention import AttentionMetadata, AttentionOptions
from kernels.rms_norm import add_rms_norm, rms_norm
from model.config import ModelConfig
from model.errors import UnsupportedModelError
from model.kv_cache_dtype import kv_scales
from model.layers import DecoderLayer, ForwardContext
from model.quantization import make_linear, make_table, quantization_of_tables
from model.rope import cos_sin_table, rotary_dim
from model.weights import EMBEDDING, FINAL_NORM, LM_HEAD, WeightReader, check_weights


class Decoder:
    """Weights, fused and packed, and the forward pass over them.

    `weights` are tensors under Hugging Face names; a mutable mapping is emptied while it is read, so that source and
    packed copy of the whole model never exist at once. `max_positions` bounds the positions that `forward` accepts
    (default: the checkpoint's own limit). `quantization` is one of QUANTIZATIONS. `kv_dtype` is that of the KV caches
    that `forward` is given: `dtype` (the default), or float8_e4m3fn, with the checkpoint's scales if it has any.

    Raises WeightsMismatchError and UnsupportedModelError, each naming what is wrong.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_positions: int | None = None,
        quantization: str = "none",
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        check_supported(config)
        check_weights(config, weights)
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype
        self.max_positions = max_positions or config.max_position_embeddings
        self.quantization = quantization
        self.kv_dtype = kv_dtype or dtype
        reader = WeightReader(weights, dtype, self.device, quantization)
        self.cos_sin = cos_sin_table(config, self.max_positions, self.device)
        self.layers = [
            DecoderLayer(config, layer, reader, dtype, self._attention_options(layer, weights))
            for layer in range(config.num_layers)
        ]
        self.final_norm = reader.take(FINAL_NORM)
        embedding = reader.take(EMBEDDING)
        # Where they are tied the table lives once, in the packed layer's layout, and rows are looked up there.
        is_tied, kind = config.tie_word_embeddings, quantization_of_tables(quantization)
        self.lm_head = make_linear(embedding if is_tied else reader.take(LM_HEAD), None, dtype, kind)
        self._embedding = self.lm_head if is_tied else make_table(embedding, dtype, kind)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        kv_cache: torch.Tensor,
        meta: AttentionMetadata,
        logits_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Logits [len(logits_rows), vocab_size] of the tokens named by `logits_rows`; None means all, in order.

        input_ids, positions int64 [num_tokens], the chunks of all sequences one after another as `meta` cuts them;
        slot_mapping int64 [num_tokens] says where each token's keys and values go in `kv_cache` (mutated), -1 nowhere.
        """
        context = ForwardContext(self.cos_sin, positions, slot_mapping, kv_cache, meta)
        return self.logits(self.hidden(input_ids, context, logits_rows))

    def hidden(
        self, input_ids: torch.Tensor, context: ForwardContext, logits_rows: torch.Tensor | None
    ) -> torch.Tensor:
        """As `forward`, but the normed hidden states [len(logits_rows), hidden_size] from which logits are computed."""
        eps = self.config.rms_norm_eps
        residual = self.embed(input_ids)
        hidden = rms_norm(residual, self.layers[0].input_norm, eps)
        for layer, next_norm in zip(self.layers, self._next_norms, strict=True):
            hidden = layer.attention.attend(hidden, context)
            if layer is self.layers[-1] and logits_rows is not None:
                # All keys and values are written: from here on only the rows whose logits are wanted matter.
                if len(logits_rows) == 0:
                    return residual[:0]
                hidden, residual = hidden.index_select(0, logits_rows), residual.index_select(0, logits_rows)
            hidden = add_rms_norm(layer.attention.o_proj(hidden), residual, layer.post_attention_norm, eps)
            hidden = add_rms_norm(layer.mlp(hidden), residual, next_norm, eps)
        return hidden

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Rows [num_tokens, hidden_size] of the embedding table, freshly made."""
        if isinstance(self._embedding, torch.Tensor):
            return torch.nn.functional.embedding(input_ids, self._embedding)
        return self._embedding.rows(input_ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, vocab_size] from rows of `hidden`."""
        return self.lm_head(hidden)

    def _attention_options(self, layer: int, weights: Mapping[str, torch.Tensor]) -> AttentionOptions:
        """A window that no position here outgrows is left out: the kernels are faster without."""
        window = self.config.windows[layer] if self.config.windows else None
        k_scale, v_scale = kv_scales(weights, layer, self.kv_dtype)
        return AttentionOptions(
            window=None if window is None or window >= self.max_positions else window, k_scale=k_scale, v_scale=v_scale
        )

    @property
    def _next_norms(self) -> list[torch.Tensor]:
        """For each layer the norm that follows it, since a norm is fused with the addition before it."""
        return [layer.input_norm for layer in self.layers[1:]] + [self.final_norm]


def check_supported(config: ModelConfig) -> None:
    """Raises UnsupportedModelError that names what this decoder does not compute."""
    if config.hidden_act not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act is '{config.hidden_act}': the decoder computes silu")
    if config.num_kv_heads < 1 or config.num_heads % config.num_kv_heads:
        raise UnsupportedModelError(
            f"{config.num_heads} query heads don't divide into groups over {config.num_kv_heads} key-value heads"
        )
    if rotary_dim(config) < 2 or rotary_dim(config) % 2 or rotary_dim(config) > config.head_dim:
        raise UnsupportedModelError(
            f"{rotary_dim(config)} of {config.head_dim} elements of a head are to be rotated: it must be an even number"
        )
    if config.windows and len(config.windows) != config.num_layers:
        raise UnsupportedModelError(f"{len(config.windows)} windows don't belong to {config.num_layers} layers")
    if config.num_layers < 1:
        raise UnsupportedModelError("the configuration has no layers")
