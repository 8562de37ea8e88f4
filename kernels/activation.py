"""The gated activation of Llama's feed-forward layer."""

import torch


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where gate is the first half of the columns and up the second.

    gate_up [num_tokens, 2 * F] → [num_tokens, F] of the same dtype.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
