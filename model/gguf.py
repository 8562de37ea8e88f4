"""Reads a GGUF file: the header at once, tensor data through a memory map.

Layout (little-endian; GGUF specification, versions 2 and 3):

    "GGUF" | version u32 | num_tensors u64 | num_keys u64 | keys ... | tensor infos ... | padding | data
    key:         name, type u32, value          string: length u64, bytes
    tensor info: name, num_dims u32, dims u64 (innermost first), type u32, offset u64 from the start of the data

Nothing in the file is believed: every length is checked against the bytes that are left before anything is
allocated, so that a damaged or hostile file costs one CorruptCheckpointError and no memory.
"""

import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from model.checkpoint_files import check_memory
from model.errors import CorruptCheckpointError, ModelNotFoundError, UnsupportedModelError
from model.gguf_quants import QUANT_TYPES, QuantType, dequantize

MAX_DIMS = 4
MAX_ARRAY_DEPTH = 4
MAX_NAME_BYTES = 65535
MIN_TENSOR_INFO_BYTES = 24
MIN_KEY_BYTES = 13

_STRING: Final = 8
_ARRAY: Final = 9
_BOOL: Final = 7
_SCALARS: Final[dict[int, struct.Struct]] = {
    code: struct.Struct("<" + letter)
    for code, letter in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "B",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies. `shape` is outermost first, as numpy has it; `start` and `num_bytes` are in the file."""

    name: str
    shape: tuple[int, ...]
    quant: QuantType
    start: int
    num_bytes: int


class GGUFFile:
    """An open GGUF file: `metadata`, `tensors` by name, and their dequantised values.

    Raises ModelNotFoundError, CorruptCheckpointError (damaged, truncated, contradictory) or UnsupportedModelError
    (a version, byte order, split file or tensor type that isn't read).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _map_file(path)
        cursor = _Cursor(self._map, path)
        num_tensors, num_keys = _read_counts(cursor)
        self.metadata: dict[str, Any] = {}
        for index in range(num_keys):
            name = cursor.string(f"the name of key {index}", MAX_NAME_BYTES)
            if name in self.metadata:
                cursor.fail(f"the key {name!r} comes twice")
            self.metadata[name] = cursor.value(cursor.u32(f"the type of {name!r}"), repr(name))
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise UnsupportedModelError(
                f"{path.name} is one part of a split GGUF: join its parts with `llama-gguf-split --merge`"
            )
        self.tensors = _read_tensors(cursor, num_tensors, self._alignment(cursor))
        self.header_bytes = cursor.position

    def _alignment(self, cursor: "_Cursor") -> int:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
            cursor.fail(f"general.alignment is {alignment!r}, not a power of two")
        return alignment

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self._map)

    def raw(self, start: int, num_bytes: int) -> bytes:
        """Bytes of the file, for a fingerprint of it."""
        return self._map[start : start + num_bytes]

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """The values of a tensor in its shape: float32, or float16 and (as uint16) bfloat16 where stored so."""
        info = self.tensors[name]
        data = np.frombuffer(self._map, np.uint8, info.num_bytes, info.start)
        return dequantize(data, info.quant).reshape(info.shape)


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < 24:
                raise CorruptCheckpointError(f"{path} is too short for a GGUF file: fetch it again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"{path} doesn't exist: give the path of a .gguf file") from error
    except OSError as error:
        check_memory(path, error)
        raise ModelNotFoundError(f"{path} can't be read ({error.strerror}): check its permissions") from error


def _read_counts(cursor: "_Cursor") -> tuple[int, int]:
    path = cursor.path
    if cursor.take(4, "the magic") != b"GGUF":
        raise CorruptCheckpointError(f"{path} doesn't start with GGUF: it is another kind of file, or damaged")
    version = cursor.u32("the version")
    if version in (2 << 24, 3 << 24):
        raise UnsupportedModelError(f"{path} is a big-endian GGUF file: convert it to little-endian")
    if version not in (2, 3):
        raise UnsupportedModelError(f"{path} has GGUF version {version}: versions 2 and 3 are read; convert it again")
    num_tensors, num_keys = cursor.u64("the tensor count"), cursor.u64("the key count")
    if num_tensors * MIN_TENSOR_INFO_BYTES + num_keys * MIN_KEY_BYTES > cursor.left:
        cursor.fail(f"it claims {num_tensors} tensors and {num_keys} keys, more than the file can hold")
    return num_tensors, num_keys


def _read_tensors(cursor: "_Cursor", num_tensors: int, alignment: int) -> dict[str, GGUFTensor]:
    infos = list(_read_infos(cursor, num_tensors))
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, quant, offset in infos:
        if name in tensors:
            cursor.fail(f"the tensor {name!r} comes twice")
        num_elements = 1
        for dim in shape:
            num_elements *= dim
        if shape[-1] % quant.block_elements:
            cursor.fail(f"{name!r} has rows of {shape[-1]}, not a multiple of {quant.name}'s {quant.block_elements}")
        num_bytes = num_elements // quant.block_elements * quant.block_bytes
        if offset % alignment:
            cursor.fail(f"{name!r} starts at offset {offset}, not a multiple of {alignment}")
        if data_start + offset + num_bytes > cursor.size:
            cursor.fail(
                f"{name!r} needs {num_bytes} bytes at {data_start + offset}, but the file ends at {cursor.size}: "
                "it was cut short"
            )
        tensors[name] = GGUFTensor(name, shape, quant, data_start + offset, num_bytes)
    return tensors


def _read_infos(cursor: "_Cursor", num_tensors: int) -> Iterator[tuple[str, tuple[int, ...], QuantType, int]]:
    for index in range(num_tensors):
        name = cursor.string(f"the name of tensor {index}", MAX_NAME_BYTES)
        num_dims = cursor.u32(f"the dimensions of {name!r}")
        if not 1 <= num_dims <= MAX_DIMS:
            cursor.fail(f"{name!r} has {num_dims} dimensions")
        shape = tuple(cursor.u64(f"a dimension of {name!r}") for _ in range(num_dims))[::-1]
        if min(shape) < 1:
            cursor.fail(f"{name!r} has the shape {shape}")
        code = cursor.u32(f"the type of {name!r}")
        if code not in QUANT_TYPES:
            known = ", ".join(quant.name for quant in QUANT_TYPES.values())
            raise UnsupportedModelError(
                f"{cursor.path.name}: {name!r} is stored as GGML type {code}, which isn't read: use one of {known}"
            )
        yield name, shape, QUANT_TYPES[code], cursor.u64(f"the offset of {name!r}")


class _Cursor:
    """A position in the file that never passes its end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.path = path
        self.position = 0
        self.size = len(data)
        self._data = data

    @property
    def left(self) -> int:
        return self.size - self.position

    def fail(self, what: str) -> NoReturn:
        raise CorruptCheckpointError(f"{self.path} is damaged at byte {self.position}: {what}; fetch it again")

    def take(self, num_bytes: int, what: str) -> bytes:
        if num_bytes > self.left:
            self.fail(f"{what} needs {num_bytes} bytes and {self.left} are left")
        start = self.position
        self.position += num_bytes
        return self._data[start : self.position]

    def u32(self, what: str) -> int:
        return int(_U32.unpack(self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack(self.take(8, what))[0])

    def string(self, what: str, limit: int | None = None) -> str:
        num_bytes = self.u64(f"the length of {what}")
        if limit is not None and num_bytes > limit:
            self.fail(f"{what} has {num_bytes} bytes, more than {limit}")
        try:
            return self.take(num_bytes, what).decode()
        except UnicodeDecodeError:
            self.fail(f"{what} isn't UTF-8")

    def value(self, code: int, what: str, depth: int = 0) -> Any:
        if code == _STRING:
            return self.string(f"the value of {what}")
        if code == _ARRAY:
            return self._array(what, depth)
        scalar = _SCALARS.get(code)
        if scalar is None:
            self.fail(f"{what} has the unknown type {code}")
        value = scalar.unpack(self.take(scalar.size, f"the value of {what}"))[0]
        return bool(value) if code == _BOOL else value

    def _array(self, what: str, depth: int) -> list[Any]:
        if depth == MAX_ARRAY_DEPTH:
            self.fail(f"{what} nests arrays more than {MAX_ARRAY_DEPTH} deep")
        code = self.u32(f"the element type of {what}")
        count = self.u64(f"the length of {what}")
        scalar = _SCALARS.get(code)
        if scalar is not None:
            data = self.take(count * scalar.size, what)
            values = list(struct.unpack(f"<{count}{scalar.format[1:]}", data))
            return [bool(value) for value in values] if code == _BOOL else values
        if code not in (_STRING, _ARRAY):
            self.fail(f"{what} has elements of the unknown type {code}")
        # An empty string takes 8 bytes and an empty array 12, so the count can't outgrow the file.
        if count * 8 > self.left:
            self.fail(f"{what} claims {count} elements and {self.left} bytes are left")
        if code == _STRING:
            return self._strings(count, what)
        return [self._array(what, depth + 1) for _ in range(count)]

    def _strings(self, count: int, what: str) -> list[str]:
        """The same as `string` for each element, without the calls: vocabularies have 10^5 of them."""
        data, size, position = self._data, self.size, self.position
        unpack = _U64.unpack_from
        values = []
        for index in range(count):
            start = position + 8
            position = start + unpack(data, position)[0] if start <= size else size + 1
            if position > size:
                self.fail(f"element {index} of {what} runs past the end of the file")
            # Vocabularies hold pieces of characters; whether that is allowed is for the tokenizer to say.
            values.append(data[start:position].decode("utf-8", "surrogateescape"))
        self.position = position
        return values
