"""Opens a checkpoint: its configuration, and its weights under Hugging Face names."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.checkpoint_files import CheckpointKind, checkpoint_kind
from model.config import DTYPES, ModelConfig, config_from_directory
from model.dummy import dummy_config
from model.errors import CorruptCheckpointError, UnsupportedModelError
from model.gguf import GGUFFile
from model.gguf_config import ROPE_FACTORS, config_from_gguf, hf_name, hf_values
from model.gguf_convert import STAGE, ProgressCallback, cached_conversion
from model.safetensors_files import open_safetensors, safetensors_files, tensor_dtypes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A configuration and its weights by their Hugging Face names: tensors on the CPU, but for dummy ones."""

    config: ModelConfig
    weights: "Mapping[str, torch.Tensor]"


def load_config(path: Path | str, load_format: str = "auto") -> ModelConfig:
    """The configuration of a checkpoint, without torch and without its weights; with `dummy` it may have none.

    Raises ModelNotFoundError, CorruptCheckpointError or UnsupportedModelError.
    """
    path = Path(path)
    if load_format == "dummy":
        return dummy_config(path)
    if checkpoint_kind(path) is CheckpointKind.GGUF:
        return config_from_gguf(GGUFFile(path))
    return _directory_config(path)[0]


def load_checkpoint(
    path: Path | str,
    *,
    cache_dir: Path | None = None,
    dtype: str = "auto",
    progress: ProgressCallback | None = None,
    load_format: str = "auto",
    device: "torch.device | str" = "cpu",
) -> Checkpoint:
    """Open a directory with config.json and safetensors, or a .gguf file.

    Tensors of safetensors are views of the mapped files, made when they are asked for. A GGUF file is dequantised
    once into `cache_dir`, and mapped from there; without a `cache_dir` it is dequantised into memory.
    dtype: auto leaves each tensor as it is stored; a name of DTYPES converts it when it is asked for.
    progress is called with (stage, done, total) while a GGUF file is dequantised.
    load_format: `dummy` needs a config.json alone, and makes random weights on `device`; all others lie on the CPU.

    Raises ModelNotFoundError, CorruptCheckpointError, UnsupportedModelError or CheckpointCacheError. Whether the
    tensors are those that the configuration asks for is checked by the decoder that takes them.
    """
    path = Path(path)
    if dtype != "auto" and dtype not in DTYPES:
        raise UnsupportedModelError(f"dtype is {dtype!r}: use auto, {', '.join(DTYPES)}")
    if load_format == "dummy":
        return _dummy(dummy_config(path), dtype, device)
    if checkpoint_kind(path) is CheckpointKind.DIRECTORY:
        config, files = _directory_config(path)
        return Checkpoint(config, SafetensorsWeights(files, dtype))
    file = GGUFFile(path)
    config = config_from_gguf(file)
    if cache_dir is None:
        return Checkpoint(config, _dequantized(file, config, dtype, progress))
    return Checkpoint(config, _cached_weights(file, config, cache_dir, dtype, progress))


def _dummy(config: ModelConfig, dtype: str, device: "torch.device | str") -> Checkpoint:
    import torch

    from model.dummy_weights import DummyWeights

    return Checkpoint(
        config, DummyWeights(config, dtype=getattr(torch, config.dtype if dtype == "auto" else dtype), device=device)
    )


class SafetensorsWeights(Mapping[str, "torch.Tensor"]):
    """The tensors of some safetensors files, each mapped and converted when it is asked for."""

    def __init__(self, files: list[Path], dtype: str = "auto") -> None:
        self._files = [open_safetensors(path, "pt") for path in files]
        self._dtype = dtype
        self._file_of: dict[str, Any] = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> "torch.Tensor":
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        return _converted(tensor, self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def _converted(tensor: "torch.Tensor", dtype: str) -> "torch.Tensor":
    import torch

    return tensor if dtype == "auto" else tensor.to(getattr(torch, dtype))


def _directory_config(directory: Path) -> tuple[ModelConfig, list[Path]]:
    """The configuration, once the weight files are known to be there and readable."""
    config = config_from_directory(directory)  # first: an unsupported model is told before a missing file is
    files = safetensors_files(directory)
    first_dtype = next(iter(tensor_dtypes(files).values()), "float32")
    return (config_from_directory(directory, first_dtype) if first_dtype in DTYPES else config), files


def _cached_weights(
    file: GGUFFile, config: ModelConfig, cache_dir: Path, dtype: str, progress: ProgressCallback | None
) -> SafetensorsWeights:
    target = cached_conversion(file, config, cache_dir, progress)
    try:
        return SafetensorsWeights([target], dtype)
    except CorruptCheckpointError:
        # A disk that lost what was written: the cache is ours to make again, the GGUF file is sound.
        target.unlink(missing_ok=True)
        return SafetensorsWeights([cached_conversion(file, config, cache_dir, progress)], dtype)


def _dequantized(
    file: GGUFFile, config: ModelConfig, dtype: str, progress: ProgressCallback | None
) -> "dict[str, torch.Tensor]":
    import torch

    weights: dict[str, torch.Tensor] = {}
    names = [name for name in file.tensors if name != ROPE_FACTORS]
    for count, name in enumerate(names, start=1):
        tensor = torch.from_numpy(hf_values(name, file, config).copy())
        if file.tensors[name].quant.stored_as == "BF16":
            tensor = tensor.view(torch.bfloat16)
        weights[hf_name(name, file)] = _converted(tensor, dtype)
        if progress is not None:
            progress(STAGE, count, len(names))
    return weights
