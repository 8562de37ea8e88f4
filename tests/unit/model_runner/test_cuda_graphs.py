"""Decodes that are padded to a few shapes, and graphs of them, by a double that captures by keeping the call."""

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from model.decode_shapes import DecodeShape, DecodeShapes, decode_shapes
from model.decoder import Decoder
from model.graph_memory import measure_graphs
from model.input_batch import InputBatch
from model.model_runner import RunnerConfig
from model.staging import Staging
from model.weights import random_weights
from tests.unit.model_runner.driver import Driver, random_prompt, tiny_config
from tests.unit.model_runner.late_device import PromptDevice

CONFIG = tiny_config()
SEED = 11


@dataclass
class KeptCalls:
    """Captures a graph by keeping the call that computes it; replaying it calls it again, on the same tensors."""

    num_captured: int = 0
    num_replayed: int = 0
    fails_at: int | None = None
    error: RuntimeError = field(default_factory=lambda: RuntimeError("operation not permitted\nwhen capturing"))

    def __call__(self, compute: Callable[[], None]) -> Callable[[], None]:
        if self.num_captured == self.fails_at:
            raise self.error
        compute()
        self.num_captured += 1

        def replay() -> None:
            self.num_replayed += 1
            compute()

        return replay


def made(*, has_graphs: bool, capture: KeptCalls | None = None, max_num_seqs: int = 12) -> Driver:
    """A driver on the CPU's real kernels; with graphs, its inputs are staged as for CUDA."""
    limits = RunnerConfig(max_num_seqs=max_num_seqs, max_model_len=128, use_cuda_graphs=has_graphs)
    driver = Driver(CONFIG, random_weights(CONFIG, seed=1), runner=limits, num_blocks=160)
    if has_graphs:
        shapes = decode_shapes(max_num_seqs, 128)
        driver.runner._batch = InputBatch(
            max_num_seqs, 128, 8, torch.device("cpu"), shapes=shapes, staging=Staging(PromptDevice(), 1 << 16)
        )
        if capture is not None:
            driver.runner.capture_graphs(capture)
    return driver


def run(driver: Driver, num_seqs: int, num_new_tokens: int) -> dict[str, list[int]]:
    """The tokens drawn for prompts of all lengths, in steps that mix prompts and decodes and then are decodes alone."""
    rng = random.Random(SEED)
    sequences = {
        f"s{number}": driver.add(f"s{number}", random_prompt(1 + 5 * number, CONFIG.vocab_size, rng))
        for number in range(num_seqs)
    }
    driver.decode_raggedly(num_new_tokens // 2, rng)
    driver.decode(num_new_tokens)
    return {name: sequence.drawn[:num_new_tokens] for name, sequence in sequences.items()}


@pytest.mark.parametrize("num_seqs", [1, 3, 5, 9, 12])
def test_padded_decodes_and_graphs_draw_what_plain_ones_do(num_seqs: int) -> None:
    capture = KeptCalls()
    plain = run(made(has_graphs=False), num_seqs, 10)
    assert run(made(has_graphs=True), num_seqs, 10) == plain, "padded, not captured"
    assert run(made(has_graphs=True, capture=capture), num_seqs, 10) == plain, "captured"
    assert capture.num_replayed > 0


def test_logits_of_replayed_steps_are_those_of_plain_ones_bit_for_bit() -> None:
    drivers = [made(has_graphs=False), made(has_graphs=True, capture=KeptCalls())]
    for driver in drivers:
        run(driver, 5, 6)
    for name, sequence in drivers[0].sequences.items():
        assert torch.equal(torch.stack(sequence.logits), torch.stack(drivers[1].sequences[name].logits)), name


def test_padding_writes_to_no_slot_and_reads_none() -> None:
    """All unwritten slots are NaN: in block 0, to which an unwritten table entry points, they stay so."""
    driver = made(has_graphs=True, capture=KeptCalls())
    driver.free_blocks = list(range(1, 160))
    run(driver, 5, 6)
    assert driver.kv_cache.blocks[0].isnan().all()
    hidden = driver.runner._forward.hidden(driver.runner._batch.idle_decode(DecodeShape(8, 128)))
    assert hidden.shape == (0, CONFIG.hidden_size)
    assert driver.kv_cache.blocks[0].isnan().all()


def test_a_step_that_is_no_pure_decode_is_not_replayed() -> None:
    capture = KeptCalls()
    driver = made(has_graphs=True, capture=capture)
    rng = random.Random(SEED)
    driver.add("a", random_prompt(9, CONFIG.vocab_size, rng))
    driver.add("b", random_prompt(9, CONFIG.vocab_size, rng))
    driver.step({"a": 9})
    driver.step({"a": 1, "b": 4})
    driver.step({"a": 1, "b": 1})
    assert capture.num_replayed == 0, "a prompt, a piece of one, and a token of one that is not its last"
    driver.step({"a": 1})
    assert capture.num_replayed == 1


def test_inputs_at_other_addresses_are_computed_without_the_graph() -> None:
    """An array that had no room in the staging buffer lies elsewhere."""
    capture = KeptCalls()
    driver = made(has_graphs=True, capture=capture)
    wanted = run(made(has_graphs=False), 3, 6)
    small = Staging(PromptDevice(), 256)
    driver.runner._batch._staging = small
    assert run(driver, 3, 6) == wanted
    assert capture.num_replayed == 0


def test_all_shapes_are_captured_the_largest_first() -> None:
    driver = made(has_graphs=True)
    captured: list[int] = []
    assert driver.runner.capture_graphs(lambda compute: captured.append(0) or compute)  # type: ignore[func-returns-value]
    assert driver.runner.num_graphs == len(captured) == 5
    shapes = decode_shapes(12, 128)
    sizes = [tuple(shape) for shape in shapes.largest_first()]
    assert sizes == [(12, 128), (8, 128), (4, 128), (2, 128), (1, 128)]


def test_where_one_can_t_be_captured_steps_go_on_without_graphs_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    capture = KeptCalls(fails_at=2)
    with caplog.at_level(logging.WARNING, "pagemill.model"):
        driver = made(has_graphs=True, capture=capture)
    (record,) = caplog.records
    assert record.getMessage() == (
        "decodes run without CUDA graphs, since one of 4 sequences can't be captured: operation not permitted"
    )
    assert driver.runner.num_graphs == 0
    assert run(driver, 3, 6) == run(made(has_graphs=False), 3, 6)
    assert capture.num_replayed == 0
    assert driver.runner._batch.shapes is None, "nothing is padded for nothing"


def test_other_errors_than_the_runtime_s_pass_through() -> None:
    driver = made(has_graphs=True)

    def fail(compute: Callable[[], None]) -> Callable[[], None]:
        raise ValueError("a fault of ours")

    with pytest.raises(ValueError, match="a fault of ours"):
        driver.runner.capture_graphs(fail)


def test_without_graphs_there_is_nothing_to_capture() -> None:
    driver = made(has_graphs=False)
    assert not driver.runner.capture_graphs(KeptCalls())
    assert driver.runner.num_graphs == 0


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (12, (1, 2, 4, 8, 12)),
        (32, (1, 2, 4, 8, 16, 24, 32)),
    ],
)
def test_batches_are_padded_to_few_sizes(max_num_seqs: int, sizes: tuple[int, ...]) -> None:
    assert decode_shapes(max_num_seqs, 4096).batch_sizes == sizes


