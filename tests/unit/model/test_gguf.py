"""Reading GGUF files, sound and hostile."""

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.errors import CorruptCheckpointError, ModelError, ModelNotFoundError, UnsupportedModelError
from model.gguf import GGUFFile
from model.gguf_config import config_from_gguf
from model.gguf_tokenizer import parts_from_gguf
from tests.unit.model.gguf_files import gguf_bytes, string, tiny_metadata, tiny_tensors, value, write_gguf

Kind = gguf.GGMLQuantizationType


def test_metadata_and_tensors_come_back_as_they_were_written(tmp_path: Path) -> None:
    metadata = {
        "general.architecture": "llama",
        "a.flag": True,
        "a.number": 7,
        "a.real": 0.5,
        "a.text": "Zürich 🌊",
        "a.words": ["", "x", "日本"],
        "a.nested": [[1, 2], [3]],
        "a.none": [],
    }
    tensors = {"plain": np.arange(12, dtype=np.float32).reshape(3, 4), "packed": np.ones((2, 64), np.float32)}
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", metadata, tensors, quants={"packed": Kind.Q8_0}, version=2))
    assert file.metadata == metadata
    np.testing.assert_array_equal(file.tensor("plain"), tensors["plain"])
    assert file.tensor("packed").shape == (2, 64)
    np.testing.assert_allclose(file.tensor("packed"), 1, rtol=1e-3)


def test_the_gguf_package_reads_the_same_from_the_demo_file(demo_model_path: Path) -> None:
    """Its reader needs seconds for the whole file, so it is given only what follows from the offsets."""
    file = GGUFFile(demo_model_path)
    assert len(file.tensors) == 272
    assert len(file.metadata["tokenizer.ggml.merges"]) == 48900
    info = file.tensors["blk.9.attn_v.weight"]
    raw = np.frombuffer(demo_model_path.read_bytes()[info.start :][: info.num_bytes], np.uint8).reshape(192, -1)
    np.testing.assert_array_equal(file.tensor(info.name), gguf.quants.dequantize(raw, Kind.Q4_1))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "too short"),
        (lambda data: data[:20], "too short"),
        (lambda data: b"PK\3\4" + data[4:], "doesn't start with GGUF"),
        (lambda data: data[:60], "bytes and|are left|more than the file"),
        (lambda data: data[:-4], "cut short"),
        (lambda data: data[:8] + struct.pack("<Q", 1 << 60) + data[16:], "more than the file can hold"),
        (lambda data: data[:16] + struct.pack("<Q", 1 << 63) + data[24:], "more than the file can hold"),
        (lambda data: data[:24] + struct.pack("<Q", 1 << 62) + data[32:], "the name of key 0 has"),
        (lambda data: data.replace(b"general.architecture", b"\xff" * 20), "isn't UTF-8"),
    ],
)
def test_a_damaged_file_is_named_with_the_place(tmp_path: Path, damage: object, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(damage(gguf_bytes(tiny_metadata(), tiny_tensors())))  # type: ignore[operator]
    with pytest.raises(CorruptCheckpointError, match=message) as caught:
        GGUFFile(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def _one_key(tmp_path: Path, typed_value: bytes) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + typed_value + b"\0" * 64)
    return path


@pytest.mark.parametrize(
    "typed_value",
    [
        struct.pack("<I", 99),
        struct.pack("<IIQ", 9, 4, 1 << 61),
        struct.pack("<IIQ", 9, 8, 1 << 61),
        struct.pack("<IIQ", 9, 9, 1 << 61),
        struct.pack("<IIQ", 9, 77, 1),
        struct.pack("<IIQQ", 9, 8, 2, 1 << 62),
        struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 30 + struct.pack("<IQ", 4, 0),
        struct.pack("<IQ", 8, 1 << 63),
    ],
    ids=["type", "numbers", "strings", "arrays", "element type", "element", "depth", "string"],
)
def test_a_value_that_claims_too_much_costs_no_memory(tmp_path: Path, typed_value: bytes) -> None:
    path = _one_key(tmp_path, typed_value)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError):
            GGUFFile(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def _one_tensor(tmp_path: Path, *, dims: tuple[int, ...], kind: int = 0, offset: int = 0, copies: int = 1) -> Path:
    info = string("t") + struct.pack(f"<I{len(dims)}Q", len(dims), *dims) + struct.pack("<IQ", kind, offset)
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, copies, 0) + info * copies + b"\0" * 4096)
    return path


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"dims": (1 << 40, 1 << 40)}, "cut short"),
        ({"dims": (0, 4)}, "has the shape"),
        ({"dims": ()}, "0 dimensions"),
        ({"dims": (2, 2, 2, 2, 2)}, "5 dimensions"),
        ({"dims": (33,), "kind": 8}, "not a multiple of Q8_0's 32"),
        ({"dims": (4,), "offset": 7}, "not a multiple of 32"),
        ({"dims": (4,), "offset": 1 << 63}, "cut short"),
        ({"dims": (4,), "copies": 2}, "comes twice"),
    ],
)
def test_a_tensor_that_can_not_be_is_refused(tmp_path: Path, shape: dict[str, object], message: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=message):
        GGUFFile(_one_tensor(tmp_path, **shape))  # type: ignore[arg-type]


