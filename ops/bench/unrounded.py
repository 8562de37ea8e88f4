"""Weights as if they had never been rounded: what a file of many bits would lose, measured on one of few.

A file of 4 bits comes back from int4 as it was, which says nothing of files that have more. So each weight is moved by
up to half a step of the rounding that it is about to get, at random: then the steps that it lay on are gone. The noise
hurts the model as much as the rounding that follows does; what is rounded is compared with the model with noise.
"""

import zlib
from collections.abc import Iterator, Mapping

import torch

from kernels.weight_formats import GROUP
from model.quantization import FORMATS, quantization_of_tables
from model.weights import EMBEDDING, LM_HEAD, LazyWeights, Shape


class UnroundedWeights(LazyWeights):
    """`weights` with noise in every matrix: the same for a name each time it is asked for, float32."""

    def __init__(self, weights: Mapping[str, torch.Tensor], quantization: str) -> None:
        self._weights = weights
        self._quantization = quantization

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._weights[name].float()
        if tensor.ndim != 2:
            return tensor
        is_table = name in (EMBEDDING, LM_HEAD)
        kind = quantization_of_tables(self._quantization) if is_table else self._quantization
        return _moved(tensor, 2 ** FORMATS[kind].num_bits - 1, zlib.crc32(name.encode()))

    def shape_of(self, name: str) -> Shape:
        """Its shape, without the noise."""
        return tuple(self._weights[name].shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _moved(weight: torch.Tensor, num_steps: int, seed: int) -> torch.Tensor:
    """[rows, n] with noise of up to half of what lies between two of a group's steps."""
    num_in = weight.shape[1]
    groups = torch.nn.functional.pad(weight, (0, -num_in % GROUP)).view(len(weight), -1, GROUP)
    least, most = groups.aminmax(dim=2, keepdim=True)
    noise = torch.rand(groups.shape, generator=torch.Generator().manual_seed(seed)) - 0.5
    return (groups + noise * (most - least) / num_steps).flatten(1)[:, :num_in].contiguous()
