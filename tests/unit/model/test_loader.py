"""Opening checkpoints: directories of safetensors and GGUF files."""

import json
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file

from model.checkpoint_files import CheckpointKind, checkpoint_kind
from model.errors import (
    CheckpointCacheError,
    CorruptCheckpointError,
    ModelError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from model.loader import load_checkpoint, load_config
from model.weights import check_weights, random_weights
from tests.unit.model.gguf_files import tiny_metadata, tiny_tensors, write_gguf

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "tie_word_embeddings": False,
}


def _directory(path: Path, *, num_shards: int = 1, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A random checkpoint in one weight file, or in several with their index."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file({"x": torch.zeros(1)}, path / "model.safetensors")
    weights = random_weights(load_config(path), dtype=dtype)
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    if num_shards == 1:
        save_file(weights, path / "model.safetensors")
        return path
    (path / "model.safetensors").unlink()
    names = list(weights)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: weights[name] for name in names[shard::num_shards]}
        save_file(part, path / file)
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_directory_gives_its_tensors_whether_in_one_file_or_in_several(tmp_path: Path, num_shards: int) -> None:
    checkpoint = load_checkpoint(_directory(tmp_path / "m", num_shards=num_shards))
    expected = random_weights(checkpoint.config)
    check_weights(checkpoint.config, checkpoint.weights)
    assert len(checkpoint.weights) == len(expected)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.weights[name], tensor), name


def test_weights_are_converted_only_when_a_dtype_is_asked_for(tmp_path: Path) -> None:
    path = _directory(tmp_path / "m", dtype=torch.bfloat16)
    assert load_config(path).dtype == "bfloat16"
    assert load_checkpoint(path).weights["lm_head.weight"].dtype == torch.bfloat16
    assert load_checkpoint(path, dtype="float32").weights["lm_head.weight"].dtype == torch.float32
    with pytest.raises(UnsupportedModelError, match="dtype is 'int8': use auto, float32"):
        load_checkpoint(path, dtype="int8")


def test_the_dtype_of_config_json_comes_before_that_of_the_file(tmp_path: Path) -> None:
    assert load_config(_directory(tmp_path / "m", dtype=torch.float16, torch_dtype="bfloat16")).dtype == "bfloat16"


def _without(path: Path, name: str) -> Path:
    (path / name).unlink()
    return path


@pytest.mark.parametrize("load", [load_config, load_checkpoint])
def test_each_way_of_being_no_checkpoint_has_its_own_words(tmp_path: Path, load: Any) -> None:
    def fails(error: type[ModelError], message: str, path: Path) -> None:
        with pytest.raises(error, match=message) as caught:
            load(path)
        assert "\n" not in str(caught.value)

    fails(ModelNotFoundError, r"no model at .*nowhere.*directory with config\.json", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    fails(ModelNotFoundError, "found an empty directory", tmp_path / "empty")
    for index in range(12):
        (tmp_path / "empty" / f"file{index:02}").touch()
    fails(ModelNotFoundError, r"no config\.json; found file00, .*file07 and 4 more", tmp_path / "empty")
    (tmp_path / "empty" / "a.gguf").touch()
    fails(ModelNotFoundError, r"name one of them, such as .*a\.gguf", tmp_path / "empty")
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    fails(UnsupportedModelError, r"notes\.txt is no \.gguf file", text)

    bare = _without(_directory(tmp_path / "bare"), "model.safetensors")
    fails(ModelNotFoundError, r"has no weights \(model\.safetensors\)", bare)
    (bare / "pytorch_model.bin").touch()
    fails(UnsupportedModelError, "as pickles.*save_pretrained", bare)
    shards = _without(_directory(tmp_path / "shards", num_shards=3), "model-00002-of-00003.safetensors")
    fails(CorruptCheckpointError, "lacks 1 of 3 weight files, model-00002-of-00003", shards)
    fails(ModelNotFoundError, "has neither", _without(shards, "model.safetensors.index.json"))


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_weight_file_that_was_cut_short_is_named(tmp_path: Path, keep: int) -> None:
    path = _directory(tmp_path / "m")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors is damaged or cut short"):
        load_config(path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "..", "", 7, None])
