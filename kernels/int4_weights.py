"""Weights of 4 bits: scale and minimum of a group by least squares, over a few ways to round it.

With 15 steps between the least and the largest of 32 weights a step is wide, so it pays to look for better ones:

- A range a little narrower than the group's, beyond which a few weights are cut, makes all other steps finer.
- A group that had 4 bits before, and used less than 16 integers, lies on fewer steps: with just so many it comes back
  as it was.

Each way gives integers, and least squares the scale and minimum that suit them best.
"""

from typing import Final

import torch

from kernels.weight_formats import GROUP, WeightFormat, nearest_integers

LIMIT: Final = 15
# Steps that the range of a group is divided into.
NUM_STEPS: Final = (15.0, 14.0, 13.0, 12.0, 11.0, 10.0, 9.0, 8.0, 15.5, 16.0, 16.5, 17.0, 17.5, 18.0)
# A squared error of 32 weights whose range is 1 that counts as none: rounding to 15 steps makes a hundred times it.
NO_ERROR: Final = 1e-4
# Added and taken away again it rounds to the nearest integer. Torch's rounding wakes its threads even for few numbers.
ROUNDING: Final = 1.5 * 2**23
# Groups that are looked at together on the CPU: their arrays fit a core's L2 cache, and are so small that torch takes
# one thread, which waits for no other. And elsewhere: each piece is some hundred launches, each array takes 32 MiB.
GROUPS_AT_ONCE: Final = 1000
GROUPS_AT_ONCE_ON_DEVICE: Final = 1 << 18


def quantize_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As WeightFormat.quantize. The integers are the nearest for scales and minima as they are rounded."""
    groups = weight.view(-1, GROUP)
    at_once = GROUPS_AT_ONCE if weight.device.type == "cpu" else GROUPS_AT_ONCE_ON_DEVICE
    fits = [_fit(piece.T.contiguous()) for piece in torch.split(groups, at_once)]
    scales, minima = (torch.cat(parts) for parts in zip(*fits, strict=True))
    integers = nearest_integers(groups, scales, minima, LIMIT)
    num_rows = len(weight)
    return integers.view(num_rows, -1, GROUP), scales.view(num_rows, -1), minima.view(num_rows, -1)


def _fit(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima, float16 [n], of the groups in float32 [32, n]."""
    least = x.amin(0)
    span = x.amax(0) - least
    y = (x - least).div_(torch.where(span > 0, span, 1))
    y_sum, y_squares = y.sum(0), y.square().sum(0)
    best, tries = torch.full_like(span, torch.inf), []
    for num_steps in NUM_STEPS:
        integers = _integers(y, num_steps)
        total, products = integers.sum(0), (integers * y).sum(0)
        variance = GROUP * integers.square_().sum(0) - total.square()  # a whole number
        slope = (GROUP * products - total * y_sum) / variance.clamp_(min=1)
        offset = (y_sum - slope * total) / GROUP
        error = y_squares - offset * y_sum - slope * products
        tries.append((error, slope, offset))
        best = torch.minimum(best, error)
        if num_steps <= LIMIT and x.device.type == "cpu" and bool((best < NO_ERROR).all()):
            break  # all had 4 bits (off the CPU the host would wait for the answer)
    errors, slopes, offsets = (torch.stack(each) for each in zip(*tries, strict=True))
    chosen = errors.argmin(0, keepdim=True)
    scales, minima = (slopes.gather(0, chosen)[0] * span).half(), (offsets.gather(0, chosen)[0] * span + least).half()
    return torch.where(minima.isfinite(), scales, torch.nan), minima


def _integers(y: torch.Tensor, num_steps: float) -> torch.Tensor:
    """Of numbers from 0 to 1 in so many steps; beyond LIMIT of them both ends are cut."""
    if num_steps <= LIMIT:
        return (y * num_steps).add_(ROUNDING).sub_(ROUNDING)
    return (y * num_steps).sub_((num_steps - LIMIT) / 2).add_(ROUNDING).sub_(ROUNDING).clamp_(0, LIMIT)


def _pack(integers: torch.Tensor) -> torch.Tensor:
    return integers[:, :, ::2] | integers[:, :, 1::2] << 4


def _unpack(vectors: torch.Tensor) -> torch.Tensor:
    return torch.stack((vectors & 15, vectors >> 4), dim=3).flatten(2, 3)


INT4: Final = WeightFormat("int4", 4, quantize_int4, _pack, _unpack, "int4_linear", None)
