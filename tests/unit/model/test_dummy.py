"""Random weights in real shapes: without a checkpoint, and without a tokenizer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model.dummy import dummy_model_path, preset_names
from model.dummy_weights import DummyWeights
from model.errors import ModelNotFoundError, UnsupportedModelError
from model.loader import load_checkpoint, load_config
from model.tokenizer import Tokenizer
from model.weights import check_weights, expected_shapes
from scheduler.sampling_params import SamplingParams
from tests.tiny_checkpoint import CONFIG
from worker.dummy_model import find_dummy_model
from worker.engine_builder import build_engine
from worker.engine_config import EngineConfig
from worker.engine_sizes import num_parameters
from worker.errors import StartupError
from worker.llm import LLM, Prompt

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A config.json alone."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def engine(folder: Path) -> LLM:
    return LLM(str(folder), load_format="dummy", num_kv_blocks=64, num_threads=1, device="cpu")


def test_an_engine_without_weights_and_tokenizer_generates_and_is_the_same_each_time(folder: Path) -> None:
    prompts: list[Prompt] = ["a first prompt", [1, 2, 3, 300]]
    made = []
    for _ in range(2):
        with engine(folder) as llm:
            made.append(llm.generate(prompts, GREEDY))
            assert llm.info.fingerprint.startswith("dummy-")
            assert llm.chat([{"role": "user", "content": "hello"}], GREEDY).text
    ids = [[completion.token_ids for completion in each] for each in made]
    assert ids[0] == ids[1]
    assert all(len(set(each)) > 3 for each in ids[0]), "the text wanders"
    assert all(completion.text for completion in made[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_a_function_of_seed_and_name_in_any_order(folder: Path, dtype: torch.dtype) -> None:
    config = load_config(folder, "dummy")
    first, again, other = (DummyWeights(config, seed, dtype) for seed in (3, 3, 4))
    assert dict(again).keys() == expected_shapes(config).keys()
    for name in reversed(list(first)):
        assert torch.equal(first[name], again[name])
        assert first[name].dtype is dtype
        assert tuple(first[name].shape) == first.shape_of(name)
        assert first[name].isfinite().all()
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    query, key = (first[f"model.layers.0.self_attn.{which}_proj.weight"].flatten()[:100] for which in "qk")
    assert not torch.equal(query, key), "tensors of one seed differ"


def test_they_are_made_in_the_dtype_asked_for_or_the_configuration_s_own(folder: Path) -> None:
    assert load_checkpoint(folder, load_format="dummy").weights["model.norm.weight"].dtype is torch.float32
    half = load_checkpoint(folder, load_format="dummy", dtype="bfloat16").weights
    assert half["model.norm.weight"].dtype is torch.bfloat16


# In billions, as they are known.
SIZES = {
    "Llama-2-7B": 6.74,
    "Llama-2-13B": 13.02,
    "Llama-3.1-8B": 8.03,
    "Llama-3.2-1B": 1.24,
    "Mistral-7B-v0.3": 7.25,
    "Qwen2.5-7B": 7.62,
    "SmolLM2-135M": 0.1345,
}


def test_names_and_shapes_are_checked_without_making_a_tensor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model of many gigabytes each would take seconds."""
    config = load_config(folder, "dummy")
    monkeypatch.setattr(DummyWeights, "__getitem__", lambda self, name: pytest.fail(f"{name} was made"))
    check_weights(config, DummyWeights(config))
    assert "model.layers.0.self_attn.k_scale" not in DummyWeights(config)


def test_every_preset_has_the_size_of_its_model() -> None:
    assert preset_names() == sorted(SIZES)
    for name, billions in SIZES.items():
        config = load_config(dummy_model_path(name), "dummy")
        assert num_parameters(config) / 1e9 == pytest.approx(billions, rel=4e-3), name


def test_a_preset_is_found_in_any_case_and_the_demo_model_by_its_short_name(folder: Path) -> None:
    assert dummy_model_path("llama-3.1-8b").name == "Llama-3.1-8B"
    assert dummy_model_path("smollm2").name == "SmolLM2-135M"
    assert dummy_model_path(str(folder)) == folder


def test_what_has_no_shapes_is_refused_with_the_names_of_those_that_have(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no shapes called 'gpt-9'.*Llama-2-13B.*SmolLM2-135M"):
        dummy_model_path("gpt-9")
    with pytest.raises(StartupError, match="no shapes called"):
        LLM("gpt-9", load_format="dummy", cache_dir=tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(UnsupportedModelError, match=r"load_format is dummy and .* a file, not a folder"):
        load_config(tmp_path / "m.gguf", "dummy")


def test_a_tokenizer_that_is_there_is_taken(folder: Path) -> None:
    own = Tokenizer.from_checkpoint(folder, "dummy")
    own.backend.add_tokens(["<extra>"])
    own.backend.save(str(folder / "tokenizer.json"))
    assert Tokenizer.from_checkpoint(folder, "dummy").vocab_size == CONFIG["vocab_size"] + 1


def test_the_stand_in_for_a_tokenizer_knows_every_id_and_encodes_every_text(folder: Path) -> None:
    tokenizer = Tokenizer.from_checkpoint(folder, "dummy")
    text = "Grüße, 世界\n\x00"
    assert tokenizer.vocab_size == CONFIG["vocab_size"]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len({tokenizer.decode([token_id]) for token_id in range(256, tokenizer.vocab_size)}) == 320 - 256
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 255}))
    with pytest.raises(UnsupportedModelError, match="vocab_size is 255"):
        Tokenizer.from_checkpoint(folder, "dummy")


def test_weights_in_the_folder_are_not_read(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"damaged")
    config = EngineConfig(str(folder), load_format="dummy", device="cpu", num_kv_blocks=8, num_threads=1)
    assert build_engine(config)[1].num_blocks == 8


def test_shapes_and_tokenizer_are_read_without_torch(folder: Path) -> None:
    """The service process never imports it."""
    code = "import sys; from worker.text_side import load_text_side; from pathlib import Path\n"
    code += "load_text_side(Path(sys.argv[1]), 'dummy'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, timeout=60)


def test_shapes_that_nobody_can_make_are_refused_before_anything_starts(tmp_path: Path) -> None:
    """A folder without a config.json, with a broken one, one of another family, and a file: by its name."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    for name, text in (("broken", "{"), ("other", '{"model_type": "bert", "architectures": ["BertModel"]}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    wrong = {
        "empty": "no config.json in",
        "weights.gguf": "not a folder",
        "broken": "isn't valid JSON",
        "other": "Bert",
    }
    for name, why in wrong.items():
        with pytest.raises(StartupError, match=why) as caught:
            find_dummy_model(str(tmp_path / name))
        assert str(tmp_path / name) in str(caught.value)
