"""Steps that are launched before the host knows the tokens of the step before: staged, in graphs, and penalised."""

from pathlib import Path

import pytest
import torch

from model.decode_shapes import decode_shapes
from model.input_batch import InputBatch
from model.model_runner import ModelRunner
from model.staging import Staging
from scheduler.sampling_params import SamplingParams
from tests.tiny_checkpoint import write_tiny_checkpoint
from tests.unit.model_runner.late_device import PromptDevice
from tests.unit.model_runner.test_cuda_graphs import KeptCalls
from worker.engine import Engine
from worker.llm import LLM

MAX_SEQS, MAX_LEN = 8, 256
PROMPTS = [[7 * n % 250 + k for k in range(3 + 11 * n)] for n in range(7)]
PENALISED = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def params() -> list[SamplingParams]:
    """Greedy and not, with penalties and without, of several lengths."""
    wishes = [{}, PENALISED, {"temperature": 0.9}, PENALISED | {"temperature": 0.9}]
    return [
        SamplingParams(**({"temperature": 0} | wishes[n % 4]), seed=n, max_tokens=9 + 4 * n, ignore_eos=True)  # type: ignore[arg-type]
        for n in range(len(PROMPTS))
    ]


def generate(folder: Path, *, is_overlapping: bool, is_staged: bool) -> tuple[list[tuple[int, ...]], KeptCalls]:
    options = {"num_kv_blocks": 200, "max_num_seqs": MAX_SEQS, "max_model_len": MAX_LEN, "num_threads": 1}
    capture = KeptCalls()
    with LLM(str(folder), device="cpu", **options) as llm:  # type: ignore[arg-type]
        runner = llm.engine.runner
        assert isinstance(runner, ModelRunner)
        if is_overlapping:  # as on CUDA: the next step is launched before the tokens of this one are asked for
            llm.engine = Engine(llm.engine.scheduler, runner, check_invariants="step", overlapping=runner)
        if is_staged:
            shapes, staging = decode_shapes(MAX_SEQS, MAX_LEN), Staging(PromptDevice(), 1 << 18)
            runner._batch = InputBatch(MAX_SEQS, MAX_LEN, 16, torch.device("cpu"), shapes=shapes, staging=staging)
            assert runner.capture_graphs(capture)
        made = llm.generate(list(PROMPTS), params())
    return [completion.token_ids for completion in made], capture


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[tuple[int, ...]]:
    """What steps one after the other draw."""
    return generate(folder, is_overlapping=False, is_staged=False)[0]


@pytest.mark.parametrize("is_staged", [False, True], ids=["in place", "staged, in graphs"])
def test_overlapping_steps_draw_the_same_tokens(folder: Path, plain: list[tuple[int, ...]], is_staged: bool) -> None:
    made, capture = generate(folder, is_overlapping=True, is_staged=is_staged)
    assert made == plain
    assert (capture.num_replayed > 0) is is_staged


def test_penalties_change_what_is_drawn(folder: Path, plain: list[tuple[int, ...]]) -> None:
    """Or the test above would show nothing of them."""
    with LLM(str(folder), device="cpu", num_kv_blocks=200, num_threads=1) as llm:
        wishes = SamplingParams(temperature=0, max_tokens=len(plain[1]), ignore_eos=True)
        assert llm.generate([PROMPTS[1]], wishes)[0].token_ids != plain[1]
