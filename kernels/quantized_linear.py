"""Linear layers whose weights are integers of few bits, for decoding at fewer bytes and by integer products."""

from collections.abc import Iterator
from typing import Final

import torch

from kernels.checks import check_devices
from kernels.compiled import LANES, launch, scratch, threads_for
from kernels.dispatch import has_compiled, tell_fallback
from kernels.linear import ITEM_BYTES, check_ids, check_weight, check_x
from kernels.weight_formats import GROUP, INT8, PANELS_AT_ONCE, WeightFormat, dequantized, open_panels, pack_panels

# The largest integer of a quantized x; a row below MIN_MAGNITUDE counts as zeros. As kernels/cpu has them.
X_LIMIT: Final = 127 * 256
MIN_MAGNITUDE: Final = 1e-30
# Up to here each thread quantizes x for itself, which takes less time (3 us) than a launch of its own.
MAX_OWN_ELEMENTS: Final = 16384
# Into how many parts for each thread the panels that are left are cut, of which a thread claims one at a time.
SHARES_PER_THREAD: Final = 2
_LINE_BYTES: Final = 64


class QuantizedLinear:
    """y = x q(W)ᵀ + b, where q rounds as `form` says, with a scale and a minimum for each 32 weights along in_features.

    Called as a PackedLinear. weight [out_features, in_features] and bias are float; `dtype` is that of x, of the result
    and of the bias. x becomes integers of 16 bits for the product, with a scale for each row, which loses next to
    nothing: each row's own, so that no other row has a part in it. With the compiled kernels a row's result has the
    same bits whatever rows come with it: products are of integers and exact within a group, and groups are added in
    order. Torch computes the same from the dequantized numbers, slowly, where those don't run: without numba, in
    another dtype, on a GPU. A row of x that isn't finite gives NaN.

    The weight is kept once, in panels (weight_formats.py).
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        form: WeightFormat = INT8,
    ) -> None:
        check_weight(weight, bias)
        self.dtype = weight.dtype if dtype is None else dtype
        self.out_features, self.in_features = weight.shape
        self._num_groups = -(-self.in_features // GROUP)
        self._padded = self._num_groups * GROUP
        self._row_bytes = _row_bytes(self._num_groups)
        self._form = form
        self._panels = pack_panels(weight, form)
        self._num_panels, self._panel_bytes = len(self._panels), self._panels.stride(0)
        self._has_kernel = self.dtype is torch.float32 and self._panels.device.type == "cpu"
        self._plain_bias = None if bias is None else bias.to(self.dtype)
        # Without a bias one vector of zeros serves all panels.
        if self._plain_bias is None:
            self._bias, self._bias_step = torch.zeros(LANES), 0
        else:
            padding = self._num_panels * LANES - self.out_features
            self._bias, self._bias_step = torch.nn.functional.pad(self._plain_bias.float(), (0, padding)), 4 * LANES

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] → [rows, out_features]; rows of the result may be strided."""
        check_x(x, self.in_features, self.dtype)
        check_devices("x", x, weight=self._panels)
        if self._is_compiled():
            return self._launch(x)
        return self._with_torch(x)

    def _is_compiled(self) -> bool:
        if self._has_kernel and has_compiled("linear"):
            return True
        tell_fallback("linear", f"{self._form.name} weights are dequantized at each call ({self._why_not_compiled()})")
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
        num_rows, num_panels = x.shape[0], self._num_panels
        out = torch.empty(num_rows, num_panels * LANES)
        if num_rows == 0:
            return out[:, : self.out_features]
        num_threads = threads_for(num_panels * self._panel_bytes * (1 + num_rows // 8))
        is_own = num_rows * self._padded <= MAX_OWN_ELEMENTS
        all_bytes = num_rows * self._row_bytes
        working = scratch(all_bytes * (num_threads if is_own else 1) + _LINE_BYTES)
        quantized = -(-working.data_ptr() // _LINE_BYTES) * _LINE_BYTES
        arguments = (
            x.data_ptr(), x.stride(0) * 4, num_rows, quantized, self._row_bytes, self._num_groups,
            self._panels.data_ptr(), self._panel_bytes, num_panels, max(1, ITEM_BYTES // self._panel_bytes),
            SHARES_PER_THREAD * num_threads, self._bias.data_ptr(), self._bias_step, out.data_ptr(),
            num_panels * LANES * 4, all_bytes if is_own else 0,
        )  # fmt: skip
        if not is_own:
            launch("quantize_rows", arguments, threads_for(num_rows * self._padded * 8))
        launch(self._form.linear_body, arguments, num_threads)
        return out if num_panels * LANES == self.out_features else out[:, : self.out_features]

    def _with_torch(self, x: torch.Tensor) -> torch.Tensor:
        x = round_trip(x.float()).to(self.dtype)
        pieces = [torch.nn.functional.linear(x, weight.to(self.dtype)) for weight in self._pieces()]
        out = torch.cat(pieces, dim=1)[:, : self.out_features]
        return out if self._plain_bias is None else out + self._plain_bias

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight by id, dequantized, [n, in_features]: an embedding table."""
        check_devices("ids", ids, weight=self._panels)
        ids = ids.long().contiguous()
        if ids.device.type == "cpu":  # elsewhere the host would wait for the device, which a captured graph can't
            check_ids(ids, self.out_features)
        if self._form.gather_body is None or not self._is_compiled():
            lanes, every = ids % LANES, torch.arange(len(ids), device=ids.device)
            parts = [part[every, lanes] for part in open_panels(self._panels[ids // LANES], self._form)]
            return dequantized(*parts)[:, : self.in_features].to(self.dtype)
        out = torch.empty((ids.shape[0], self._padded))
        launch(
            self._form.gather_body,
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
            yield dequantized(*(part.flatten(0, 1) for part in open_panels(panels, self._form)))[:, : self.in_features]


def quantize_x(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [rows, n] → integers of -32512 ... 32512 (in float32) [rows, n] and their scales [rows, 1].

    A row that isn't finite has the scale NaN and integers of 0; a row of zeros the scale 0.
    """
    largest = x.abs().amax(dim=1, keepdim=True)
    is_usable = (largest >= MIN_MAGNITUDE) & largest.isfinite()
    # Not X_LIMIT / largest, which torch takes as X_LIMIT * (1 / largest).
    factor = torch.where(is_usable, torch.full_like(largest, X_LIMIT) / largest, 0.0)
    integers = torch.where(is_usable, torch.round(x * factor), 0.0)
    scales = torch.where(is_usable, largest / X_LIMIT, 0.0)
    return integers, torch.where(largest.isfinite(), scales, torch.nan)


def round_trip(x: torch.Tensor) -> torch.Tensor:
    """x float32 [rows, in_features] as the products see it: quantized and dequantized."""
    integers, scales = quantize_x(x)
    return integers * scales


def _row_bytes(num_groups: int) -> int:
    """Bytes of a quantized row of x, whole cache lines: integers, a sum for each group, the scale."""
    return -(-(num_groups * (2 * GROUP + 4) + 4) // _LINE_BYTES) * _LINE_BYTES
