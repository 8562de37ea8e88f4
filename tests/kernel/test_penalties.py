"""Penalties: what the field's definitions say, in all implementations, whatever the tokens of the sequences are."""

from dataclasses import replace

import pytest
import torch

from kernels import reference
from kernels.dispatch import implementation
from kernels.errors import KernelInputError
from kernels.penalties import Penalties, apply_penalties

pytestmark = [pytest.mark.usefixtures("kernels_in_use"), pytest.mark.triton]

VOCAB = 50


def some_penalties(num_rows: int, max_len: int = 70, seed: int = 0) -> Penalties:
    """Rows in any order over more sequences than rows; tokens that repeat, some outside the vocabulary; any lengths."""
    g = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(-1, VOCAB + 1, (num_rows + 3, max_len + 5), generator=g)[:, :max_len]
    num_tokens = torch.randint(0, max_len + 1, (num_rows,), generator=g)
    num_tokens[:2] = torch.tensor([0, max_len])[:num_rows]
    num_prompt = (num_tokens * torch.rand(num_rows, generator=g)).long()
    return Penalties(
        *(token_ids, torch.randperm(num_rows + 3, generator=g)[:num_rows], num_prompt, num_tokens),
        *(torch.rand(num_rows, generator=g) + 0.5, torch.rand(num_rows, generator=g) * 4 - 2),
        torch.rand(num_rows, generator=g) * 4 - 2,
    )


def one_row(tokens: list[int], num_prompt: int, *amounts: float) -> Penalties:
    """Of one sequence; amounts: repetition, frequency, presence."""
    numbers = (torch.tensor([n]) for n in (0, num_prompt, len(tokens)))
    return Penalties(torch.tensor([tokens]), *numbers, *(torch.tensor([amount]) for amount in amounts))


def some_logits(num_rows: int, seed: int = 1) -> torch.Tensor:
    return torch.randn((num_rows, VOCAB + 3), generator=torch.Generator().manual_seed(seed))[:, :VOCAB] * 4


def test_logits_are_those_of_the_twin() -> None:
    penalties, logits = some_penalties(12), some_logits(12)
    wanted = logits.clone()
    reference.apply_penalties(wanted, penalties)
    apply_penalties(logits, penalties)
    torch.testing.assert_close(logits, wanted, rtol=1e-6, atol=2e-6)


def test_all_implementations_give_the_same_bits() -> None:
    penalties, logits = some_penalties(12, seed=5), some_logits(12)
    logits[3, ::2] = torch.nan
    logits[4, ::2] = -torch.inf
    other = logits.clone()
    apply_penalties(logits, penalties)
    with implementation("torch"):
        apply_penalties(other, penalties)
    assert torch.equal(logits.view(torch.int32), other.view(torch.int32))


def test_a_history_of_several_pieces_counts_every_token_once() -> None:
    penalties, logits = some_penalties(2, max_len=2100, seed=2), some_logits(2)
    wanted = logits.clone()
    reference.apply_penalties(wanted, penalties)
    apply_penalties(logits, penalties)
    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-4)  # a count of 40 times a penalty of 2


def test_repetition_counts_the_prompt_and_the_others_do_not() -> None:
    logits = torch.tensor([[4.0, -4.0, 4.0, -4.0, 1.0]])
    apply_penalties(logits, one_row([0, 1, 2, 3, 3, 2, 2], 2, 2.0, 0.5, 0.25))
    # 0 and 1 are in the prompt alone; 2 and 3 in the output, three times and twice; 4 nowhere.
    assert logits.tolist() == [[2.0, -8.0, 2.0 - 1.5 - 0.25, -8.0 - 1.0 - 0.25, 1.0]]


def test_a_token_that_is_in_the_prompt_and_in_the_output_is_repeated_once() -> None:
    logits = torch.tensor([[4.0, 0.0]])
    apply_penalties(logits, one_row([0, 0, 0, 0], 2, 2.0, 1.0, 0.0))
    assert logits.tolist() == [[2.0 - 2.0, 0.0]]


def test_neutral_penalties_leave_every_bit() -> None:
    logits = some_logits(2)
    logits[0, 3:6] = torch.tensor([torch.nan, -torch.inf, -0.0])
    before, penalties = logits.clone(), some_penalties(2)
    ones, zeros = torch.ones(2), torch.zeros(2)
    apply_penalties(logits, replace(penalties, repetition=ones, frequency=zeros, presence=zeros))
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))


def test_a_row_alone_gets_what_it_gets_in_a_batch() -> None:
    penalties, logits = some_penalties(6, seed=9), some_logits(6)
    alone = logits.clone()
    apply_penalties(logits, penalties)
    for row in range(6):
        apply_penalties(alone[row : row + 1], penalties.rows(row, row + 1))
    assert torch.equal(alone, logits)


def test_no_rows_change_nothing() -> None:
    logits = torch.empty(0, VOCAB)
    apply_penalties(logits, some_penalties(1).rows(0, 0))
    assert logits.shape == (0, VOCAB)


def test_logits_in_another_dtype_and_columns_of_another_length_are_refused() -> None:
    with pytest.raises(KernelInputError, match="float32"):
        apply_penalties(some_logits(2).double(), some_penalties(2))
    with pytest.raises(KernelInputError, match="2 elements"):
        apply_penalties(some_logits(2), some_penalties(3))
