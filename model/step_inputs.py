"""What one forward pass and its draws read: tensors on the device, and what the host keeps of whose they are."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.paged_attention import AttentionMetadata
from kernels.penalties import Penalties
from model.decode_shapes import DecodeShape

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each sampled row wants its token, one element a row; `positions` are the indices of the tokens to be drawn
    in their whole sequences, so that a draw is the same alone, in any batch and after a preemption. `penalties` is None
    where no row has any."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    penalties: Penalties | None

    def rows(self, start: int, end: int) -> "SamplingRows":
        """Rows [start, end) of them."""
        cut = slice(start, end)
        return SamplingRows(
            *(self.temperature[cut], self.top_k[cut], self.top_p[cut], self.min_p[cut]),
            *(self.seeds[cut], self.positions[cut]),
            None if self.penalties is None else self.penalties.rows(start, end),
        )


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What one forward pass reads, on the device.

    input_ids, positions, slot_mapping int64 [num_tokens]; logits_rows int64 [num_sampled], or None when every token
    is sampled. `sampled_ids`, `sampled_rows` and `sampled_positions` say whose tokens are drawn, and their indices;
    `wants_logprob` bool [num_sampled], on the host, which of them want the log probability as well, `num_candidates`
    int64 [num_sampled] how many candidates: 0 but for beams; `sampled_terms` int64 [num_sampled] whose rows they were.

    shape: what the step was padded to (None: not at all). Its rows beyond those of `sampled_ids` are nobody's: no keys,
    slot -1, token 0.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    meta: AttentionMetadata
    logits_rows: torch.Tensor | None
    sampled_ids: list[str]
    sampled_rows: IntArray
    sampled_positions: IntArray
    wants_logprob: npt.NDArray[np.bool_]
    num_candidates: IntArray
    sampled_terms: IntArray
    sampling: SamplingRows
    shape: DecodeShape | None = None
