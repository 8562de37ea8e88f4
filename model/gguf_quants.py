"""Dequantises GGML blocks with numpy: value = scale * integer + offset, in float32 and in GGML's order of operations.

A tensor is a run of blocks. Each block is a packed record (`layout`) of half-precision scales and of integers of 2
to 8 bits. Where integers are narrower than a byte, a run of `width` bytes holds 8 / bits runs of `width` integers:

    width 16, 4 bits:   byte i of the run = integer i | integer (i + 16) << 4
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Blocks = npt.NDArray[Any]

# Blocks per pass: temporaries of some MB, so that a tensor of gigabytes needs no copies of its own size.
CHUNK_VALUES: Final = 1 << 18

# The 16 levels of the non-linear 4-bit types.
IQ4_LEVELS: Final = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


@dataclass(frozen=True, slots=True)
class QuantType:
    """How GGML stores a tensor: `block_elements` values in `block_bytes` bytes.

    `stored_as` is the safetensors dtype that holds the dequantised values without loss.
    """

    name: str
    block_elements: int
    layout: np.dtype[Any]
    unpack: Callable[[Blocks], npt.NDArray[Any]]
    stored_as: str = "F32"

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.layout.itemsize


def dequantize(data: Bytes, quant: QuantType) -> npt.NDArray[Any]:
    """The values of whole blocks, flat: float32; float16 for F16; the bits as uint16 for BF16.

    data: [num_blocks * quant.block_bytes] uint8. Nothing is mutated; F32, F16 and BF16 are views of `data`.
    """
    blocks = data.view(quant.layout)
    if quant.block_elements == 1:
        return blocks
    values = np.empty((len(blocks), quant.block_elements), np.float32)
    step = max(1, CHUNK_VALUES // quant.block_elements)
    for start in range(0, len(blocks), step):
        values[start : start + step] = quant.unpack(blocks[start : start + step]).reshape(-1, quant.block_elements)
    return values.reshape(-1)


def _split(packed: Bytes, width: int, bits: int) -> Bytes:
    """[n, num_bytes] to [n, num_bytes * 8 / bits]: the integers of each run of `width` bytes, lowest bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = packed.reshape(len(packed), -1, 1, width) >> shifts
    return (runs & np.uint8((1 << bits) - 1)).reshape(len(packed), -1)


def _f32(values: npt.NDArray[Any]) -> Floats:
    return values.astype(np.float32)


def _column(values: npt.NDArray[Any]) -> Floats:
    return values.astype(np.float32)[:, None]


def _fifth_bit(blocks: Blocks) -> Bytes:
    return np.unpackbits(blocks["high"], axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Blocks) -> Floats:
    return _column(blocks["d"]) * (_f32(_split(blocks["low"], 16, 4)) - 8)


def _q4_1(blocks: Blocks) -> Floats:
    return _column(blocks["d"]) * _f32(_split(blocks["low"], 16, 4)) + _column(blocks["m"])


def _q5_0(blocks: Blocks) -> Floats:
    return _column(blocks["d"]) * (_f32(_split(blocks["low"], 16, 4) | _fifth_bit(blocks)) - 16)


def _q5_1(blocks: Blocks) -> Floats:
    return _column(blocks["d"]) * _f32(_split(blocks["low"], 16, 4) | _fifth_bit(blocks)) + _column(blocks["m"])


def _q8_0(blocks: Blocks) -> Floats:
    return _column(blocks["d"]) * _f32(blocks["low"])


def _iq4_nl(blocks: Blocks) -> Floats:
    return _column(blocks["d"]) * IQ4_LEVELS[_split(blocks["low"], 16, 4)]


def _grouped(scales: Floats, integers: npt.NDArray[Any]) -> Floats:
    """Multiply [n, 256] integers by [n, num_groups] scales, each for its run of 256 / num_groups."""
    n, num_groups = scales.shape
    grouped: Floats = scales[:, :, None] * integers.reshape(n, num_groups, -1).astype(np.float32)
    return grouped


def _q2_k(blocks: Blocks) -> Floats:
    scales = _column(blocks["d"]) * _f32(blocks["scales"] & 15)
    mins = _column(blocks["m"]) * _f32(blocks["scales"] >> 4)
    return _grouped(scales, _split(blocks["low"], 32, 2)) - mins[:, :, None]


