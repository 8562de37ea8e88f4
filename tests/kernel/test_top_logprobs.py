"""The likeliest tokens of each row: which, in which order, how likely, and what is never among them."""

import pytest
import torch

from kernels import reference
from kernels.dispatch import implementation
from kernels.errors import KernelInputError
from kernels.top_logprobs import _first_largest, _sorted_largest, top_logprobs

pytestmark = pytest.mark.usefixtures("kernels_in_use")


def some_logits(num_rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    """Rows in the middle of a larger tensor; every third has many ties, every fourth holds what is no number."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn((num_rows, vocab + 5), generator=g)[:, :vocab] * 4
    logits[::3] = logits[::3].round()
    is_odd = torch.rand((num_rows, vocab), generator=g) < 0.3
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf])[torch.randint(0, 3, (num_rows, vocab), generator=g)]
    logits[::4] = torch.where(is_odd, odd, logits)[::4]
    return logits


def check_equal(made: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert made[1].tolist() == expected[1].tolist()
    assert (made[0].dtype, made[1].dtype) == (torch.float64, torch.int64)
    torch.testing.assert_close(made[0], expected[0], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 31, 33, 200, 700])
@pytest.mark.parametrize("k", [1, 2, 5, 17, 40])
def test_the_likeliest_are_those_of_the_twin(vocab: int, k: int) -> None:
    logits = some_logits(24, vocab, seed=vocab)
    check_equal(top_logprobs(logits, k, vocab), reference.top_logprobs(logits, k, vocab))


@pytest.mark.triton
@pytest.mark.parametrize("vocab_limit", [1, 16, 30, 49])
def test_ids_from_the_limit_on_have_no_part_in_it(vocab_limit: int) -> None:
    logits = some_logits(12, 50)
    logits[:, vocab_limit:] = 1000.0
    check_equal(top_logprobs(logits, 4, vocab_limit), reference.top_logprobs(logits, 4, vocab_limit))


def test_a_large_vocabulary_in_any_order() -> None:
    """Rising logits are the worst order: each token beats all before it."""
    logits = some_logits(5, 49152, seed=3)
    logits[1] = torch.arange(49152) * 1e-3
    logits[2] = -torch.arange(49152) * 1e-3
    logits[4] = -0.0
    made = top_logprobs(logits, 17, 49152)
    check_equal(made, reference.top_logprobs(logits, 17, 49152))
    with implementation("torch"):
        check_equal(top_logprobs(logits, 17, 49152), made)


@pytest.mark.parametrize("k", [1, 5, 40])
def test_sorting_finds_the_same_as_the_search_on_the_cpu(k: int) -> None:
    logits = some_logits(24, 40, seed=k)
    usable = logits.masked_fill(~logits.isfinite(), -torch.inf)
    for one, other in zip(_first_largest(usable, k), _sorted_largest(usable, k), strict=True):
        assert torch.equal(one, other)


@pytest.mark.triton
def test_zero_and_minus_zero_are_equal() -> None:
    logits = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -1.0]])
    assert top_logprobs(logits, 4, 5)[1].tolist() == [[0, 1, 2, 3]]


@pytest.mark.triton
def test_a_row_without_a_number_has_no_tokens() -> None:
    logits = torch.full((2, 40), torch.nan)
    logits[1, 7] = -3.0
    values, ids = top_logprobs(logits, 3, 40)
    assert ids.tolist() == [[-1] * 3, [7, -1, -1]]
    assert values.tolist() == [[-torch.inf] * 3, [0.0, -torch.inf, -torch.inf]]


@pytest.mark.triton
def test_no_rows_give_none() -> None:
    values, ids = top_logprobs(torch.empty((0, 40)), 3, 40)
    assert values.shape == ids.shape == (0, 3)


@pytest.mark.parametrize(("vocab_limit", "k"), [(0, 3), (41, 3), (40, 0)])
def test_a_limit_beyond_the_vocabulary_or_no_k_is_refused(vocab_limit: int, k: int) -> None:
    with pytest.raises(KernelInputError, match="vocab_limit"):
        top_logprobs(torch.zeros(2, 40), k, vocab_limit)
