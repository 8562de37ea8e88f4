"""Dequantises a GGUF file once, into a safetensors file that later starts map into memory."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from model.config import ModelConfig
from model.errors import CheckpointCacheError
from model.file_lock import locked
from model.gguf import GGUFFile, GGUFTensor
from model.gguf_config import ROPE_FACTORS, hf_name, hf_values

ProgressCallback = Callable[[str, int, int], None]
"""(stage, done, total), in bytes or whatever the stage counts."""

CONVERTER_VERSION: Final = 1
"""Raise it whenever the converted bytes change: it is part of the name of the cached file."""

STAGE: Final = "converting weights"
_DATA_ALIGNMENT: Final = 64
_ITEM_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}
_NUM_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 1 << 16


def cached_conversion(
    file: GGUFFile, config: ModelConfig, cache_dir: Path, progress: ProgressCallback | None = None
) -> Path:
    """The safetensors file that holds this GGUF file's weights under Hugging Face names; made where missing.

    The file appears whole or not at all, and of several processes one makes it while the others wait. Raises
    CheckpointCacheError where there is no room or no permission to write.
    """
    folder = cache_dir / "weights"
    target = folder / f"{file.path.stem}-{_fingerprint(file)}.safetensors"
    if target.is_file():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(target.with_suffix(".lock")):
            if not target.is_file():
                _convert(file, config, target, progress)
    except OSError as error:
        raise CheckpointCacheError(
            f"the converted weights can't be written to {folder} ({error.strerror or error}): "
            "free some space there, or choose another cache directory"
        ) from error
    return target


def _fingerprint(file: GGUFFile) -> str:
    """Names the content without reading gigabytes: the header, samples of the data, size and time of change."""
    stat = file.path.stat()
    digest = hashlib.sha256(f"{CONVERTER_VERSION} {stat.st_size} {stat.st_mtime_ns}".encode())
    digest.update(file.raw(0, file.header_bytes))
    for index in range(_NUM_SAMPLES):
        digest.update(file.raw(file.size * index // _NUM_SAMPLES, _SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _convert(file: GGUFFile, config: ModelConfig, target: Path, progress: ProgressCallback | None) -> None:
    tensors = [info for info in file.tensors.values() if info.name != ROPE_FACTORS]
    header = _header(file, tensors)
    total = sum(_stored_bytes(info) for info in tensors)
    free = shutil.disk_usage(target.parent).free
    if free < len(header) + total:
        raise CheckpointCacheError(
            f"the converted weights need {total >> 20} MiB in {target.parent} and {free >> 20} MiB are free: "
            "free some space there, or choose another cache directory"
        )
    # The lock is held, so a partial file is a leftover of a process that died: it is written over.
    partial = target.with_suffix(".partial")
    try:
        with partial.open("wb") as out:
            out.write(header)
            done = 0
            for info in tensors:
                out.write(hf_values(info.name, file, config).data)
                done += _stored_bytes(info)
                if progress is not None:
                    progress(STAGE, done, total)
            out.flush()
            os.fsync(out.fileno())
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)


def _header(file: GGUFFile, tensors: list[GGUFTensor]) -> bytes:
    """A safetensors header: its length as u64, then JSON, padded with spaces so that the data starts aligned."""
    entries: dict[str, Any] = {"__metadata__": {"source": file.path.name, "converter": str(CONVERTER_VERSION)}}
    offset = 0
    for info in tensors:
        end = offset + _stored_bytes(info)
        entries[hf_name(info.name, file)] = {
            "dtype": info.quant.stored_as,
            "shape": info.shape,
            "data_offsets": (offset, end),
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _DATA_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _stored_bytes(info: GGUFTensor) -> int:
    num_elements = 1
    for dim in info.shape:
        num_elements *= dim
    return num_elements * _ITEM_BYTES[info.quant.stored_as]
