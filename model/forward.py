"""One forward pass of a step: by a captured graph where there is one that fits, kernel by kernel everywhere else."""

from collections.abc import Callable, Sequence

import torch

from model.cuda_graphs import Capture, DecodeGraphs
from model.decode_shapes import DecodeShape
from model.decoder import Decoder
from model.kv_cache import KVCache
from model.layers import ForwardContext
from model.step_inputs import StepInputs


class ForwardPass:
    """The decoder over one KV cache."""

    def __init__(self, decoder: Decoder, kv_cache: KVCache) -> None:
        self.decoder = decoder
        self._kv_cache = kv_cache
        self._graphs: DecodeGraphs | None = None

    @property
    def num_graphs(self) -> int:
        """Graphs that were captured."""
        return 0 if self._graphs is None else len(self._graphs)

    def hidden(self, inputs: StepInputs) -> torch.Tensor:
        """Hidden states [num_sampled, hidden_size] of the step's sampled tokens. Writes its keys and values.

        They are valid until the next step's are asked for.
        """
        hidden = None if self._graphs is None else self._graphs.run(inputs)
        if hidden is None:
            hidden = self._compute(inputs)
        return hidden if inputs.shape is None else hidden[: len(inputs.sampled_ids)]

    def capture(
        self,
        shapes: Sequence[DecodeShape],
        inputs_of: Callable[[DecodeShape], StepInputs],
        capture: Capture,
    ) -> bool:
        """Have graphs of these shapes (DecodeGraphs.capture). The KV cache must have its final place."""
        self._graphs = DecodeGraphs(
            self._compute,
            capture,
            max_num_seqs=max(shape.num_seqs for shape in shapes),
            hidden_size=self.decoder.config.hidden_size,
            dtype=self.decoder.dtype,
            device=self.decoder.device,
        )
        if not self._graphs.capture(shapes, inputs_of):
            self._graphs = None
        return self._graphs is not None

    @torch.inference_mode()
    def _compute(self, inputs: StepInputs) -> torch.Tensor:
        context = ForwardContext(
            self.decoder.cos_sin, inputs.positions, inputs.slot_mapping, self._kv_cache.blocks, inputs.meta
        )
        return self.decoder.hidden(inputs.input_ids, context, inputs.logits_rows)
