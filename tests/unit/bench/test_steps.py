"""Single steps: what they are measured by, and where their time goes."""

from pathlib import Path

import pytest

import model.decoder
import model.layers
import model.sampler
from kernels.linear import PackedLinear
from model.loader import load_checkpoint
from ops.bench.bars import judge_bars
from ops.bench.errors import BenchError
from ops.bench.step_profile import KERNELS, REST
from ops.bench.step_report import STEP_COLUMNS, print_steps
from ops.bench.steps import StepCase, measure_steps
from ops.bench.tables import tables_of
from ops.bench.work import num_head_parameters, num_layer_parameters, slot_bytes
from tests.tiny_checkpoint import write_tiny_checkpoint
from worker.engine_config import EngineConfig

CASES = (StepCase(1, 40, 1), StepCase(3, 70, 1), StepCase(1, 50, 50))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_steps_are_timed_and_their_work_is_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = [getattr(module, name) for module, name, _ in KERNELS], PackedLinear.__call__
    found = measure_steps(EngineConfig(str(folder), num_threads=1), CASES)
    config = load_checkpoint(folder).config
    layers, head = num_layer_parameters(config), num_head_parameters(config)
    assert [case["name"] for case in found["cases"]] == ["decode, 1 × 40", "decode, 3 × 70", "prefill of 50"]
    assert [case["work"]["linear_operations"] for case in found["cases"]] == [
        2 * (layers + head),
        2 * 3 * (layers + head),
        2 * (50 * layers + head),
    ]
    assert found["cases"][1]["work"]["kv_bytes"] == 3 * 70 * slot_bytes(config, 4)
    for case in found["cases"]:
        assert 0 < case["least_s"] <= case["median_s"]
        assert sum(case["spent_s"].values()) == pytest.approx(case["least_s"])
        assert set(case["spent_s"]) == {label for _, _, label in KERNELS} | {"linear layers", "output layer", REST}
        assert min(case["spent_s"].values()) > 0
        assert 0 < case["attention_of_step"] < 1
        limits = found["limits"]
        assert case["weights_of_bandwidth"] == pytest.approx(
            case["work"]["weight_bytes"] / case["least_s"] / limits["read_bytes_per_s"]
        )
    # Nobody else's calls are timed any more.
    assert ([getattr(module, name) for module, name, _ in KERNELS], PackedLinear.__call__) == before
    assert tables_of({"bench": "pagemill steps", "steps": found})[1][0][0] == "step"
    print_steps(found)
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == list(STEP_COLUMNS)
    assert [line[0] for line in lines[1:4]] == [case["name"] for case in found["cases"]]


def test_a_checkpoint_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"there is no model at .*nowhere"):
        measure_steps(EngineConfig(str(tmp_path / "nowhere")), CASES)


def test_the_kernels_of_a_step_are_found_where_the_model_calls_them() -> None:
    assert {module for module, _, _ in KERNELS} == {model.decoder, model.layers, model.sampler}
    assert all(callable(getattr(module, name)) for module, name, _ in KERNELS)


@pytest.mark.parametrize(
    ("decode", "prefill", "attention", "met"), [(0.5, 0.75, 0.45, True), (0.49, 0.74, 0.44, False)]
)
def test_single_steps_have_bars_of_their_own(decode: float, prefill: float, attention: float, met: bool) -> None:
    steps = {
        "cases": [
            {"name": "decode, 1 × 256", "num_seqs": 1, "weights_of_bandwidth": decode},
            {"name": "prefill of 512", "num_seqs": 1, "products_of_arithmetic": prefill},
            {"name": "decode, 32 × 1000", "num_seqs": 32, "attention_of_bandwidth": attention},
        ]
    }
    bars = judge_bars([], "none", steps)
    assert [(bar["batch"], bar["is_met"]) for bar in bars] == [(1, met), (1, met), (32, met)]
    assert judge_bars([], "int8", steps) == []
