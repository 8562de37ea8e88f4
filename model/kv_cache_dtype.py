"""In which numbers keys and values are kept: the model's own, or 8 bits, and what those are multiplied by."""

import math
from collections.abc import Mapping
from typing import Final

import torch

from kernels.attention_inputs import FP8
from kernels.cache_dtype import check_cache_dtype
from kernels.errors import KernelInputError
from model.errors import CorruptCheckpointError, UnsupportedCacheError

# `auto` is the model's own dtype.
KV_CACHE_DTYPES: Final = ("auto", "fp8_e4m3")

# How checkpoints call the scale of a layer's keys or values, the first that is there.
_SCALE_NAMES: Final = {
    "k_scale": ("self_attn.k_scale", "self_attn.k_proj.k_scale"),
    "v_scale": ("self_attn.v_scale", "self_attn.v_proj.v_scale"),
}
_SUFFIXES: Final = tuple(f".{name}" for names in _SCALE_NAMES.values() for name in names)


def pick_kv_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The cache's dtype, by one of KV_CACHE_DTYPES and the model's dtype.

    Raises UnsupportedCacheError for another name, and where the device's kernels can't read and write such a cache.
    """
    if name not in KV_CACHE_DTYPES:
        raise UnsupportedCacheError(f"kv_cache_dtype is {name}: use {' or '.join(KV_CACHE_DTYPES)}")
    kv_dtype = dtype if name == "auto" else FP8
    try:
        check_cache_dtype(kv_dtype, device)
    except KernelInputError as error:
        raise UnsupportedCacheError(f"kv_cache_dtype is {name}: {error}") from error
    return kv_dtype


def is_kv_scale(tensor_name: str) -> bool:
    """Whether a checkpoint's tensor of this name is the scale of some layer's keys or values."""
    return tensor_name.endswith(_SUFFIXES)


def kv_scales(weights: Mapping[str, torch.Tensor], layer: int, kv_dtype: torch.dtype) -> tuple[float, float]:
    """(k_scale, v_scale) of a layer: the checkpoint's for a cache in 8 bits, 1 where it has none or none is needed.

    Raises CorruptCheckpointError for one that is no number above 0.
    """
    if kv_dtype is not FP8:
        return 1.0, 1.0
    k_scale, v_scale = (_scale(weights, layer, names) for names in _SCALE_NAMES.values())
    return k_scale, v_scale


def _scale(weights: Mapping[str, torch.Tensor], layer: int, names: tuple[str, ...]) -> float:
    for name in (f"model.layers.{layer}.{name}" for name in names):
        if name not in weights:
            continue
        tensor = weights[name]
        value = float(tensor.item()) if tensor.numel() == 1 else math.nan
        if not 0 < value < math.inf:
            found = value if tensor.numel() == 1 else f"{tensor.numel()} numbers"
            raise CorruptCheckpointError(f"the checkpoint's {name} is {found}: it must be one number above 0")
        return value
    return 1.0
