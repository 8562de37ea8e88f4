"""The demo model: a sequence's tokens are the same however the engine comes to compute it."""

from pathlib import Path

import pytest

from kernels.dispatch import has_compiled
from tests.golden.reference import load_reference
from tests.unit.engine.deterministic_runs import all_ways, check, target_of
from worker.engine_config import EngineConfig


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not has_compiled(), reason="torch's operators make no such promise")
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "drawn"])
def test_the_demo_model_says_the_same_in_every_way(demo_model_path: Path, temperature: float) -> None:
    prompt = next(made.prompt_ids for made in load_reference().values() if len(made.prompt_ids) > 40)
    config = EngineConfig(
        str(demo_model_path), max_model_len=512, num_kv_blocks=400, max_num_seqs=40, deterministic=True
    )
    check(all_ways(config, target_of(tuple(prompt), temperature, num_new=24), max_prompt=40))
