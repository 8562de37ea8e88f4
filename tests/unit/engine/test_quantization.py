"""An engine whose weights are int8: the same promises, a quarter of the memory, nearly the same tokens."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.attention_inputs import AttentionOptions
from kernels.dispatch import has_compiled, implementation
from model.config import ModelConfig
from model.decoder import Decoder
from model.weights import random_weights
from scheduler.sampling_params import SamplingParams
from tests.tiny_checkpoint import write_tiny_checkpoint
from tests.unit.engine.deterministic_runs import all_ways, check, target_of
from tests.unit.model_runner.driver import Driver, tiny_config
from worker.engine_builder import build_engine
from worker.engine_config import EngineConfig
from worker.engine_sizes import num_parameters, startup_need
from worker.errors import StartupError
from worker.llm import LLM
from worker.settings import load_settings

needs_compiled = pytest.mark.skipif(not has_compiled(), reason="torch's operators make no such promise")


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
def test_the_tokens_are_the_same_alone_in_a_batch_swapped_recomputed_and_behind_a_prefix(tmp_path: Path) -> None:
    prompt = tuple(random.Random(3).randrange(256) for _ in range(70))
    config = config_of(tmp_path, deterministic=True, check_invariants="step")
    check(all_ways(config, target_of(prompt, 1.0, num_new=32), max_prompt=60))


@needs_compiled
def test_the_fingerprint_names_the_quantization_and_the_promise_that_is_kept(tmp_path: Path) -> None:
    info = build_engine(config_of(tmp_path))[1]
    assert "/float32-int8/" in info.fingerprint
    assert info.fingerprint.endswith("/deterministic")
    assert info.dtype == "float32"
    assert "int8" not in build_engine(config_of(tmp_path, quantization="none"))[1].fingerprint


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
            value, ModelConfig | AttentionOptions
        ):
            for each in vars(value).values():
                visit(each)

    visit(decoder)
    return sum(seen.values())


@pytest.mark.parametrize("is_tied", [True, False])
def test_weights_and_embeddings_take_little_more_than_a_quarter_of_the_memory(is_tied: bool) -> None:
    config = tiny_config(
        hidden_size=128, intermediate_size=512, vocab_size=1000, max_position_embeddings=8, tie_word_embeddings=is_tied
    )
    plain = held_bytes(Decoder(config, random_weights(config)))
    assert held_bytes(Decoder(config, random_weights(config), quantization="int8")) < 0.3 * plain


def test_the_need_for_memory_at_start_falls(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    model = tiny_config(num_layers=30)
    plain = startup_need(replace(config, quantization="none"), model, torch.float32, 1)
    assert startup_need(config, model, torch.float32, 1).weight_bytes < 0.4 * plain.weight_bytes
    assert plain.weight_bytes == 4 * num_parameters(model)


@pytest.mark.parametrize("choice", ["auto", "linear=torch"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_logits_are_near_those_of_float32_on_both_implementations(choice: str, is_tied: bool) -> None:
    config = tiny_config(tie_word_embeddings=is_tied)
    prompt = [random.Random(1).randrange(config.vocab_size) for _ in range(40)]
    logits = []
    for quantization in ("none", "int8"):
        with implementation(choice):
            driver = Driver(config, random_weights(config, seed=4), quantization=quantization)
            sequence = driver.add("a", prompt)
            driver.decode(1)
        logits.append(sequence.logits[0])
    assert 0 < float((logits[1] - logits[0]).norm() / logits[0].norm()) < 0.05


def test_another_dtype_falls_back_and_answers(tmp_path: Path) -> None:
    with LLM(str(write_tiny_checkpoint(tmp_path)), dtype="bfloat16", quantization="int8", num_kv_blocks=32) as llm:
        assert "/bfloat16-int8/" in llm.info.fingerprint
        assert llm.info.batch_dependence is not None
        assert len(llm.generate("abc", SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4


def test_an_unknown_quantization_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="quantization is int3: use none or int8"):
        build_engine(config_of(tmp_path, quantization="int3"))
    with pytest.raises(StartupError, match="quantization"):
        load_settings({"quantization": "int3"})
    assert load_settings({"quantization": "int8"}).quantization == "int8"


def test_the_demo_model_knows_the_capital_of_france(demo_model_path: Path) -> None:
    with LLM(str(demo_model_path), quantization="int8", num_kv_blocks=64, deterministic=has_compiled()) as llm:
        asked = [{"role": "user", "content": "What is the capital of France?"}]
        assert llm.chat(asked, SamplingParams(temperature=0, max_tokens=24)).text == "The capital of France is Paris."
