"""A GGUF file of the same weights in another type, for a peer that computes in the type that the file has.

It needs numpy and the `gguf` package, of whatever Python the peer runs in.
"""

import hashlib
import os
from pathlib import Path
from typing import Any, Final

from ops.bench.errors import BenchError

TYPES: Final = ("F32", "F16", "Q8_0", "Q4_1")
FOLDER: Final = "peers"


def converted(source: Path, type_name: str, cache_dir: Path) -> Path:
    """The file with every matrix in `type_name`, made from `source` where it isn't in `cache_dir` yet.

    What `source` has quantised is dequantised first; vectors stay in float32, as llama.cpp wants them.
    Raises BenchError where `source` is no GGUF file.
    """
    if source.suffix != ".gguf":
        raise BenchError(f"llama.cpp reads GGUF files, and {source} is none: name one with --model")
    seen = source.stat()
    key = hashlib.sha256(f"{source.resolve()} {seen.st_size} {seen.st_mtime_ns}".encode()).hexdigest()[:16]
    target = cache_dir / FOLDER / f"{source.stem}-{key}.{type_name}.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(f".{os.getpid()}.part")
        try:
            _write(source, type_name, part)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    return target


def _write(source: Path, type_name: str, target: Path) -> None:
    import gguf

    reader = gguf.GGUFReader(source)
    wanted = gguf.GGMLQuantizationType[type_name]
    writer = gguf.GGUFWriter(target, _text(reader, "general.architecture"))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        sub_type = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if type_name == "F32" else f"MOSTLY_{type_name}"])
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        kind = wanted if len(tensor.shape) > 1 else gguf.GGMLQuantizationType.F32
        # A tensor's shape is told with the fastest dimension first, an array's with the slowest.
        shaped = values.reshape(tuple(int(size) for size in reversed(tensor.shape)))
        writer.add_tensor(tensor.name, gguf.quantize(shaped, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _text(reader: Any, name: str) -> str:
    return str(reader.fields[name].contents())
