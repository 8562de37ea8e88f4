"""Finds and opens the safetensors files of a checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from model.checkpoint_files import check_memory, found_in
from model.errors import CorruptCheckpointError, ModelNotFoundError, UnsupportedModelError
from model.json_files import read_json

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
DTYPES: Final = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def safetensors_files(directory: Path) -> list[Path]:
    """The weight files of a checkpoint, single or sharded. Raises what says how to get them where they are missing."""
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if not (directory / INDEX).is_file():
        raise _no_weights(directory)
    names = sorted(set(_weight_map(directory / INDEX).values()))
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise CorruptCheckpointError(
            f"{directory} lacks {len(missing)} of {len(names)} weight files, {missing[0]} first: fetch them"
        )
    return [directory / name for name in names]


def open_safetensors(path: Path, framework: str) -> Any:
    """An open safetensors file. Raises CorruptCheckpointError where it is damaged, else TooLittleMemoryError."""
    try:
        return safe_open(path, framework=framework)
    except (SafetensorError, OSError, RuntimeError) as error:  # the last is torch's, where it can't map the file
        check_memory(path, error)
        raise CorruptCheckpointError(f"{path} is damaged or cut short ({error}): fetch it again") from error


def tensor_dtypes(paths: list[Path]) -> dict[str, str]:
    """The dtype of every tensor, by name, in torch's words. Raises UnsupportedModelError for quantised ones."""
    dtypes: dict[str, str] = {}
    for path in paths:
        file = open_safetensors(path, "numpy")
        for name in file.keys():  # noqa: SIM118  (the file is no mapping)
            dtype = file.get_slice(name).get_dtype()
            if dtype not in DTYPES:
                raise UnsupportedModelError(
                    f"{path}: {name} has the type {dtype}: quantised safetensors aren't read; use the original "
                    "checkpoint or a GGUF file"
                )
            dtypes[name] = DTYPES[dtype]
    return dtypes


def _weight_map(path: Path) -> Mapping[str, str]:
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict) or not names or not all(_is_plain_name(name) for name in names.values()):
        raise CorruptCheckpointError(f"{path}: weight_map doesn't name files beside it; fetch it again")
    return names


def _is_plain_name(name: Any) -> bool:
    """Whether it stays in the directory: an index from elsewhere must not name other files of this machine."""
    return isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name


def _no_weights(directory: Path) -> Exception:
    names = [child.name for child in directory.iterdir()]
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        return UnsupportedModelError(
            f"{directory} has its weights as pickles, which can run code when they are loaded: write safetensors with "
            f"transformers, AutoModelForCausalLM.from_pretrained({str(directory)!r}).save_pretrained(...)"
        )
    if any(name.endswith(".safetensors") for name in names):
        return ModelNotFoundError(
            f"{directory} has neither {SINGLE} nor {INDEX}: fetch it; found {found_in(directory)}"
        )
    return ModelNotFoundError(f"{directory} has no weights ({SINGLE}): fetch them; found {found_in(directory)}")
