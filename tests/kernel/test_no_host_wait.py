"""Torch's operators in place of a kernel leave the host free: on tensors without values, whatever asks for one raises.

So a CUDA graph can hold them.
"""

import pytest
import torch

from kernels.attention_inputs import FP8
from kernels.dispatch import implementation
from kernels.kv_cache_write import rope_and_write, write_kv
from tests.kernel.test_argument_checks import CALLS, Call


def on_meta(call: Call) -> Call:
    return call[0], {name: tensor.to("meta") for name, tensor in call[1].items()}


@pytest.mark.parametrize("name", sorted(set(CALLS) - {"attention"}))
def test_a_call_asks_no_tensor_for_a_number(name: str) -> None:
    call, tensors = on_meta(CALLS[name])
    with implementation("torch"):
        call(**tensors)
    with pytest.raises(RuntimeError, match="meta"):
        bool((next(iter(tensors.values())) > 0).any())


def test_the_write_into_a_cache_of_8_bits_asks_for_none_either() -> None:
    call, tensors = on_meta(CALLS["rope_and_write"])
    with implementation("torch"):
        call(**{**tensors, "kv_cache": tensors["kv_cache"].to(FP8)})


def test_torchs_attention_alone_reads_lengths_on_the_host_as_it_says() -> None:
    call, tensors = on_meta(CALLS["attention"])
    with implementation("torch"), pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        call(**tensors)


@pytest.mark.parametrize("dtype", [torch.float32, FP8])
@pytest.mark.parametrize(
    "slots", [[-1, 9, -1, 0, 23], [0, -1], [-1], [-1, -1, -1], [7, 6, 5], [3], [-1, 0, 0]], ids=str
)
def test_what_is_written_without_asking_is_what_was_asked_to_be_written(slots: list[int], dtype: torch.dtype) -> None:
    """A token without a slot touches nothing, whether others have slots or not, and whoever has slot 0."""
    cache = torch.arange(3 * 2 * 2 * 8 * 2 * 4.0).view(3, 2, 2, 8, 2, 4).remainder(97).to(dtype)
    keys, values = (torch.randn(len(slots), 2, 4) for _ in range(2))
    keys[[slot < 0 for slot in slots]] = torch.nan
    wanted = cache.float()
    for token, slot in enumerate(slots):
        if slot >= 0:
            wanted[slot // 8, 1, 0, slot % 8] = keys[token].to(dtype).float()
            wanted[slot // 8, 1, 1, slot % 8] = values[token].to(dtype).float()
    write_kv(keys, values, torch.tensor(slots), cache, 1)
    assert torch.equal(cache.float(), wanted)


def test_no_tokens_write_nothing() -> None:
    cache, nothing = torch.zeros(3, 2, 2, 8, 2, 4), torch.empty(0, dtype=torch.int64)
    write_kv(torch.empty(0, 2, 4), torch.empty(0, 2, 4), nothing, cache, 1)
    with implementation("torch"):
        rope_and_write(torch.empty(0, 24), torch.ones(1, 4), nothing, nothing, cache, 1, 2, 2)
    assert not cache.any()
