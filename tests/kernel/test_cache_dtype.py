"""A KV cache in 8 bits where the device can't convert: refused by name, for reading, for writing and at start."""

import pytest
import torch

from kernels.attention_inputs import FP8
from kernels.cache_dtype import check_cache_dtype
from kernels.dispatch import implementation
from kernels.errors import KernelInputError
from kernels.kv_cache_write import rope_and_write
from kernels.paged_attention import paged_attention
from tests.kernel.batches import ragged_batch
from tests.kernel.test_kv_cache_write import cos_sin_table

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.cache_dtype._capability", lambda device: 80)


def attend() -> torch.Tensor:
    batch = ragged_batch([(1, 5)], dtype=torch.float16, cache_dtype=FP8)
    return paged_attention(batch.query, batch.kv_cache, 0, batch.meta, 0.1)


def write() -> torch.Tensor:
    cache, nothing = torch.zeros(1, 1, 2, 8, 1, 32).to(FP8), torch.zeros(1, dtype=torch.int64)
    rope_and_write(torch.full((1, 4 * 32), 3.0), cos_sin_table(32), nothing, nothing, cache, 0, 2, 1)
    return cache.float()


@pytest.mark.usefixtures("triton_in_use")
def test_reading_and_writing_are_refused_alike_and_torch_is_what_to_ask_for() -> None:
    for call, kernel in ((attend, "attention"), (write, "rope_and_write")):
        with pytest.raises(
            KernelInputError, match=rf"8\.9 or newer, and cpu has 8\.0.*PAGEMILL_KERNELS={kernel}=torch,"
        ):
            call()
        with implementation(f"{kernel}=torch"):
            assert call().isfinite().all()


@pytest.mark.usefixtures("triton_in_use")
def test_at_start_both_kernels_are_asked_for() -> None:
    check_cache_dtype(torch.float16, CPU)
    with pytest.raises(KernelInputError, match="=attention=torch,rope_and_write=torch, which is slow"):
        check_cache_dtype(FP8, CPU)
    with (
        implementation("attention=torch,rope_and_write=triton"),
        pytest.raises(KernelInputError, match="=rope_and_write=torch, which is slow"),
    ):
        check_cache_dtype(FP8, CPU)
    with implementation("attention=torch,rope_and_write=torch"):
        check_cache_dtype(FP8, CPU)


def test_nothing_is_refused_where_triton_takes_no_part() -> None:
    check_cache_dtype(FP8, CPU)
    assert attend().isfinite().all()
    assert write().any()
