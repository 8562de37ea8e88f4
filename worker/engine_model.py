"""What an engine's model is, found out before its weights are read."""

from dataclasses import dataclass
from pathlib import Path

import torch

from model.config import ModelConfig
from model.kv_cache import kv_block_bytes
from model.kv_cache_dtype import pick_kv_dtype
from model.loader import load_config
from model.quantization import QUANTIZATIONS
from worker.engine_config import BLOCK_SIZES, EngineConfig
from worker.errors import StartupError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class EngineModel:
    """A checkpoint, where and in which numbers it is computed, and the numbers and block's bytes of its KV cache."""

    path: Path
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_bytes: int


def read_model(config: EngineConfig) -> EngineModel:
    """What `config` names. Raises StartupError, or ModelError where it can't be computed."""
    if config.block_size not in BLOCK_SIZES:
        raise StartupError(f"block_size is {config.block_size}: use one of {', '.join(map(str, BLOCK_SIZES))}")
    if config.quantization not in QUANTIZATIONS:
        raise StartupError(f"quantization is {config.quantization}: use one of {', '.join(QUANTIZATIONS)}")
    path = Path(config.model_path)
    device = _pick_device(config.device)
    model_config = load_config(path, config.load_format)
    dtype = _pick_dtype(config.dtype, model_config, device)
    kv_dtype = pick_kv_dtype(config.kv_cache_dtype, dtype, device)
    block_bytes = kv_block_bytes(model_config, config.block_size, kv_dtype)
    return EngineModel(path, model_config, device, dtype, kv_dtype, block_bytes)


def _pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise StartupError(
            "device is cuda, but torch finds no CUDA device: use --device cpu, or install a CUDA build of torch"
        )
    return torch.device(name)


def _pick_dtype(name: str, model_config: ModelConfig, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's own dtype on CUDA, and float32 on the CPU, where the fast kernels are float32."""
    if name == "auto":
        name = model_config.dtype if device.type == "cuda" else "float32"
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """As settings and checkpoints write it."""
    return str(dtype).removeprefix("torch.")


def fingerprint(config: EngineConfig, model: EngineModel, *, is_deterministic: bool) -> str:
    """A name for what decides the engine's numbers: model, dtypes, device, kernels."""
    name = model.path.stem
    if config.load_format == "dummy":
        name = f"dummy-{model.path.name}"
    kept = "/deterministic" if is_deterministic else ""
    numbers = dtype_name(model.dtype) + ("" if config.quantization == "none" else f"-{config.quantization}")
    if config.kv_cache_dtype != "auto":
        numbers += f"-kv-{config.kv_cache_dtype}"
    return f"{name}/{numbers}/{model.device.type}/torch-{torch.__version__}{kept}"
