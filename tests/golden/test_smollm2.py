"""The demo model, greedily, through the whole engine: token for token what transformers generates.

The reference has no near ties (its smallest gap between the two largest logits is 2.4e-4), so equality is exact.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.golden.reference import load_reference
from tests.golden.swapped_runs import SwappedRun

NEAR_TIE = 1e-4


def run_engine(model: Path, mode: str) -> dict[str, Any]:
    """What tests.golden.run_engine prints, on as many threads as an engine takes by itself."""
    command = [sys.executable, "-m", "tests.golden.run_engine", str(model), mode]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False, env=environment)
    assert ran.returncode == 0, ran.stderr
    outcome: dict[str, Any] = json.loads(ran.stdout)
    return outcome


def check(outcome: dict[str, Any]) -> None:
    """Every prompt's ids are the reference's."""
    for name, made in load_reference().items():
        assert min(made.gaps) > NEAR_TIE, f"{name} has a near tie: compare its logits instead"
        assert outcome["ids"][name] == made.ids, name


@pytest.mark.timeout(1200)
def test_all_prompts_at_once_give_the_reference(demo_model_path: Path) -> None:
    outcome = run_engine(demo_model_path, "all_at_once")
    check(outcome)
    assert outcome["num_preemptions"] == 0


@pytest.mark.timeout(1200)
def test_preempted_sequences_give_the_reference(demo_model_path: Path) -> None:
    outcome = run_engine(demo_model_path, "preempted")
    assert outcome["num_preemptions"] > 0
    check(outcome)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sequences_that_are_swapped_every_few_tokens_give_the_reference(demo_model_path: Path) -> None:
    outcome = run_engine(demo_model_path, "swapped")
    check(outcome)
    SwappedRun(**outcome).check()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["one_by_one", "shuffled"])
def test_any_other_way_gives_the_reference(demo_model_path: Path, mode: str) -> None:
    check(run_engine(demo_model_path, mode))