def _q3_k(blocks: Blocks) -> Floats:
    packed = blocks["scales"]
    six_bits = _split(packed[:, :8], 8, 4) | _split(packed[:, 8:], 4, 2) << np.uint8(4)
    scales = _column(blocks["d"]) * (_f32(six_bits) - 32)
    # A high bit of 1 stands for an offset of 0, a 0 for -4.
    integers = (_split(blocks["low"], 32, 2) | _split(blocks["high"], 32, 1) << np.uint8(2)).astype(np.int8) - np.int8(
        4
    )
    return _grouped(scales, integers)


def _scales_and_mins(blocks: Blocks) -> tuple[Floats, Floats]:
    """The eight 6-bit scales and minima that Q4_K and Q5_K pack into 12 bytes."""
    first, second, third = np.split(blocks["scales"], 3, axis=1)
    scales = np.concatenate([first & 63, third & 15 | (first >> 6) << 4], axis=1)
    mins = np.concatenate([second & 63, third >> 4 | (second >> 6) << 4], axis=1)
    return _column(blocks["d"]) * _f32(scales), _column(blocks["m"]) * _f32(mins)


def _q4_k(blocks: Blocks) -> Floats:
    scales, mins = _scales_and_mins(blocks)
    return _grouped(scales, _split(blocks["low"], 32, 4)) - mins[:, :, None]


def _q5_k(blocks: Blocks) -> Floats:
    scales, mins = _scales_and_mins(blocks)
    integers = _split(blocks["low"], 32, 4) | _split(blocks["high"], 32, 1) << np.uint8(4)
    return _grouped(scales, integers) - mins[:, :, None]


def _q6_k(blocks: Blocks) -> Floats:
    scales = _column(blocks["d"]) * _f32(blocks["scales"])
    integers = (_split(blocks["low"], 64, 4) | _split(blocks["high"], 32, 2) << np.uint8(4)).astype(np.int8) - np.int8(
        32
    )
    return _grouped(scales, integers)


def _iq4_xs(blocks: Blocks) -> Floats:
    six_bits = _split(blocks["scales_low"], 1, 4) | _split(blocks["scales_high"], 1, 2) << np.uint8(4)
    scales = _column(blocks["d"]) * (_f32(six_bits) - 32)
    return _grouped(scales, IQ4_LEVELS[_split(blocks["low"], 16, 4)])


def _plain(blocks: Blocks) -> npt.NDArray[Any]:
    return blocks


def _layout(**fields: tuple[str, int] | str) -> np.dtype[Any]:
    return np.dtype([(name, kind) if isinstance(kind, str) else (name, *kind) for name, kind in fields.items()])


def _bytes(count: int) -> tuple[str, int]:
    return "u1", count


# By GGML's code of the type.
QUANT_TYPES: Final[dict[int, QuantType]] = {
    0: QuantType("F32", 1, np.dtype("<f4"), _plain, "F32"),
    1: QuantType("F16", 1, np.dtype("<f2"), _plain, "F16"),
    30: QuantType("BF16", 1, np.dtype("<u2"), _plain, "BF16"),
    2: QuantType("Q4_0", 32, _layout(d="<f2", low=_bytes(16)), _q4_0),
    3: QuantType("Q4_1", 32, _layout(d="<f2", m="<f2", low=_bytes(16)), _q4_1),
    6: QuantType("Q5_0", 32, _layout(d="<f2", high=_bytes(4), low=_bytes(16)), _q5_0),
    7: QuantType("Q5_1", 32, _layout(d="<f2", m="<f2", high=_bytes(4), low=_bytes(16)), _q5_1),
    8: QuantType("Q8_0", 32, _layout(d="<f2", low=("i1", 32)), _q8_0),
    10: QuantType("Q2_K", 256, _layout(scales=_bytes(16), low=_bytes(64), d="<f2", m="<f2"), _q2_k),
    11: QuantType("Q3_K", 256, _layout(high=_bytes(32), low=_bytes(64), scales=_bytes(12), d="<f2"), _q3_k),
    12: QuantType("Q4_K", 256, _layout(d="<f2", m="<f2", scales=_bytes(12), low=_bytes(128)), _q4_k),
    13: QuantType("Q5_K", 256, _layout(d="<f2", m="<f2", scales=_bytes(12), high=_bytes(32), low=_bytes(128)), _q5_k),
    14: QuantType("Q6_K", 256, _layout(low=_bytes(128), high=_bytes(64), scales=("i1", 16), d="<f2"), _q6_k),
    20: QuantType("IQ4_NL", 32, _layout(d="<f2", low=_bytes(16)), _iq4_nl),
    23: QuantType(
        "IQ4_XS", 256, _layout(d="<f2", scales_high=_bytes(2), scales_low=_bytes(4), low=_bytes(128)), _iq4_xs
    ),
}
