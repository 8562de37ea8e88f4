"""How weights become 4 bits: files that have so many come back as they were, others lose as little as can be had."""

import pytest
import torch

from kernels import int4_weights
from kernels.int4_weights import INT4, LIMIT, NUM_STEPS, quantize_int4
from kernels.quantized_linear import QuantizedLinear
from kernels.weight_formats import GROUP
from tests.kernel.batches import error


def restored(weight: torch.Tensor) -> torch.Tensor:
    """The weight [rows, n * 32] from its integers, scales and minima."""
    integers, scales, minima = quantize_int4(weight)
    assert scales.dtype is minima.dtype is torch.float16
    assert bool(((integers >= 0) & (integers <= LIMIT) & (integers == integers.round())).all())
    return (integers * scales[..., None].float() + minima[..., None].float()).flatten(1)


def halves(*shape: int, seed: int) -> torch.Tensor:
    """Numbers that float16 holds, of a weight's magnitudes."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(0.02).half().float()


def integers_between(first: int, last: int, num_rows: int) -> torch.Tensor:
    """[num_rows, 4, 32], the first and the last in every group."""
    drawn = torch.randint(first, last + 1, (num_rows, 4, GROUP), generator=torch.Generator().manual_seed(last))
    drawn[..., 3], drawn[..., 20] = first, last
    return drawn.float()


def test_a_file_of_4_bits_with_scales_and_minima_comes_back() -> None:
    """As Q4_1: its groups reach from 0 to 15."""
    weight = (integers_between(0, 15, 300) * halves(300, 4, 1, seed=1).abs() + halves(300, 4, 1, seed=2)).flatten(1)
    assert error(restored(weight), weight.double()) < 1e-6
    assert torch.equal(QuantizedLinear(weight.clone(), form=INT4).weight(), restored(weight))


@pytest.mark.parametrize("last", range(8, 16))
@pytest.mark.parametrize("sign", [1, -1])
def test_a_file_of_4_bits_with_scales_alone_comes_back_nearly(last: int, sign: int) -> None:
    """As Q4_0: the weight of the largest magnitude lies at 0, the others end somewhere below 16."""
    scales = sign * halves(100, 4, 1, seed=3)
    weight = ((integers_between(0, last, 100) - 8) * scales).flatten(1)
    assert error(restored(weight), weight.double()) < 1e-3


def test_the_rounding_is_the_best_of_those_that_are_tried() -> None:
    """Against each of them in float64, group by group, with scale and minimum by a solver of least squares."""
    weight = torch.randn(40, GROUP, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    weight[::4] **= 3
    found = (restored(weight.float()).double() - weight).square().sum(1)
    for group, made in zip(weight, found, strict=True):
        errors = []
        for num_steps in NUM_STEPS:
            fraction = (group - group.min()) / (group.max() - group.min())
            integers = (fraction * num_steps - max(0.0, num_steps - LIMIT) / 2).round().clamp(0, LIMIT)
            columns = torch.stack((integers, torch.ones(GROUP, dtype=torch.float64)), dim=1)
            solved = columns @ torch.linalg.lstsq(columns, group[:, None]).solution
            errors.append(float((solved[:, 0] - group).square().sum()))
        assert float(made) <= 1.01 * min(errors)


def test_it_is_better_than_steps_from_the_least_to_the_largest() -> None:
    weight = torch.randn(200, 8 * GROUP, generator=torch.Generator().manual_seed(6))
    groups = weight.view(200, 8, GROUP)
    least, most = (bound[..., None] for bound in groups.aminmax(dim=2))
    plain = ((groups - least) * LIMIT / (most - least)).round() * (most - least) / LIMIT + least
    assert error(restored(weight), weight.double()) < 0.95 * error(plain.flatten(1), weight.double())


def test_equal_weights_and_zeros_stay_what_they_are() -> None:
    weight = torch.cat((torch.zeros(3, GROUP), torch.full((3, GROUP), -0.375)))
    assert torch.equal(restored(weight), weight)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e6, -1e6])
def test_what_is_not_finite_in_float16_gives_nan_in_its_group_alone(value: float) -> None:
    weight = torch.randn(4, 2 * GROUP, generator=torch.Generator().manual_seed(7))
    weight[1, 40] = value
    made = restored(weight)
    assert not made[1, GROUP:].isfinite().any()
    made[1, GROUP:] = weight[1, GROUP:] = 0
    assert made.isfinite().all()


@pytest.mark.parametrize(("device", "num_pieces"), [("cpu", 5), ("meta", 1)])
def test_off_the_cpu_pieces_are_so_large_that_their_launches_do_not_count(
    device: str, num_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of 13 billion weights has 400 million groups: by the thousand it would take a device minutes."""
    sizes: list[int] = []

    def counted(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.append(x.shape[1])
        return fit(x)

    fit = int4_weights._fit
    monkeypatch.setattr(int4_weights, "_fit", counted)
    quantize_int4(torch.zeros(500, 10 * GROUP, device=device))
    assert (len(sizes), sum(sizes)) == (num_pieces, 5000)
