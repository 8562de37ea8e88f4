"""Options of attention that tests go through; for four query heads, on the device of the Triton tests."""

from typing import Final

import torch

from kernels.attention_inputs import AttentionOptions

SINKS: Final = torch.tensor([0.5, -2.0, 3.0, -torch.inf])
SLOPES: Final = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def options_on(device: str) -> dict[str, AttentionOptions]:
    """One of each kind, windows of every relation to a tile and a context, and all at once."""
    sinks, slopes = SINKS.to(device), SLOPES.to(device)
    return {
        "window of 1": AttentionOptions(window=1),
        "window within a tile": AttentionOptions(window=7),
        "window over tiles": AttentionOptions(window=35),
        "window beyond the context": AttentionOptions(window=1000),
        "soft cap": AttentionOptions(soft_cap=1.5),
        "soft cap of 50": AttentionOptions(soft_cap=50.0),
        "sinks": AttentionOptions(sinks=sinks),
        "ALiBi": AttentionOptions(alibi_slopes=slopes),
        "scales": AttentionOptions(k_scale=0.5, v_scale=3.0),
        "scales of 0": AttentionOptions(k_scale=0.0, v_scale=0.0),
        "all": AttentionOptions(20, 5.0, sinks, slopes, 2.0, 0.5),
    }


OPTIONS: Final = options_on("cpu")
