"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467), alone and fused with the residual addition before it."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension.

    x [num_tokens, hidden], weight [hidden] of the same dtype; the mean is taken in float32. Returns a new tensor.
    """
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add x to `residual` IN PLACE, then return rms_norm of the sum.

    x and residual [num_tokens, hidden], weight [hidden], all of one dtype.
    """
    residual.add_(x)
    return rms_norm(residual, weight, eps)
