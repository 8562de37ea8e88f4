"""An engine whose weights are int8 or int4: the same promises, less memory, nearly the same tokens."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.attention_inputs import AttentionOptions
from kernels.dispatch import has_compiled, implementation
from kernels.int4_weights import INT4
from kernels.quantized_linear import QuantizedLinear
from kernels.weight_formats import INT8, WeightFormat
from model.config import ModelConfig
from model.decoder import Decoder
from model.loader import load_checkpoint
from model.weights import EMBEDDING, random_weights
from scheduler.sampling_params import SamplingParams
from tests.tiny_checkpoint import write_tiny_checkpoint
from tests.unit.engine.deterministic_runs import all_ways, check, target_of
from tests.unit.model_runner.driver import Driver, tiny_config
from worker.engine_builder import build_engine
from worker.engine_config import EngineConfig
from worker.engine_sizes import num_parameters, num_table_parameters, startup_need
from worker.errors import StartupError
from worker.llm import LLM
from worker.settings import load_settings

needs_compiled = pytest.mark.skipif(not has_compiled(), reason="torch's operators make no such promise")


@pytest.fixture(params=["int8", "int4"])
def quantization(request: pytest.FixtureRequest) -> str:
    """That of the engine in a test."""
    return str(request.param)


def config_of(folder: Path, **changes: Any) -> EngineConfig:
    config = EngineConfig(
        str(write_tiny_checkpoint(folder)),
        max_model_len=256,
        num_kv_blocks=400,
        max_num_seqs=40,
        max_num_batched_tokens=100,
        num_threads=1,
        quantization="int8",
    )
    return replace(config, **changes)


@needs_compiled
def test_the_tokens_are_the_same_alone_in_a_batch_swapped_recomputed_and_behind_a_prefix(
    tmp_path: Path, quantization: str
) -> None:
    prompt = tuple(random.Random(3).randrange(256) for _ in range(70))
    config = config_of(tmp_path, deterministic=True, check_invariants="step", quantization=quantization)
    check(all_ways(config, target_of(prompt, 1.0, num_new=32), max_prompt=60))


@needs_compiled
def test_the_fingerprint_names_the_quantization_and_the_promise_that_is_kept(tmp_path: Path, quantization: str) -> None:
    info = build_engine(config_of(tmp_path, quantization=quantization))[1]
    assert f"/float32-{quantization}/" in info.fingerprint
    assert info.fingerprint.endswith("/deterministic")
    assert info.dtype == "float32"
    assert "float32-" not in build_engine(config_of(tmp_path, quantization="none"))[1].fingerprint


def held_bytes(decoder: Decoder) -> int:
    """Of all tensors that hang on the decoder, each memory once."""
    seen: dict[int, int] = {}

    def visit(value: object) -> None:
        if isinstance(value, torch.Tensor):
            seen[value.data_ptr()] = value.nbytes
        elif isinstance(value, list):
            for each in value:
                visit(each)
        elif type(value).__module__.startswith(("kernels.", "model.")) and not isinstance(
            value, ModelConfig | AttentionOptions | WeightFormat
        ):
            for each in vars(value).values():
                visit(each)

    visit(decoder)
    return sum(seen.values())


@pytest.mark.parametrize("is_tied", [True, False])
def test_weights_and_embeddings_take_less_of_the_memory(is_tied: bool) -> None:
    """Of int8 little more than a quarter of float32's; of int4 those of the layers less than a sixth."""
    config = tiny_config(
        hidden_size=128, intermediate_size=512, vocab_size=1000, max_position_embeddings=8, tie_word_embeddings=is_tied
    )
    plain, int8, int4 = (
        held_bytes(Decoder(config, random_weights(config), quantization=kind)) for kind in ("none", "int8", "int4")
    )
    assert int8 < 0.3 * plain
    assert int8 - int4 == pytest.approx(0.5 * (num_parameters(config) - num_table_parameters(config)), rel=0.01)


def test_the_need_for_memory_at_start_falls(tmp_path: Path, quantization: str) -> None:
    config = config_of(tmp_path, quantization=quantization)
    model = tiny_config(num_layers=30)
    plain = startup_need(replace(config, quantization="none"), model, torch.float32, 1)
    least = {"int8": 0.25, "int4": 0.15}[quantization]
    assert least < startup_need(config, model, torch.float32, 1).weight_bytes / plain.weight_bytes < least + 0.15
    assert plain.weight_bytes == 4 * num_parameters(model)


@pytest.mark.parametrize("choice", ["auto", "linear=torch"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_logits_are_near_those_of_float32_on_both_implementations(
    choice: str, is_tied: bool, quantization: str
) -> None:
    config = tiny_config(tie_word_embeddings=is_tied)
    prompt = [random.Random(1).randrange(config.vocab_size) for _ in range(40)]
    logits = []
    for kind in ("none", quantization):
        with implementation(choice):
            driver = Driver(config, random_weights(config, seed=4), quantization=kind)
            sequence = driver.add("a", prompt)
            driver.decode(1)
        logits.append(sequence.logits[0])
    assert 0 < float((logits[1] - logits[0]).norm() / logits[0].norm()) < {"int8": 0.05, "int4": 0.5}[quantization]


def test_another_dtype_falls_back_and_answers(tmp_path: Path, quantization: str) -> None:
    folder = str(write_tiny_checkpoint(tmp_path))
    with LLM(folder, dtype="bfloat16", quantization=quantization, num_kv_blocks=32) as llm:
        assert f"/bfloat16-{quantization}/" in llm.info.fingerprint
        assert llm.info.batch_dependence is not None
        assert len(llm.generate("abc", SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4


def test_an_unknown_quantization_is_refused_by_name(tmp_path: Path, quantization: str) -> None:
    with pytest.raises(StartupError, match="quantization is int3: use one of none, int8, int4"):
        build_engine(config_of(tmp_path, quantization="int3"))
    with pytest.raises(StartupError, match="quantization"):
        load_settings({"quantization": "int3"})
    assert load_settings({"quantization": quantization}).quantization == quantization


def test_the_demo_model_knows_the_capital_of_france(demo_model_path: Path) -> None:
    with LLM(str(demo_model_path), quantization="int8", num_kv_blocks=64, deterministic=has_compiled()) as llm:
        asked = [{"role": "user", "content": "What is the capital of France?"}]
        assert llm.chat(asked, SamplingParams(temperature=0, max_tokens=24)).text == "The capital of France is Paris."


@pytest.mark.slow
def test_int4_generates_what_its_dequantized_weights_do_in_float32(demo_model_path: Path) -> None:
    """Greedy, on the demo model."""
    with LLM(str(demo_model_path), quantization="int4", num_kv_blocks=64) as llm:
        asked = [{"role": "user", "content": "What is the capital of France? Tell me more about it."}]
        answer = llm.chat(asked, SamplingParams(temperature=0, max_tokens=24))
    assert "Paris" in answer.text
    checkpoint = load_checkpoint(demo_model_path)
    driver = Driver(checkpoint.config, {name: dequantized(name, each) for name, each in checkpoint.weights.items()})
    sequence = driver.add("a", answer.prompt_token_ids)
    driver.decode(len(answer.token_ids))
    assert tuple(sequence.drawn) == answer.token_ids


def dequantized(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as a model of int4 has it: matrices of the layers with 4 bits, embeddings with 8."""
    if tensor.ndim != 2:
        return tensor
    return QuantizedLinear(tensor, form=INT8 if name == EMBEDDING else INT4).weight()
