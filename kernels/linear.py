"""Linear layers whose weights are laid out once, at load, for the products that serving makes."""

import torch

from kernels.checks import check_devices
from kernels.compiled import LANES, launch, product_address, threads_for
from kernels.dispatch import has_compiled
from kernels.errors import KernelInputError
from kernels.memory import empty_in_huge_pages

# Weights of one work item: they stay in a core's L2 cache while all rows pass over them.
ITEM_BYTES = 256 << 10


class PackedLinear:
    """y = x Wᵀ + b. Takes over the weight: drop your own reference after construction, or it is held twice.

    weight [out_features, in_features], bias [out_features] or None; both are converted to `dtype`, which is the
    weight's own by default. Exactly one copy of the weight is kept:

    - float32 on the CPU with compiled kernels: panels [ceil(out / 16), in, 16], so that 16 outputs are one stream of
      memory. One row runs at the speed of memory and many rows at that of arithmetic, from the same copy, and a row's
      result has the same bits whatever rows come with it.
    - otherwise: the plain matrix, multiplied by torch (where bits may change with the number of rows).
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
    ) -> None:
        check_weight(weight, bias)
        dtype = weight.dtype if dtype is None else dtype
        self.dtype = dtype
        self.out_features, self.in_features = weight.shape
        self.is_packed = has_compiled("linear") and dtype is torch.float32 and weight.device.type == "cpu"
        self._plain_bias = None if bias is None else bias.to(dtype)
        if not self.is_packed:
            self._weight = weight.to(dtype).contiguous()
            return
        padding = -self.out_features % LANES
        if padding:
            weight = torch.nn.functional.pad(weight, (0, 0, 0, padding))
        panels = weight.to(dtype).view(-1, LANES, self.in_features).transpose(1, 2)
        self._weight = empty_in_huge_pages(tuple(panels.shape))
        self._weight.copy_(panels)
        # Without a bias one vector of zeros serves all panels; a tile reads up to four vectors from it.
        if self._plain_bias is None:
            self._bias, self._bias_step = torch.zeros(4 * LANES), 0
        else:
            self._bias, self._bias_step = torch.nn.functional.pad(self._plain_bias, (0, padding)), 4 * LANES

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] → [rows, out_features]; rows of the result may be strided."""
        check_x(x, self.in_features, self.dtype)
        check_devices("x", x, weight=self._weight)
        if not self.is_packed:
            return torch.nn.functional.linear(x, self._weight, self._plain_bias)
        if not has_compiled("linear"):  # switched off after the weights were laid out
            return torch.nn.functional.linear(x, self.weight(), self._plain_bias)
        return self._launch(x if x.stride(1) == 1 else x.contiguous())

    def _launch(self, x: torch.Tensor) -> torch.Tensor:
        num_rows, num_panels = x.shape[0], self._weight.shape[0]
        out = torch.empty(num_rows, num_panels * LANES)
        if num_rows == 0:
            return out[:, : self.out_features]
        panel_bytes = 4 * LANES * self.in_features
        num_threads = threads_for(num_panels * panel_bytes * (1 + num_rows // 8))
        panels_per_item = max(1, min(ITEM_BYTES // panel_bytes, num_panels // (4 * num_threads)))
        launch(
            "linear",
            (
                x.data_ptr(), x.stride(0) * 4, num_rows, self._weight.data_ptr(), num_panels, panels_per_item,
                self._bias.data_ptr(), self._bias_step, out.data_ptr(), out.stride(0) * 4, self.in_features,
                product_address(),
            ),
            num_threads,
        )  # fmt: skip
        return out if out.shape[1] == self.out_features else out[:, : self.out_features]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight by id, [n, in_features]: the embedding of a model whose output layer is tied to it."""
        check_devices("ids", ids, weight=self._weight)
        if not self.is_packed:
            return torch.nn.functional.embedding(ids, self._weight)
        # Torch's indexing by a tensor would wake its own threads, which then spin in the way of ours for milliseconds.
        if not has_compiled("linear"):
            return torch.nn.functional.embedding(ids, self.weight())
        ids = ids.long().contiguous()
        check_ids(ids, self.out_features)
        out = torch.empty((ids.shape[0], self.in_features))
        launch(
            "gather_rows",
            (self._weight.data_ptr(), self.in_features, ids.data_ptr(), ids.shape[0], out.data_ptr()),
            threads_for(out.numel() * 4 * LANES),
        )
        return out

    def weight(self) -> torch.Tensor:
        """The weight as [out_features, in_features]; a copy where it is kept in panels."""
        if not self.is_packed:
            return self._weight
        return self._weight.transpose(1, 2).reshape(-1, self.in_features)[: self.out_features]


def check_weight(weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raises KernelInputError where these are not a layer's."""
    check_devices("weight", weight, bias=bias)
    if weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise KernelInputError(
            f"weight is {tuple(weight.shape)} and bias {None if bias is None else tuple(bias.shape)};"
            " they must be [out_features, in_features] and [out_features]"
        )


def check_x(x: torch.Tensor, in_features: int, dtype: torch.dtype) -> None:
    """Raises KernelInputError where x is no input of a layer."""
    if x.ndim != 2 or x.shape[1] != in_features or x.dtype != dtype:
        raise KernelInputError(f"x is {x.dtype} {tuple(x.shape)}; it must be {dtype} [rows, {in_features}]")


def check_ids(ids: torch.Tensor, num_rows: int) -> None:
    """Raises KernelInputError where one is no row's number."""
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_rows:
        raise KernelInputError(f"ids reach from {int(ids.min())} to {int(ids.max())}, rows from 0 to {num_rows - 1}")
