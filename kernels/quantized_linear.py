"""Linear layers whose weights are int8, for decoding at a quarter of the bytes and integer products."""

from collections.abc import Iterator
from typing import Final

import torch

from kernels.compiled import LANES, launch, scratch, threads_for
from kernels.dispatch import has_compiled, tell_fallback
from kernels.linear import ITEM_BYTES, check_ids, check_weight, check_x
from kernels.memory import empty_in_huge_pages

# Values along in_features that share a scale; as kernels/cpu/quantized_tile.py has it.
GROUP: Final = 32
LIMIT: Final = 127
ZERO_POINT: Final = 128
BYTES_PER_WEIGHT: Final = 1 + 4 / GROUP
# Below this a group of x counts as zeros: 127 / maximum must be finite.
MIN_MAXIMUM: Final = 1e-30
# Up to here each thread quantizes x for itself, which takes less time than a launch of its own.
MAX_OWN_ELEMENTS: Final = 4096
# Panels whose weights are floats at once, where weights are quantized or torch multiplies: 8192 rows.
PANELS_AT_ONCE: Final = 512
_SCALE_BYTES: Final = 4 * LANES
_LINE_BYTES: Final = 64


class QuantizedLinear:
    """y = q(x) q(W)ᵀ + b, where q rounds to whole multiples (-127 ... 127) of a scale of each group of 32 along k.

    Called as a PackedLinear. weight [out_features, in_features] and bias are float; `dtype` is that of x, of the result
    and of the bias. A scale is the group's largest magnitude / 127, in a weight once for all, in a row of x whenever it
    comes: a row's own, so that no other row has a part in it. Products within a group are of integers and exact, groups
    are added in order: so with the compiled kernels a row's result has the same bits whatever rows come with it. Torch
    computes the same from the dequantized numbers, slowly, where those don't run: without numba, in another dtype, on a
    GPU. A row of x that isn't finite gives NaN.

    The weight is kept once, as uint8 [ceil(out / 16), ceil(in / 32), 64 + 512]: for each 16 outputs and group 16 scales
    (float32), then for each four k's 16 times their four bytes, with 128 added. Sizes are padded with zeros.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
    ) -> None:
        check_weight(weight, bias)
        self.dtype = weight.dtype if dtype is None else dtype
        self.out_features, self.in_features = weight.shape
        self._num_groups = -(-self.in_features // GROUP)
        self._padded = self._num_groups * GROUP
        self._panels = _packed(weight)
        self._plain_bias = None if bias is None else bias.to(self.dtype)
        # Without a bias one vector of zeros serves all panels.
        if self._plain_bias is None:
            self._bias, self._bias_step = torch.zeros(LANES), 0
        else:
            padding = len(self._panels) * LANES - self.out_features
            self._bias, self._bias_step = torch.nn.functional.pad(self._plain_bias.float(), (0, padding)), 4 * LANES

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] → [rows, out_features]; rows of the result may be strided."""
        check_x(x, self.in_features, self.dtype)
        if self._is_compiled():
            return self._launch(x)
        return self._with_torch(x)

    def _is_compiled(self) -> bool:
        if self.dtype is torch.float32 and self._panels.device.type == "cpu" and has_compiled("linear"):
            return True
        tell_fallback("linear", f"int8 weights are dequantized at each call ({self._why_not_compiled()})")
        return False

    def _why_not_compiled(self) -> str:
        if self._panels.device.type != "cpu":
            return f"on {self._panels.device.type} there is no kernel for them"
        if self.dtype is not torch.float32:
            return f"the kernel takes float32, not {str(self.dtype).removeprefix('torch.')}"
        return "the compiled kernel is switched off, or numba is missing"

    def _launch(self, x: torch.Tensor) -> torch.Tensor:
        if self._padded != self.in_features:
            x = torch.nn.functional.pad(x, (0, self._padded - self.in_features))
        elif x.stride(1) != 1:
            x = x.contiguous()
        num_rows, num_panels = x.shape[0], len(self._panels)
        out = torch.empty((num_rows, num_panels * LANES))
        if num_rows == 0:
            return out[:, : self.out_features]
        panel_bytes = self._panels.stride(0)
        num_threads = threads_for(num_panels * panel_bytes * (1 + num_rows // 8))
        panels_per_item = max(1, min(ITEM_BYTES // panel_bytes, num_panels // (4 * num_threads)))
        row_bytes = _row_bytes(self._num_groups)
        is_own = num_rows * self._padded <= MAX_OWN_ELEMENTS
        working = scratch(row_bytes * num_rows * (num_threads if is_own else 1) + _LINE_BYTES)
        quantized = -(-working.data_ptr() // _LINE_BYTES) * _LINE_BYTES
        arguments = (
            x.data_ptr(), x.stride(0) * 4, num_rows, quantized, row_bytes, self._num_groups, self._panels.data_ptr(),
            panel_bytes, num_panels, panels_per_item, self._bias.data_ptr(), self._bias_step, out.data_ptr(),
            out.stride(0) * 4, row_bytes * num_rows if is_own else 0,
        )  # fmt: skip
        if not is_own:
            launch("quantize_rows", arguments, threads_for(num_rows * self._padded * 8))
        launch("quantized_linear", arguments, num_threads)
        return out if out.shape[1] == self.out_features else out[:, : self.out_features]

    def _with_torch(self, x: torch.Tensor) -> torch.Tensor:
        x = round_trip(x.float()).to(self.dtype)
        pieces = [torch.nn.functional.linear(x, weight.to(self.dtype)) for weight in self._pieces()]
        out = torch.cat(pieces, dim=1)[:, : self.out_features]
        return out if self._plain_bias is None else out + self._plain_bias

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight by id, dequantized, [n, in_features]: an embedding table."""
        ids = ids.long().contiguous()
        check_ids(ids, self.out_features)
        if not self._is_compiled():
            lanes = ids % LANES
            scales, integers = _opened(self._panels[ids // LANES])
            every = torch.arange(len(ids), device=ids.device)
            return _dequantized(integers[every, lanes], scales[every, lanes])[:, : self.in_features].to(self.dtype)
        out = torch.empty((ids.shape[0], self._padded))
        launch(
            "gather_quantized_rows",
            (self._panels.data_ptr(), self._num_groups, ids.data_ptr(), ids.shape[0], out.data_ptr()),
            threads_for(out.numel() * LANES),
        )
        return out if self._padded == self.in_features else out[:, : self.in_features].contiguous()

    def weight(self) -> torch.Tensor:
        """The weight as [out_features, in_features], dequantized: a copy."""
        return torch.cat(list(self._pieces()))[: self.out_features].to(self.dtype)

    def _pieces(self) -> Iterator[torch.Tensor]:
        """The weight in float32, some thousand rows at a time; the last ones may be padding."""
        for panels in torch.split(self._panels, PANELS_AT_ONCE):
            scales, integers = _opened(panels)
            yield _dequantized(integers.flatten(0, 1), scales.flatten(0, 1))[:, : self.in_features]


def quantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [rows, groups * 32] → integers (in float32) [rows, groups, 32] and their scales [rows, groups].

    A group that isn't finite has the scale NaN and integers of 0; a group of zeros the scale 0.
    """
    groups = values.view(len(values), values.shape[1] // GROUP, GROUP)
    maximum = groups.abs().amax(dim=2)
    is_usable = (maximum >= MIN_MAXIMUM) & maximum.isfinite()
    factor = torch.where(is_usable, LIMIT / maximum, 0.0)
    integers = torch.where(is_usable[..., None], torch.round(groups * factor[..., None]), 0.0)
    scales = torch.where(is_usable, maximum / LIMIT, 0.0)
    return integers, torch.where(maximum.isfinite(), scales, torch.nan)


def round_trip(x: torch.Tensor) -> torch.Tensor:
    """x float32 [rows, in_features] as the products see it: quantized and dequantized."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP))
    return _dequantized(*quantize(padded))[:, : x.shape[1]]


def _dequantized(integers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[rows, groups, 32] and [rows, groups] → float32 [rows, groups * 32]."""
    return (integers.float() * scales[..., None]).flatten(1)


def _packed(weight: torch.Tensor) -> torch.Tensor:
    """The panels of a weight, made some thousand rows at a time, so that it exists twice nowhere."""
    num_out, num_in = weight.shape
    num_panels, num_groups = -(-num_out // LANES), -(-num_in // GROUP)
    shape = (num_panels, num_groups, _SCALE_BYTES + LANES * GROUP)
    is_cpu = weight.device.type == "cpu"
    panels = (
        empty_in_huge_pages(shape, torch.uint8)
        if is_cpu
        else torch.empty(shape, dtype=torch.uint8, device=weight.device)
    )
    for first in range(0, num_panels, PANELS_AT_ONCE):
        piece = panels[first : first + PANELS_AT_ONCE]
        rows = weight[first * LANES : (first + PANELS_AT_ONCE) * LANES].float()
        rows = torch.nn.functional.pad(rows, (0, num_groups * GROUP - num_in, 0, len(piece) * LANES - len(rows)))
        integers, scales = quantize(rows)
        quads = (integers + ZERO_POINT).to(torch.uint8).view(-1, LANES, num_groups, GROUP // 4, 4)
        piece[..., :_SCALE_BYTES].view(torch.float32).copy_(scales.view(-1, LANES, num_groups).transpose(1, 2))
        _quads_of(piece).copy_(quads.permute(0, 2, 3, 1, 4))
    return panels


def _opened(panels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Panels [n, groups, 576] → scales [n, 16, groups] and integers, int16, [n, 16, groups, 32]."""
    scales = panels[..., :_SCALE_BYTES].contiguous().view(torch.float32).transpose(1, 2)
    quads = _quads_of(panels).permute(0, 3, 1, 2, 4)
    return scales, quads.flatten(3).to(torch.int16) - ZERO_POINT


def _quads_of(panels: torch.Tensor) -> torch.Tensor:
    """The integers of panels as they lie there, [n, groups, 8, 16, 4]."""
    return panels[..., _SCALE_BYTES:].view(*panels.shape[:2], GROUP // 4, LANES, 4)


def _row_bytes(num_groups: int) -> int:
    """Bytes of a quantized row of x, whole cache lines."""
    from kernels.cpu.dot import QUAD_BYTES
    from kernels.cpu.quantized_tile import FACT_BYTES

    return -(-num_groups * (GROUP // 4 * QUAD_BYTES + FACT_BYTES) // _LINE_BYTES) * _LINE_BYTES
