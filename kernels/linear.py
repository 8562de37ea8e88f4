"""Linear layers whose weights are laid out once, at load, for the products that serving makes."""

import torch


class PackedLinear:
    """y = x Wᵀ + b. Takes over the weight: the caller drops its own reference after construction.

    weight [out_features, in_features], bias [out_features] or None; both are converted to `dtype`.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
    ) -> None:
        dtype = weight.dtype if dtype is None else dtype
        self.out_features, self.in_features = weight.shape
        self._weight = weight.to(dtype).contiguous()
        self._bias = None if bias is None else bias.to(dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] → [rows, out_features]."""
        return torch.nn.functional.linear(x, self._weight, self._bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight by id, [n, in_features]: the embedding of a model whose output layer is tied to it."""
        return torch.nn.functional.embedding(ids, self._weight)

    def weight(self) -> torch.Tensor:
        """The weight as [out_features, in_features]; a copy where it is kept in another layout."""
        return self._weight
