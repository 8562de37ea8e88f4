"""How the matrices of a model are kept: as they are, or quantized to fewer bits."""

from typing import Final

import torch

from kernels.int4_weights import INT4
from kernels.linear import PackedLinear
from kernels.quantized_linear import QuantizedLinear
from kernels.weight_formats import INT8

QUANTIZATIONS: Final = ("none", "int8", "int4")
FORMATS: Final = {"int8": INT8, "int4": INT4}

Linear = PackedLinear | QuantizedLinear


def quantization_of_tables(quantization: str) -> str:
    """How the embeddings and the output layer of such a model are kept: with 4 bits they would cost it too much."""
    return "int8" if quantization == "int4" else quantization


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, quantization: str) -> Linear:
    """A linear layer of x in `dtype`. Takes the weight over: drop your own reference to it."""
    if quantization == "none":
        return PackedLinear(weight, bias, dtype)
    return QuantizedLinear(weight, bias, dtype, FORMATS[quantization])


def make_table(weight: torch.Tensor, dtype: torch.dtype, quantization: str) -> torch.Tensor | QuantizedLinear:
    """An embedding table of its own, whose rows are looked up alone."""
    return weight if quantization == "none" else QuantizedLinear(weight, None, dtype, FORMATS[quantization])


def bytes_of_weights(num_in_layers: int, num_in_tables: int, dtype: torch.dtype, quantization: str) -> int:
    """What so many weights take, of layers, and of the embeddings and the output layer."""
    parts = (num_in_layers, quantization), (num_in_tables, quantization_of_tables(quantization))
    return int(sum(count * _bytes_per_weight(dtype, kind) for count, kind in parts))


def _bytes_per_weight(dtype: torch.dtype, quantization: str) -> float:
    return dtype.itemsize if quantization == "none" else FORMATS[quantization].bytes_per_weight