def test_what_is_sound_but_not_read_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"GGML type 16.*Q4_K"):
        GGUFFile(_one_tensor(tmp_path, dims=(256,), kind=16))
    path = tmp_path / "v"
    for version, message in [(1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")]:
        path.write_bytes(gguf_bytes({}, {}, version=version) + b"\0" * 32)
        with pytest.raises(UnsupportedModelError, match=message):
            GGUFFile(path)
    path.write_bytes(gguf_bytes({"split.count": 3}, {}))
    with pytest.raises(UnsupportedModelError, match="llama-gguf-split"):
        GGUFFile(path)


def test_a_key_that_comes_twice_and_a_bad_alignment_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    key = string("k") + value(1)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + key * 2)
    with pytest.raises(CorruptCheckpointError, match="'k' comes twice"):
        GGUFFile(path)
    path.write_bytes(gguf_bytes({"general.alignment": 24}, {}))
    with pytest.raises(CorruptCheckpointError, match="not a power of two"):
        GGUFFile(path)


def test_a_path_without_a_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"nowhere\.gguf doesn't exist"):
        GGUFFile(tmp_path / "nowhere.gguf")


SOUND = gguf_bytes(tiny_metadata(), {"token_embd.weight": np.ones((266, 32), np.float32)})
HEADER_BYTES = len(SOUND) - 266 * 32 * 4


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_damage_gives_a_named_error_or_a_readable_file(tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(SOUND)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, HEADER_BYTES - 1))
        damaged[place] = data.draw(st.integers(0, 255))
    path = tmp_path / "m.gguf"
    path.write_bytes(damaged[: data.draw(st.integers(0, len(damaged)) | st.just(len(damaged)))])
    assert "\n" not in _complaint(path)


def _complaint(path: Path) -> str:
    """What is wrong with a file, or nothing."""
    try:
        file = GGUFFile(path)
        config_from_gguf(file)
        parts_from_gguf(file.metadata, path)
        for name in file.tensors:
            file.tensor(name)
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("wrong", [True, 1 << 31, 0, -1.5, "x", [], ["a", "b"], [[1]], [1.0]], ids=repr)
@pytest.mark.parametrize("name", [*tiny_metadata(), "general.alignment", "split.count", "llama.rope.scaling.type"])
def test_a_value_of_the_wrong_kind_gives_a_named_error_or_is_no_matter(
    tmp_path: Path, name: str, wrong: object
) -> None:
    assert _complaint(write_gguf(tmp_path / "m.gguf", tiny_metadata(), tiny_tensors())) == ""
    path = write_gguf(tmp_path / "m.gguf", tiny_metadata() | {name: wrong}, tiny_tensors())
    assert "\n" not in _complaint(path)
