"""Random weights, made on the device as they are asked for."""

import zlib
from collections.abc import Iterator

import torch

from model.config import ModelConfig
from model.weights import LazyWeights, Shape, expected_shapes, fill_randomly


class DummyWeights(LazyWeights):
    """Each tensor is made on the device when it is asked for, and is the same each time.

    Its numbers are a pure function of seed, name, shape, dtype and kind of device (torch's generators differ between
    these). They have a trained model's magnitudes: each layer keeps the scale of what goes in, and logits a spread of
    about one, so that they are finite in every dtype. dtype: None is the configuration's own.
    """

    def __init__(
        self,
        config: ModelConfig,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._shapes = expected_shapes(config)
        self._seed = seed
        self._dtype: torch.dtype = getattr(torch, config.dtype) if dtype is None else dtype
        self._device = torch.device(device)

    def __getitem__(self, name: str) -> torch.Tensor:
        # Of a seed the CPU's generator takes no more than 32 bits.
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        tensor = torch.empty(self._shapes[name], dtype=self._dtype, device=self._device)
        fill_randomly(name, tensor, generator)
        return tensor

    def shape_of(self, name: str) -> Shape:
        """Its shape, without making it."""
        return self._shapes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)
