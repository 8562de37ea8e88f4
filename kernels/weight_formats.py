"""How the weights of quantized linear layers are rounded, and how they lie in memory.

A weight is scale · integer + minimum, with a scale and a minimum (float16) for each 32 weights along in_features. It is
kept as panels, uint8 [ceil(out / 16), ceil(in / 32), bytes of a group]: for each 16 outputs and group 16 scales and 16
minima, then the integers, in quads of four k's 16 times. Sizes are padded with zeros.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from kernels.compiled import LANES
from kernels.memory import empty_in_huge_pages

# Values along in_features that share a scale and a minimum; as kernels/cpu/quantized_tile.py has it.
GROUP: Final = 32
# Panels whose weights are floats at once, where weights are quantized or torch multiplies: 8192 rows.
PANELS_AT_ONCE: Final = 512
_HALF_BYTES: Final = 2 * LANES


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Weights of a kind.

    name: as the setting calls it. num_bits: of an integer. quantize: float32 [rows, n * 32] → integers (in float32)
    [rows, n, 32], scales and minima (float16) [rows, n]; what isn't finite, or not in float16, gives NaN. pack: the
    integers as quads, uint8 [panels, n, 8, 16, 4], → their bytes [panels, n, num_bits, 16, 4]; unpack: back.
    linear_body: the name of the compiled product. gather_body: that of the look-up of rows, None where torch does it.
    """

    name: str
    num_bits: int
    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    pack: Callable[[torch.Tensor], torch.Tensor]
    unpack: Callable[[torch.Tensor], torch.Tensor]
    linear_body: str
    gather_body: str | None

    @property
    def bytes_per_weight(self) -> float:
        """With what its group has in common; without padding."""
        return self.num_bits / 8 + 4 / GROUP


def pack_panels(weight: torch.Tensor, form: WeightFormat) -> torch.Tensor:
    """The panels of a weight [out_features, in_features], made some thousand rows at a time, so that it exists twice
    nowhere."""
    num_out, num_in = weight.shape
    num_panels, num_groups = -(-num_out // LANES), -(-num_in // GROUP)
    shape = (num_panels, num_groups, 2 * _HALF_BYTES + 4 * LANES * form.num_bits)
    if weight.device.type == "cpu":
        panels = empty_in_huge_pages(shape, torch.uint8)
    else:
        panels = torch.empty(shape, dtype=torch.uint8, device=weight.device)
    for first in range(0, num_panels, PANELS_AT_ONCE):
        piece = panels[first : first + PANELS_AT_ONCE]
        rows = weight[first * LANES : (first + PANELS_AT_ONCE) * LANES].float()
        rows = torch.nn.functional.pad(rows, (0, num_groups * GROUP - num_in, 0, len(piece) * LANES - len(rows)))
        integers, *halves = form.quantize(rows)
        for at, half in zip((0, _HALF_BYTES), halves, strict=True):
            target = piece[..., at : at + _HALF_BYTES].view(torch.float16)
            target.copy_(half.view(-1, LANES, num_groups).transpose(1, 2))
        quads = integers.to(torch.uint8).view(-1, LANES, num_groups, GROUP // 4, 4)
        _vectors_of(piece).copy_(form.pack(quads.permute(0, 2, 3, 1, 4)))
    return panels


def open_panels(panels: torch.Tensor, form: WeightFormat) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Panels [n, groups, bytes of a group] → integers [n, 16, groups, 32], scales and minima [n, 16, groups]."""
    scales, minima = (
        panels[..., at : at + _HALF_BYTES].contiguous().view(torch.float16).transpose(1, 2) for at in (0, _HALF_BYTES)
    )
    return form.unpack(_vectors_of(panels)).permute(0, 3, 1, 2, 4).flatten(3), scales, minima


def dequantized(integers: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor) -> torch.Tensor:
    """[rows, groups, 32] and twice [rows, groups] → float32 [rows, groups * 32]."""
    return (integers.float() * scales[..., None].float() + minima[..., None].float()).flatten(1)


def _vectors_of(panels: torch.Tensor) -> torch.Tensor:
    """The integers of panels as they lie there, [n, groups, vectors, 16, 4]."""
    num_panels, num_groups, group_bytes = panels.shape
    num_vectors = (group_bytes - 2 * _HALF_BYTES) // (4 * LANES)
    return panels[..., 2 * _HALF_BYTES :].view(num_panels, num_groups, num_vectors, LANES, 4)


def _quantize_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """256 steps from the least to the largest of a group; the nearest for scales and minima as they are rounded."""
    groups = weight.view(len(weight), -1, GROUP)
    least, most = groups.aminmax(dim=2)
    minima = least.half()
    scales = ((most - minima) / 255).half()
    return nearest_integers(groups, scales, minima, 255), torch.where(minima.isfinite(), scales, torch.nan), minima


def nearest_integers(groups: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor, limit: int) -> torch.Tensor:
    """Of groups [..., 32] with scales and minima (float16) [...]: integers of 0 ... limit, in float32."""
    step = torch.where(scales > 0, scales, 1).float()
    return torch.round((groups - minima.float()[..., None]) / step[..., None]).clamp(0, limit).nan_to_num(0)


def _same(integers: torch.Tensor) -> torch.Tensor:
    return integers


INT8: Final = WeightFormat("int8", 8, _quantize_int8, _same, _same, "quantized_linear", "gather_quantized_rows")
