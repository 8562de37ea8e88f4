"""Rotary position embedding (Su et al., arXiv 2104.09864) in the half-split convention that Llama checkpoints use."""

import torch


def rotate_heads(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate the first `rotary_dim` elements of each head by its token's position; the rest passes through.

    x [num_tokens, num_heads, head_dim]; cos_sin float32 [max_positions, rotary_dim], whose first half of columns holds
    the cosines and second half the sines of the rotary_dim / 2 frequencies; positions int [num_tokens].
    Computed in float32, returned as a new tensor of x's dtype.
    """
    rotary_dim = cos_sin.shape[1]
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, dim=-1)  # [num_tokens, 1, rotary_dim / 2]
    low, high = x[..., :rotary_dim].float().chunk(2, dim=-1)
    rotated = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
    return rotated if rotary_dim == x.shape[-1] else torch.cat((rotated, x[..., rotary_dim:]), dim=-1)
