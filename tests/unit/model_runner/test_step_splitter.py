"""Memory that runs out in a step: the step is computed in parts, and only who doesn't fit alone fails."""

import random

import pytest
import torch

from model.decoder import Decoder
from model.layers import ForwardContext
from model.model_runner import ModelRunner
from model.step_splitter import compute_in_parts, is_out_of_memory
from scheduler.output import Chunks, FinishReason, SequenceOutput
from scheduler.sampling_params import SamplingParams
from tests.tiny_checkpoint import write_tiny_checkpoint
from tests.unit.chunks import chunk_rows, make_chunks
from worker.engine import Engine, EngineRequest
from worker.engine_builder import build_engine
from worker.engine_config import EngineConfig

POISON = 300
CUDA_ERROR = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
ERRORS = [
    CUDA_ERROR,
    MemoryError(),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
]


class ShortOfMemory:
    """Stands before a decoder and runs out of memory above `max_tokens` tokens, or where POISON is among them.

    It does so at the end of the forward pass, when most keys and values are written.
    """

    def __init__(self, decoder: Decoder, max_tokens: int, error: Exception) -> None:
        self._decoder = decoder
        self._max_tokens = max_tokens
        self._error = error
        self.cos_sin = decoder.cos_sin
        self.logits = decoder.logits
        self.num_failures = 0

    def hidden(
        self, input_ids: torch.Tensor, context: ForwardContext, logits_rows: torch.Tensor | None
    ) -> torch.Tensor:
        hidden = self._decoder.hidden(input_ids, context, logits_rows)
        if len(input_ids) > self._max_tokens or bool((input_ids == POISON).any()):
            self.num_failures += 1
            raise self._error
        return hidden


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return EngineConfig(
        str(folder), max_model_len=256, num_kv_blocks=64, max_num_seqs=16, num_threads=1, check_invariants="step"
    )


def make_requests(num_poisoned: int = 0) -> list[EngineRequest]:
    """Greedy and drawn ones, short and long; the last ones carry POISON in the middle of their prompts."""
    rng = random.Random(3)
    requests = []
    for number in range(8):
        prompt = [rng.randrange(256) for _ in range(rng.choice([2, 30, 90]))]
        if number >= 8 - num_poisoned:
            prompt[len(prompt) // 2] = POISON
        sampling = SamplingParams(temperature=[0.0, 0.8][number % 2], max_tokens=12, ignore_eos=True)
        requests.append(EngineRequest(f"r{number}", tuple(prompt), sampling, seed=number))
    return requests


def serve(engine: Engine, requests: list[EngineRequest]) -> tuple[dict[str, list[int]], dict[str, SequenceOutput]]:
    """The tokens and the last output of each request."""
    tokens: dict[str, list[int]] = {request.seq_id: [] for request in requests}
    ends = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            tokens[output.seq_id] += output.new_token_ids
            if output.finish_reason is not None:
                ends[output.seq_id] = output
    return tokens, ends


def short_engine(config: EngineConfig, max_tokens: int, error: Exception) -> tuple[Engine, ShortOfMemory]:
    engine = build_engine(config)[0]
    assert isinstance(engine.runner, ModelRunner)
    short = ShortOfMemory(engine.runner._forward.decoder, max_tokens, error)
    engine.runner._forward.decoder = short  # type: ignore[assignment]
    return engine, short


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("max_tokens", [1, 3, 64])
def test_a_step_that_does_not_fit_is_split_and_no_token_changes(
    config: EngineConfig, max_tokens: int, error: Exception
) -> None:
    expected, _ = serve(build_engine(config)[0], make_requests())
    engine, short = short_engine(config, max_tokens, error)
    tokens, ends = serve(engine, make_requests())
    assert tokens == expected
    assert {output.finish_reason for output in ends.values()} == {FinishReason.LENGTH}
    assert engine.stats().num_step_splits == short.num_failures > 0


@pytest.mark.parametrize("num_poisoned", [1, 3])
def test_only_requests_that_do_not_fit_alone_fail(config: EngineConfig, num_poisoned: int) -> None:
    requests = make_requests(num_poisoned)
    innocent = [request.seq_id for request in requests[:-num_poisoned]]
    culprits = [request.seq_id for request in requests[-num_poisoned:]]
    expected, _ = serve(build_engine(config)[0], requests[:-num_poisoned])
    engine, _ = short_engine(config, 10**9, CUDA_ERROR)
    tokens, ends = serve(engine, requests)
    assert {seq_id: tokens[seq_id] for seq_id in innocent} == expected
    for seq_id in culprits:
        end = ends[seq_id]
        assert (end.finish_reason, end.is_out_of_memory, end.new_token_ids) == (FinishReason.ERROR, True, ())
        assert end.error is not None
        assert end.error.startswith("out of memory: not even one token")
    assert not any(ends[seq_id].is_out_of_memory for seq_id in innocent)
    stats = engine.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    # The engine serves on, and what the culprits left behind is not found in the prefix cache.
    assert serve(engine, requests[:-num_poisoned])[0] == expected


def test_a_request_that_does_not_fit_costs_few_tries() -> None:
    """512 tokens whose last one doesn't fit: halves, not one token after the other."""
    tries: list[int] = []

    def compute(chunks: Chunks) -> dict[str, int]:
        tries.append(sum(chunks.num_tokens))
        if chunks.starts[-1] + chunks.num_tokens[-1] == 512:
            raise MemoryError
        return {}

    step = compute_in_parts(make_chunks(("a", 0, 512, True)), compute)
    assert tries == [512, 256, 256, 128, 128, 64, 64, 32, 32, 16, 16, 8, 8, 4, 4, 2, 2, 1, 1]
    assert list(step.failed) == ["a"]
    assert step.num_splits == 10
    assert "position 511" in step.failed["a"]


def test_pieces_cover_a_chunk_in_order_and_only_the_last_one_is_sampled() -> None:
    done: list[tuple[str, int, int, bool]] = []

    def compute(chunks: Chunks) -> dict[str, int]:
        if len(chunks) > 1 or chunks.num_tokens[0] > 3:
            raise CUDA_ERROR
        done.extend(chunk_rows(chunks))
        return dict.fromkeys(chunks.sampled_ids, 5)

    step = compute_in_parts(make_chunks(("a", 4, 7, True), ("b", 0, 4, False)), compute)
    assert done == [
        ("a", 4, 3, False),
        ("a", 7, 2, False),
        ("a", 9, 2, True),
        ("b", 0, 2, False),
        ("b", 2, 2, False),
    ]
    assert (step.parts, step.failed) == ([{}, {}, {"a": 5}, {}, {}], {})


def test_what_torch_says_of_a_block_too_large_counts_as_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 55, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)


def test_an_error_of_another_kind_is_no_shortage_of_memory() -> None:
    def compute(chunks: Chunks) -> dict[str, int]:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        compute_in_parts(make_chunks(("a", 0, 8, True)), compute)
