"""The cost of a step, against sums done by hand."""

import pytest

from ops.simulate.cost import CostModel
from ops.simulate.errors import SimulateError
from ops.simulate.presets import cost_model, figures_of, num_blocks_of
from scheduler.output import BlockCopy, SchedulerOutput, Transfer
from tests.unit.chunks import make_chunks

BLOCK_SIZE = 4
MODEL = CostModel(
    weight_bytes=100,
    kv_bytes=2,
    flops_per_token=10,
    attention_flops=1,
    read_bytes_per_s=10,
    flops_per_s=20,
    link_bytes_per_s=4,
    overhead_s=0.5,
)
# A decode of the tenth token, and tokens 5 to 7 of a prompt.
CHUNKS = make_chunks(("a", 9, 1, True), ("b", 4, 3, False))


def copies(count: int) -> tuple[BlockCopy, ...]:
    return tuple(BlockCopy(index, index) for index in range(count))


def transfers(*counts: int) -> tuple[Transfer, ...]:
    return tuple(Transfer(number, copies(count)) for number, count in enumerate(counts))


def test_a_step_reads_the_weights_once_and_each_context_once() -> None:
    cost = MODEL.step(SchedulerOutput(1, CHUNKS), BLOCK_SIZE)
    assert cost.read_s == pytest.approx((100 + (10 + 7) * 2) / 10)
    assert cost.compute_s == pytest.approx((4 * 10 + 10 + 5 + 6 + 7) / 20)
    assert cost.copy_s == 0
    assert cost.total_s == pytest.approx(13.4 + 0.5)
    assert cost.bound == "memory"


def test_a_long_prompt_is_bound_by_arithmetic() -> None:
    cost = MODEL.step(SchedulerOutput(1, make_chunks(("a", 0, 100, True))), BLOCK_SIZE)
    assert cost.read_s == pytest.approx(30)
    assert cost.compute_s == pytest.approx((1000 + 5050) / 20)
    assert cost.total_s == pytest.approx(302.5 + 0.5)
    assert cost.bound == "compute"


def test_swaps_overlap_with_arithmetic_and_the_two_directions_with_one_another() -> None:
    hidden = MODEL.step(SchedulerOutput(1, CHUNKS, swap_outs=transfers(1, 2), swap_ins=transfers(2)), BLOCK_SIZE)
    assert hidden.copy_s == pytest.approx(3 * 8 / 4)
    assert hidden.total_s == MODEL.step(SchedulerOutput(1, CHUNKS), BLOCK_SIZE).total_s
    seen = MODEL.step(SchedulerOutput(1, CHUNKS, swap_outs=transfers(3), swap_ins=transfers(4, 3)), BLOCK_SIZE)
    assert seen.total_s == pytest.approx(7 * 8 / 4 + 0.5)
    assert seen.bound == "copies"


def test_copies_without_chunks_read_no_weights() -> None:
    cost = MODEL.step(SchedulerOutput(1, swap_ins=transfers(2)), BLOCK_SIZE)
    assert (cost.read_s, cost.compute_s) == (0, 0)
    assert cost.total_s == pytest.approx(4.5)
    cost = MODEL.step(SchedulerOutput(1, block_copies=copies(5)), BLOCK_SIZE)
    assert cost.total_s == pytest.approx(2 * 5 * 8 / 10 + 0.5)


def test_a_step_that_only_drops_rows_is_free() -> None:
    cost = MODEL.step(SchedulerOutput(1, removed_ids=("a",)), BLOCK_SIZE)
    assert cost.total_s == 0
    assert cost.bound == "nothing"


@pytest.mark.parametrize(
    ("preset", "recompute_us", "swap_us", "num_blocks"),
    [("13b-a100", 166.7, 65.5, 3387), ("8b-h100", 32.0, 5.24, 25939)],
)
def test_the_presets_recompute_and_swap_a_token_at_their_known_costs(
    preset: str, recompute_us: float, swap_us: float, num_blocks: int
) -> None:
    """A token's arithmetic without attention, and its way out and back in."""
    figures = figures_of(preset, {})
    model = cost_model(figures)
    assert 1e6 * model.flops_per_token / model.flops_per_s == pytest.approx(recompute_us, rel=1e-3)
    assert 1e6 * 2 * model.kv_bytes / model.link_bytes_per_s == pytest.approx(swap_us, rel=1e-3)
    assert num_blocks_of(preset, figures, 16) == num_blocks


def test_figures_that_are_given_replace_the_preset_s() -> None:
    figures = figures_of("8b-h100", {"weights_gb": 8.0, "kv_kib": None})
    assert (figures["weights_gb"], figures["kv_kib"], figures["params_b"]) == (8.0, 128.0, 8.0)
    with pytest.raises(SimulateError, match="75 GB of weights leave no room"):
        num_blocks_of("8b-h100", figures_of("8b-h100", {"weights_gb": 75.0}), 16)


def test_the_cpu_s_figures_must_be_measured() -> None:
    with pytest.raises(SimulateError, match="needs --bandwidth-gb-s"):
        figures_of("cpu", {"compute_tflops": 0.1})
    with pytest.raises(SimulateError, match="needs --compute-tflops"):
        figures_of("cpu", {"bandwidth_gb_s": 20.0})
    figures = figures_of("cpu", {"bandwidth_gb_s": 20.0, "compute_tflops": 0.1})
    assert figures["link_gb_s"] == 10.0
    with pytest.raises(SimulateError, match="needs --num-blocks or --pool-share"):
        num_blocks_of("cpu", figures, 16)
