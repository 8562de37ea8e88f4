"""Dequantising, against the gguf package."""

import gguf
import numpy as np
import pytest

from model.gguf_quants import CHUNK_VALUES, QUANT_TYPES, dequantize


def _random_blocks(code: int, num_blocks: int, seed: int) -> np.ndarray:
    """Random bits in every field, but for the scales, which are ordinary numbers."""
    quant = QUANT_TYPES[code]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, num_blocks * quant.block_bytes, dtype=np.uint8)
    blocks = data.view(quant.layout)
    for name in set(quant.layout.names or ()) & {"d", "m"}:
        blocks[name] = rng.normal(size=num_blocks)
    if quant.block_elements == 1:
        blocks[:] = rng.integers(0, 100, num_blocks).astype(quant.layout)
    return data


@pytest.mark.parametrize("code", QUANT_TYPES, ids=lambda code: QUANT_TYPES[code].name)
def test_each_type_gives_what_the_gguf_package_gives_bit_for_bit(code: int) -> None:
    quant, kind = QUANT_TYPES[code], gguf.GGMLQuantizationType(code)
    assert gguf.GGML_QUANT_SIZES[kind] == (quant.block_elements, quant.block_bytes)
    data = _random_blocks(code, 700, seed=code)
    values = dequantize(data, quant)
    if quant.name == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    expected = gguf.quants.dequantize(data.reshape(700, -1), kind).reshape(-1)
    np.testing.assert_array_equal(values.astype(np.float32), expected)


@pytest.mark.parametrize("code", [3, 12])
def test_a_tensor_longer_than_a_pass_is_dequantised_whole(code: int) -> None:
    quant = QUANT_TYPES[code]
    num_blocks = CHUNK_VALUES // quant.block_elements + 3
    data = _random_blocks(code, num_blocks, seed=1)
    values = dequantize(data, quant)
    tail = dequantize(data[-3 * quant.block_bytes :], quant)
    assert len(values) == num_blocks * quant.block_elements
    np.testing.assert_array_equal(values[-len(tail) :], tail)
