"""What a start says and does about compiled kernels."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import kernels
from kernels.cpu.code_cache import cache_root
from kernels.dispatch import has_compiled
from model.model_runner import COMPILE_STAGE
from tests.tiny_checkpoint import write_tiny_checkpoint
from worker.engine_builder import build_engine
from worker.engine_config import EngineConfig

pytestmark = pytest.mark.skipif(not has_compiled(), reason="nothing is compiled with torch's operators")


@pytest.fixture(autouse=True)
def the_user_s_cache_again() -> Iterator[None]:
    yield
    kernels.set_cache_root(None)


def stages_of(config: EngineConfig) -> set[str]:
    """Stages of the start's progress."""
    stages = set()
    build_engine(config, progress=lambda stage, done, total: stages.add(stage))
    return stages


def test_kernels_are_kept_in_the_chosen_cache_folder(tmp_path: Path) -> None:
    config = EngineConfig(str(write_tiny_checkpoint(tmp_path / "model")), cache_dir=str(tmp_path), num_kv_blocks=8)
    build_engine(config)
    assert cache_root() == tmp_path / "kernels"


def test_compiling_is_told_only_where_there_is_something_to_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(str(write_tiny_checkpoint(tmp_path)), num_kv_blocks=8)
    build_engine(config)
    assert COMPILE_STAGE not in stages_of(config)
    monkeypatch.setattr("model.model_runner.is_compiled", lambda *shape: False)
    assert COMPILE_STAGE in stages_of(config)
