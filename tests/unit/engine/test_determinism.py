"""A sequence's tokens are its own, whatever else the engine does; and where that can't be promised, it is said."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.dispatch import has_compiled, implementation
from kernels.paged_attention import AttentionMetadata, paged_attention
from model.determinism import batch_dependence
from tests.tiny_checkpoint import write_tiny_checkpoint
from tests.unit.engine.deterministic_runs import all_ways, check, run, target_of
from tests.unit.model_runner.driver import tiny_config
from worker.engine_builder import build_engine
from worker.engine_config import EngineConfig, EngineInfo
from worker.errors import ErrorCode, JobError, StartupError
from worker.intake import check_deterministic
from worker.protocol import GenerateRequest

CPU = torch.device("cpu")
needs_compiled = pytest.mark.skipif(not has_compiled(), reason="torch's operators make no such promise")


def make_config(folder: Path, **changes: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "max_model_len": 256,
        "num_kv_blocks": 400,
        "max_num_seqs": 40,
        "max_num_batched_tokens": 100,
        "num_threads": 1,
        "deterministic": True,
        "check_invariants": "step",
    }
    return EngineConfig(str(write_tiny_checkpoint(folder)), **settings | changes)


@needs_compiled
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "drawn"])
def test_the_tokens_are_the_same_alone_in_a_batch_swapped_recomputed_and_behind_a_prefix(
    tmp_path: Path, temperature: float
) -> None:
    prompt = tuple(random.Random(2).randrange(256) for _ in range(70))
    check(all_ways(make_config(tmp_path), target_of(prompt, temperature, num_new=48), max_prompt=60))


@needs_compiled
def test_a_deterministic_engine_says_so_in_its_fingerprint(tmp_path: Path) -> None:
    info = build_engine(make_config(tmp_path))[1]
    assert info.batch_dependence is None
    assert info.fingerprint.endswith("/deterministic")


@needs_compiled
@pytest.mark.parametrize("is_deterministic", [True, False])
def test_attention_may_size_its_splits_by_the_batch_unless_it_must_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_deterministic: bool
) -> None:
    """Prompts, decodes and the warm-up alike. The kernels on CUDA are faster so; the compiled one never does it."""
    told: set[bool] = set()

    def recording(
        query: torch.Tensor, cache: torch.Tensor, layer: int, meta: AttentionMetadata, *rest: Any, **more: Any
    ) -> Any:
        told.add(meta.is_deterministic)
        return paged_attention(query, cache, layer, meta, *rest, **more)

    monkeypatch.setattr("model.layers.paged_attention", recording)
    engine = build_engine(make_config(tmp_path, deterministic=is_deterministic))[0]
    run(engine, [target_of((1, 2, 3), 0.0, num_new=3)])
    assert told == {is_deterministic}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"dtype": "bfloat16"}, "in bfloat16 .* use --dtype float32"), ({}, "PAGEMILL_KERNELS turns them off: unset it")],
    ids=["bfloat16", "torch kernels"],
)
def test_an_engine_that_can_not_promise_it_does_not_start_if_it_must(
    tmp_path: Path, changes: dict[str, str], reason: str
) -> None:
    config = make_config(tmp_path, **changes)
    with implementation("auto" if changes else "torch"):
        with pytest.raises(StartupError, match=f"deterministic can't be kept: .*{reason}"):
            build_engine(config)
        info = build_engine(make_config(tmp_path, **changes, deterministic=False))[1]
    assert info.batch_dependence is not None
    assert "deterministic" not in info.fingerprint


@needs_compiled
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 40}, "hidden_size 40"),
        ({"intermediate_size": 100}, "intermediate_size 100"),
        ({"head_dim": 8}, "head_dim 8"),
    ],
)
def test_sizes_that_the_compiled_kernels_leave_to_torch_are_named(changes: dict[str, int], reason: str) -> None:
    assert batch_dependence(tiny_config(), torch.float32, CPU) is None
    assert reason in (batch_dependence(tiny_config(**changes), torch.float32, CPU) or "")
    assert "on cuda" in (batch_dependence(tiny_config(), torch.float32, torch.device("cuda")) or "")


@pytest.mark.parametrize(("reason", "is_refused"), [(None, False), ("on cuda it is so", True)])
def test_a_job_that_asks_for_it_is_refused_by_name_where_it_can_not_be_kept(
    reason: str | None, is_refused: bool
) -> None:
    info = EngineInfo(512, 64, 16, 8, 320, 4096, "cuda", "float32", "print", 1, batch_dependence=reason)
    check_deterministic(GenerateRequest(id="a", prompt="x"), info)
    request = GenerateRequest(id="a", prompt="x", deterministic=True)
    if not is_refused:
        check_deterministic(request, info)
        return
    with pytest.raises(JobError, match="deterministic can't be kept by this worker: on cuda") as raised:
        check_deterministic(request, info)
    assert raised.value.code is ErrorCode.BAD_REQUEST