def test_an_index_can_not_name_files_elsewhere(tmp_path: Path, name: object) -> None:
    path = _without(_directory(tmp_path / "m"), "model.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CorruptCheckpointError, match="doesn't name files beside it"):
        load_config(path)


def test_tensors_that_are_no_floats_are_refused(tmp_path: Path) -> None:
    path = _directory(tmp_path / "m")
    save_file({"w": torch.zeros(2, dtype=torch.int8)}, path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="w has the type I8: quantised safetensors aren't read"):
        load_checkpoint(path)


def test_the_kind_is_told_by_content_where_the_name_does_not_tell(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "0f3a9c", tiny_metadata(), tiny_tensors())
    assert checkpoint_kind(path) is CheckpointKind.GGUF


KINDS = {"blk.0.ffn_up.weight": gguf.GGMLQuantizationType.F16, "blk.1.ffn_up.weight": gguf.GGMLQuantizationType.BF16}


def _tiny_gguf(tmp_path: Path) -> Path:
    quants = KINDS | {"blk.0.ffn_down.weight": gguf.GGMLQuantizationType.Q8_0}
    return write_gguf(tmp_path / "tiny.gguf", tiny_metadata(), tiny_tensors(), quants=quants)


def test_a_gguf_file_gives_the_same_from_memory_and_from_the_cache(tmp_path: Path) -> None:
    path, calls = _tiny_gguf(tmp_path), []
    in_memory = load_checkpoint(path)
    cached = load_checkpoint(path, cache_dir=tmp_path / "cache", progress=lambda *call: calls.append(call))
    check_weights(cached.config, cached.weights)
    assert set(cached.weights) == set(in_memory.weights)
    for name, tensor in in_memory.weights.items():
        assert torch.equal(cached.weights[name], tensor)
        assert cached.weights[name].dtype == tensor.dtype
    assert in_memory.weights["model.layers.0.mlp.up_proj.weight"].dtype == torch.float16
    assert in_memory.weights["model.layers.1.mlp.up_proj.weight"].dtype == torch.bfloat16
    assert in_memory.weights["model.layers.0.mlp.down_proj.weight"].dtype == torch.float32
    assert calls[-1][0] == "converting weights"
    assert calls[-1][1] == calls[-1][2]
    assert [call[1] for call in calls] == sorted(call[1] for call in calls)


def test_the_cache_is_used_again_until_the_gguf_file_changes(tmp_path: Path) -> None:
    path, cache = _tiny_gguf(tmp_path), tmp_path / "cache"

    def conversions() -> int:
        calls: list[Any] = []
        load_checkpoint(path, cache_dir=cache, progress=lambda *call: calls.append(call))
        return len(calls)

    assert conversions() > 0
    assert conversions() == 0
    write_gguf(path, tiny_metadata(), tiny_tensors(seed=1))
    assert conversions() > 0
    assert len(list(cache.rglob("*.safetensors"))) == 2
    assert not list(cache.rglob("*.partial"))


def test_a_cached_file_that_was_cut_short_is_made_again(tmp_path: Path) -> None:
    path, cache = _tiny_gguf(tmp_path), tmp_path / "cache"
    load_checkpoint(path, cache_dir=cache)
    (cached,) = cache.rglob("*.safetensors")
    cached.write_bytes(cached.read_bytes()[:-100])
    weights = load_checkpoint(path, cache_dir=cache).weights
    assert torch.equal(weights["model.norm.weight"], load_checkpoint(path).weights["model.norm.weight"])


def test_a_conversion_that_died_leaves_nothing_that_matters(tmp_path: Path) -> None:
    path, cache = _tiny_gguf(tmp_path), tmp_path / "cache"

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_checkpoint(path, cache_dir=cache, progress=die)
    assert not list(cache.rglob("*.safetensors"))
    assert not list(cache.rglob("*.partial"))
    assert load_checkpoint(path, cache_dir=cache).weights


CONVERT = """
import sys
from pathlib import Path
from model.gguf import GGUFFile
from model.gguf_config import config_from_gguf
from model.gguf_convert import cached_conversion
file, calls = GGUFFile(Path(sys.argv[1])), []
cached_conversion(file, config_from_gguf(file), Path(sys.argv[2]), lambda *call: calls.append(call))
print(len(calls))
"""


def test_of_several_processes_one_converts(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CONVERT, str(_tiny_gguf(tmp_path)), str(tmp_path / "cache")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    counts = sorted(int(process.communicate()[0]) for process in processes)
    assert counts[:2] == [0, 0]
    assert counts[2] > 0


def test_no_room_and_no_permission_are_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _tiny_gguf(tmp_path)
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: usage(10, 10, 100))
        with pytest.raises(CheckpointCacheError, match="0 MiB are free: free some space there, or choose another"):
            load_checkpoint(path, cache_dir=tmp_path / "cache")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointCacheError, match=r"can't be written to .*choose another cache directory"):
        load_checkpoint(path, cache_dir=tmp_path / "file")


def test_reading_a_configuration_imports_no_torch(tmp_path: Path) -> None:
    path = _tiny_gguf(tmp_path)
    program = (
        "import sys; from model.loader import load_config; from model.tokenizer import Tokenizer; import worker.text; "
        f"import worker.demo_model; load_config({str(path)!r}); Tokenizer.from_checkpoint({str(path)!r}); "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