def test_the_largest_size_is_limited() -> None:
    assert decode_shapes(4096, 100).batch_sizes[-3:] == (240, 248, 256)
    assert decode_shapes(4096, 100).find(257, 5) is None


@pytest.mark.parametrize(
    ("max_model_len", "lens"),
    [(8, (8,)), (2048, (2048,)), (2049, (2048, 2049)), (131072, (2048, 8192, 32768, 131072))],
)
def test_contexts_grow_by_a_factor_up_to_the_model_s(max_model_len: int, lens: tuple[int, ...]) -> None:
    assert decode_shapes(4, max_model_len).context_lens == lens


def test_the_smallest_shape_that_holds_a_batch_is_found() -> None:
    shapes = DecodeShapes((1, 2, 4, 8), (64, 100))
    for num_seqs in range(1, 9):
        for context in (1, 63, 64, 65, 100):
            found = shapes.find(num_seqs, context)
            assert found is not None
            assert found.num_seqs >= num_seqs > found.num_seqs // 2
            assert found.max_context_len == (64 if context <= 64 else 100)
    assert shapes.find(9, 1) is None
    assert shapes.find(1, 101) is None


def test_memory_of_all_graphs_is_told_from_the_two_largest() -> None:
    """The first takes the pool, each further one its nodes: 12, 8, 4, 2 and 1 sequences."""
    free = [1000]

    def capture(compute: Callable[[], None]) -> Callable[[], None]:
        compute()
        free[0] -= 300 if free[0] == 1000 else 7
        return compute

    decoder = Decoder(CONFIG, random_weights(CONFIG))
    limits = RunnerConfig(max_num_seqs=12, max_model_len=128, use_cuda_graphs=True, num_threads=1)
    assert measure_graphs(decoder, limits, 16, capture=capture, free_bytes=lambda: free[0]) == 300 + 4 * 7
    one = replace(limits, max_num_seqs=1)
    free[0] = 1000
    assert measure_graphs(decoder, one, 16, capture=capture, free_bytes=lambda: free[0]) == 300
    fails = KeptCalls(fails_at=1)
    assert measure_graphs(decoder, limits, 16, capture=fails, free_bytes=lambda: free[0]) is None
