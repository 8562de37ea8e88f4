"""Sizes that can't work are refused by name, with the numbers that would."""

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_checkpoint import write_tiny_checkpoint
from worker.engine_builder import build_engine
from worker.engine_config import EngineConfig, EngineInfo
from worker.engine_sizes import pick_num_blocks
from worker.errors import StartupError
from worker.memory import Headroom
from worker.startup_memory import REST_BYTES, need_on_cpu

MIB = 1 << 20
TINY_BLOCK_BYTES = 4096


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    """Of a model whose own context is 2048 tokens."""
    return EngineConfig(str(write_tiny_checkpoint(tmp_path)), max_num_seqs=2, num_threads=1)


def info_of(config: EngineConfig) -> EngineInfo:
    return build_engine(config)[1]


def refusal_of(config: EngineConfig) -> str:
    with pytest.raises(StartupError) as caught:
        build_engine(config)
    message = str(caught.value)
    assert "\n" not in message
    return message


def leave(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """A machine with so much memory left for the KV cache."""
    room = Headroom(REST_BYTES + num_bytes, "the machine's memory")
    monkeypatch.setattr("worker.engine_sizes.headroom", lambda: room)
    monkeypatch.setattr("worker.engine_sizes.check_fits", lambda path, need: None)
    monkeypatch.setattr("worker.engine_builder.check_fits", lambda path, need: None)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_each_power_of_two_is_a_block_size(config: EngineConfig, block_size: int) -> None:
    assert info_of(replace(config, block_size=block_size)).block_size == block_size


@pytest.mark.parametrize("block_size", [0, -16, 1, 12, 24, 128])
def test_other_block_sizes_are_refused(config: EngineConfig, block_size: int) -> None:
    assert refusal_of(replace(config, block_size=block_size)) == f"block_size is {block_size}: use one of 8, 16, 32, 64"


def test_blocks_that_hold_less_than_the_context_asked_for_are_refused(config: EngineConfig) -> None:
    message = refusal_of(replace(config, num_kv_blocks=6, max_model_len=100))
    assert message == (
        "num_kv_blocks is 6, which hold 96 tokens, but max_model_len is 100: use at least 7 blocks, or a max_model_len "
        "of at most 96"
    )
    assert info_of(replace(config, num_kv_blocks=7, max_model_len=100)).max_model_len == 100
    assert info_of(replace(config, num_kv_blocks=6, max_model_len=96)).max_model_len == 96


@pytest.mark.parametrize("num_blocks", [1, 5])
def test_without_a_context_asked_for_it_is_what_the_blocks_hold(config: EngineConfig, num_blocks: int) -> None:
    assert info_of(replace(config, num_kv_blocks=num_blocks)).max_model_len == 16 * num_blocks
    assert info_of(replace(config, num_kv_blocks=200)).max_model_len == 2048


def test_memory_for_less_than_the_context_asked_for_is_refused(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(monkeypatch, 10 * TINY_BLOCK_BYTES)
    message = refusal_of(replace(config, max_model_len=200))
    assert re.fullmatch(
        r"max_model_len is 200, but 10 blocks of KV cache, .* use a max_model_len of at most 160", message
    )
    assert info_of(replace(config, max_model_len=160)).max_model_len == 160


def test_a_context_that_is_lowered_for_lack_of_memory_is_told(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    leave(monkeypatch, 40 * TINY_BLOCK_BYTES)
    info = info_of(config)
    assert (info.num_blocks, info.max_model_len) == (10, 160)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "lowered from the model's 2048 to 160 tokens" in record.getMessage()


def test_more_blocks_than_the_memory_holds_are_refused_with_how_many_do(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(monkeypatch, 40 * TINY_BLOCK_BYTES)
    message = refusal_of(replace(config, num_kv_blocks=41))
    assert message.startswith("num_kv_blocks is 41, which takes 0 MiB, but ")
    assert message.endswith("use at most 40")
    assert info_of(replace(config, num_kv_blocks=40)).num_blocks == 40


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Headroom(200 * MIB, "the machine's memory")
    monkeypatch.setattr("worker.engine_sizes.headroom", lambda: room)
    message = refusal_of(replace(config, num_kv_blocks=1000))
    assert "doesn't fit into memory: it takes about 304 MiB (0 MiB of weights, 4 MiB of KV cache" in message
    assert "but 200 MiB are left of the machine's memory: lower num_kv_blocks" in message


def test_a_mapped_file_counts_where_the_address_space_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = need_on_cpu(500 * MIB, 100 * MIB)
    monkeypatch.setattr("worker.startup_memory.is_address_space_limited", lambda: True)
    assert need_on_cpu(500 * MIB, 100 * MIB).num_bytes >= plain.num_bytes + 500 * MIB


@pytest.mark.parametrize("changes", [{"num_swap_blocks": 10**9}, {"swap_space_gib": 1e5}])
def test_a_swap_space_beyond_the_memory_is_refused(config: EngineConfig, changes: dict[str, Any]) -> None:
    assert re.search(r"use at most \d+ blocks \(num_swap_blocks\), or", refusal_of(replace(config, **changes)))


def test_on_cuda_activations_and_graphs_are_left_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,000 MiB, of which 300 are in use, 0.88 less 1.2 times what is to come."""
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (700 * MIB, 1000 * MIB))
    config, cuda = EngineConfig("model", max_num_seqs=10_000), torch.device("cuda")
    sizes = [pick_num_blocks(config, MIB, 4096, cuda, 100 * MIB, graphs * MIB) for graphs in (0, 50)]
    assert sizes == [880 - 300 - 120, 880 - 300 - 180]
