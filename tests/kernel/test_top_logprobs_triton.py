"""The likeliest tokens by Triton's kernels: pieces, ranks, and what goes to torch's operators."""

import pytest
import torch

from kernels import dispatch, reference
from kernels.top_logprobs import top_logprobs
from tests.kernel.test_top_logprobs import check_equal, some_logits

pytestmark = pytest.mark.usefixtures("triton_in_use")


@pytest.mark.parametrize(("vocab", "k"), [(1, 1), (1, 3), (16, 5), (33, 40), (63, 17), (64, 2), (65, 3), (130, 64)])
def test_the_likeliest_of_one_piece_and_of_several_are_those_of_the_twin(
    vocab: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several the last may be full or have one token."""
    monkeypatch.setattr("kernels.gpu.top_logprobs.PIECE", 32)
    logits = some_logits(4, vocab, seed=vocab)
    logits[-1, 0] = logits[-1, vocab // 2] = -3e38
    check_equal(top_logprobs(logits, k, vocab), reference.top_logprobs(logits, k, vocab))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_large_vocabulary_in_any_dtype_and_layout(dtype: torch.dtype) -> None:
    logits = some_logits(2, 9000).to(dtype)
    wanted = reference.top_logprobs(logits.float(), 3, 8999)
    check_equal(top_logprobs(logits, 3, 8999), wanted)
    check_equal(top_logprobs(logits.T.contiguous().T, 3, 8999), wanted)


@pytest.mark.parametrize("k", [65, 100])
def test_more_tokens_than_triton_selects_are_sorted(
    k: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch, "_told", set())
    logits = some_logits(2, 90)
    check_equal(top_logprobs(logits, k, 90), reference.top_logprobs(logits, k, 90))
    assert f"{k} tokens of a row are more than 64" in caplog.text
