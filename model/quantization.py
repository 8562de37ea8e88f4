"""How the matrices of a model are kept: as they are, or quantized to fewer bits."""

from typing import Final

import torch

from kernels.linear import PackedLinear
from kernels.quantized_linear import BYTES_PER_WEIGHT, QuantizedLinear

QUANTIZATIONS: Final = ("none", "int8")

Linear = PackedLinear | QuantizedLinear


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, quantization: str) -> Linear:
    """A linear layer of x in `dtype`. Takes the weight over: drop your own reference to it."""
    if quantization == "none":
        return PackedLinear(weight, bias, dtype)
    return QuantizedLinear(weight, bias, dtype)


def make_table(weight: torch.Tensor, dtype: torch.dtype, quantization: str) -> torch.Tensor | QuantizedLinear:
    """An embedding table of its own, whose rows are looked up alone."""
    return weight if quantization == "none" else QuantizedLinear(weight, None, dtype)


def bytes_of_weights(num_weights: int, dtype: torch.dtype, quantization: str) -> int:
    """What so many weights take."""
    return int(num_weights * (dtype.itemsize if quantization == "none" else BYTES_PER_WEIGHT))
