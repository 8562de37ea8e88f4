"""The switch: each kernel that it names has torch's operators behind it, and each kernel there is has a name in it."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch

from kernels import compiled
from kernels.activation import silu_and_mul
from kernels.block_copy import copy_blocks
from kernels.checksum import block_checksums
from kernels.dispatch import CHOICES, KERNELS, implementation, parse_choices, selected
from kernels.errors import KernelError
from kernels.kv_cache_write import rope_and_write
from kernels.linear import PackedLinear
from kernels.paged_attention import paged_attention
from kernels.penalties import Penalties, apply_penalties
from kernels.rms_norm import rms_norm
from kernels.sampling import sample
from kernels.top_logprobs import top_logprobs
from tests.kernel.batches import ragged_batch
from tests.kernel.conftest import needs_interpreter

ONE: Final = torch.ones(1, dtype=torch.int64)
# Which kernels have no Triton, and which no compiled implementation.
NO_TRITON: Final = {"linear"}
NO_COMPILED: Final = {"block_copy", "checksum"}


def attend() -> torch.Tensor:
    """A decode over two splits of its keys, and a chunk."""
    batch = ragged_batch([(1, 520), (2, 3)], num_heads=1, num_kv_heads=1, head_dim=16)
    return paged_attention(batch.query, batch.kv_cache, 0, batch.meta, 0.1)


def write() -> torch.Tensor:
    cache, table = torch.zeros(2, 1, 2, 8, 1, 16), torch.ones(2, 16)
    query = rope_and_write(torch.ones(1, 64), table, ONE, ONE, cache, 0, 2, 1)
    return torch.cat((cache.flatten(), query.flatten()))


def penalise() -> torch.Tensor:
    logits, amount = torch.arange(16.0).view(1, 16), torch.full((1,), 0.5)
    apply_penalties(logits, Penalties(3 * ONE.view(1, 1), 0 * ONE, 0 * ONE, ONE, amount, amount, amount))
    return logits


def copy() -> torch.Tensor:
    cache = torch.arange(3 * 64.0).view(3, 1, 2, 8, 1, 4)
    copy_blocks(cache, ONE, 2 * ONE)
    return cache


def draw() -> torch.Tensor:
    half = torch.full((1,), 0.5)
    return sample(torch.arange(32.0).view(1, 32) / 8, half, 9 * ONE, half, ONE, ONE, 32)


CALLS: Final[dict[str, Callable[[], torch.Tensor]]] = {
    "attention": attend,
    "rope_and_write": write,
    "rms_norm": lambda: rms_norm(torch.arange(32.0).view(2, 16), torch.ones(16), 1e-5),
    "silu_and_mul": lambda: silu_and_mul(torch.arange(64.0).view(2, 32)),
    "linear": lambda: PackedLinear(torch.ones(16, 32))(torch.ones(2, 32)),
    "sample": draw,
    "top_logprobs": lambda: top_logprobs(torch.arange(32.0).view(1, 32), 3, 32)[0],
    "block_copy": copy,
    "checksum": lambda: block_checksums(torch.arange(64.0).view(1, 1, 2, 8, 1, 4)),
    "penalties": penalise,
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels launched so far: compiled bodies as they are named, Triton's as their functions are."""
    needs_interpreter()
    from kernels.gpu.common import launching_by

    names: list[str] = []
    launch, run_body = compiled._address, compiled._run_body()

    def run(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        names.append(kernel.__name__)
        kernel[grid](*args, **options)

    def address(name: str) -> int:
        names.append(name)
        return launch(name)

    monkeypatch.setattr(compiled, "_address", address)
    monkeypatch.setattr(compiled, "_run_body", lambda: run_body)
    with launching_by(run):
        yield names


def test_every_kernel_of_the_switch_is_called_here() -> None:
    assert set(CALLS) == set(KERNELS)


@pytest.mark.parametrize("choice", ["auto", "triton"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_that_is_switched_to_torch_launches_nothing(kernel: str, choice: str, launched: list[str]) -> None:
    with implementation(choice):
        made = CALLS[kernel]()
    assert bool(launched) is (kernel not in (NO_TRITON if choice == "triton" else NO_COMPILED)), launched
    launched.clear()
    with implementation(f"{kernel}=torch"):
        assert selected(kernel) == "torch"
        plain = CALLS[kernel]()
    assert launched == []
    torch.testing.assert_close(made, plain, rtol=1e-5, atol=1e-5)


def test_every_triton_kernel_there_is_belongs_to_a_switch(launched: list[str]) -> None:
    from kernels.gpu.ahead_of_time import all_kernels

    with implementation("triton"):
        for call in CALLS.values():
            call()
    assert set(launched) == all_kernels()


def test_every_compiled_body_there_is_belongs_to_a_switch() -> None:
    from kernels.cpu.build import BODIES

    names = {compiled._KERNEL_OF.get(name, name) for name in BODIES if name not in compiled._SHARED}
    assert names == set(KERNELS) - NO_COMPILED


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("attn=torch", r"attn=torch'; the kernels that it can name are attention, rope_and_write, "),
        ("attention=fast", r"'fast' must be one of auto, torch, triton"),
        ("fast", r"'fast' must be one of auto, torch, triton"),
        ("attention=torch,triton", "a list names kernels, like attention=torch,sample=torch"),
        ("=torch", "the kernels that it can name are"),
        ("attention=torch,", "'' must be one of"),
        ("attention=", "'' must be one of"),
        ("", "'' must be one of"),
    ],
)
def test_what_the_switch_does_not_know_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        parse_choices(text)


def test_a_list_leaves_what_it_does_not_name_as_it_is() -> None:
    chosen = parse_choices("attention=torch, sample=triton")
    assert {chosen[kernel] for kernel in set(KERNELS) - {"attention", "sample"}} == {"auto"}
    assert (chosen["attention"], chosen["sample"]) == ("torch", "triton")
    for choice in CHOICES:
        assert set(parse_choices(choice).values()) == {choice}
