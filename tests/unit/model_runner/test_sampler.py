"""Tokens are chosen of logits in half precision, too, by the compiled kernels, which the start has loaded."""

from typing import Any

import pytest
import torch

import kernels
from kernels.compiled import launch
from kernels.dispatch import has_compiled
from kernels.penalties import Penalties
from model.sampler import Sampler
from model.step_inputs import SamplingRows

pytestmark = pytest.mark.skipif(not has_compiled(), reason="numba is not installed: there are no compiled kernels")

VOCAB = 40


def rows_with(penalties: Penalties | None) -> SamplingRows:
    """One greedy row and one that draws."""
    numbers, whole = torch.tensor([0.0, 0.8]), torch.tensor([3, 5])
    return SamplingRows(numbers, whole, numbers, 0 * numbers, whole, whole, penalties)


def repetition_of_one_token() -> Penalties:
    whole, ones = torch.ones(2, dtype=torch.int64), torch.ones(2)
    return Penalties(whole.view(2, 1), torch.arange(2), 0 * whole, whole, 2 * ones, ones, ones)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_chooses_tokens_is_compiled_and_was_loaded_at_the_start(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a step of the first request would compile it, or torch would sort all logits."""
    loaded, called = list[str](), list[str]()

    def recording(name: str, *args: Any) -> None:
        called.append(name)
        launch(name, *args)

    for module in ("sampling", "penalties", "top_logprobs"):
        monkeypatch.setattr(f"kernels.{module}.launch", recording)
    kernels.warmup(dtype, 64, 9, 3, lambda done, total, name: loaded.append(name))
    logits, sampler = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0)).to(dtype), Sampler(VOCAB)
    drawn = [sampler(logits, rows_with(penalties)).tolist() for penalties in (None, repetition_of_one_token())]
    candidates = sampler.candidates(logits, 3)
    assert called == ["sample", "penalties", "sample", "top_logprobs"]
    assert set(called) <= set(loaded)
    plain = logits.float()
    assert drawn == [sampler(plain, rows_with(penalties)).tolist() for penalties in (None, repetition_of_one_token())]
    assert candidates == sampler.candidates(plain, 3)
