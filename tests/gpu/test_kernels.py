"""The kernels on the device against their float64 twins on the CPU, in every dtype that serves there."""

from typing import Any

import pytest
import torch

from kernels import reference
from kernels.activation import silu_and_mul
from kernels.attention_inputs import FP8, PLAIN, AttentionOptions
from kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks
from kernels.checksum import block_checksums
from kernels.dispatch import IS_INTERPRETED, implementation
from kernels.kv_cache_write import rope_and_write
from kernels.paged_attention import paged_attention
from kernels.penalties import Penalties, apply_penalties
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.sampling import sample
from kernels.top_logprobs import top_logprobs
from tests.gpu.timing import sized
from tests.kernel.batches import Batch, error, ragged_batch

pytestmark = pytest.mark.gpu

# Relative norms of the error.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
DTYPES = list(TOLERANCE)
# Beyond one split of the keys; the interpreter of a rehearsal takes its time for each tile.
LONG = sized(1025, 130)
# Decodes around block and split borders, chunks with context, fresh prompts, none without keys or queries left out.
MIXED = [(1, 1), (1, 16), (1, 17), (1, LONG), (5, 33), (17, 17), (40, 70), (0, 9), (2, 0)]
DECODES = [(1, n) for n in (1, 15, 16, 17, 64, 300, LONG)]

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def attend(batch: Batch, options: AttentionOptions = PLAIN) -> torch.Tensor:
    """On the device; the result comes back."""
    return paged_attention(batch.query, batch.kv_cache, 1, batch.meta, 0.1, options=options).cpu()


def wanted(seqs: list[tuple[int, int]], options: AttentionOptions = PLAIN, **made: Any) -> torch.Tensor:
    """The twin's answer for the same batch, made on the CPU."""
    batch = ragged_batch(seqs, device="cpu", **made)
    return reference.paged_attention(batch.query, batch.kv_cache, 1, batch.meta, 0.1, options)


@dtypes
@pytest.mark.parametrize("seqs", [MIXED, DECODES], ids=["mixed", "decodes"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(9, 3, 64, 16), (8, 2, 128, 16), (4, 4, 80, 8), (8, 1, 96, 32), (2, 1, 256, 64)],
)
def test_attention_equals_the_twin(
    device: torch.device,
    seqs: list[tuple[int, int]],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    shape: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "block_size": block_size,
    }
    batch = ragged_batch(seqs, device=device.type, dtype=dtype, **shape)
    assert error(attend(batch), wanted(seqs, dtype=dtype, **shape)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attention_over_a_cache_in_fp8_equals_the_twin(device: torch.device, dtype: torch.dtype) -> None:
    options = AttentionOptions(k_scale=0.5, v_scale=2.0)
    shape: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "dtype": dtype, "cache_dtype": FP8}
    batch = ragged_batch(MIXED, device=device.type, **shape)
    assert error(attend(batch, options), wanted(MIXED, options, **shape)) < TOLERANCE[dtype]


@dtypes
@pytest.mark.parametrize("rotary_dim", [128, 64])
def test_rotated_keys_are_written_where_they_belong(device: torch.device, dtype: torch.dtype, rotary_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn((37, 12 * 128), generator=generator).to(dtype)
    cache = torch.full((9, 2, 2, 16, 2, 128), -77.0, dtype=dtype)
    angles = torch.arange(60)[:, None] * 10000.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions, slots = torch.arange(37), torch.randperm(9 * 16, generator=generator)[:37]
    slots[5] = -1
    on_device = [tensor.to(device) for tensor in (qkv, table, positions, slots, cache)]
    query = rope_and_write(*on_device, 1, 8, 2)  # type: ignore[call-arg, arg-type]
    twin = cache.clone()
    assert error(query.cpu(), reference.rope_and_write(qkv, table, positions, slots, twin, 1, 8, 2)) < TOLERANCE[dtype]
    assert error(on_device[4].cpu(), twin) < TOLERANCE[dtype]
    assert torch.equal(on_device[4].cpu()[:, :, 1], twin[:, :, 1]), "values are copied bit by bit"


@dtypes
def test_keys_and_values_are_stored_in_fp8_as_torch_rounds_them(device: torch.device, dtype: torch.dtype) -> None:
    """Which the interpreter can't show: its conversion is up to two steps off. Beyond 448 they are 448."""
    qkv = torch.randn((9, 4 * 64), generator=torch.Generator().manual_seed(0)).to(dtype)
    qkv[:, -3:] = torch.tensor([0.0, 1e4, -1e4], dtype=dtype)
    table = torch.cat((torch.ones(9, 32), torch.zeros(9, 32)), dim=1)  # of no rotation
    nine, cache = torch.arange(9), torch.zeros((2, 1, 2, 16, 1, 64)).to(FP8)
    on_device = [tensor.to(device) for tensor in (qkv, table, nine, nine, cache)]
    rope_and_write(*on_device, 0, 2, 1, 0.02, 0.03)  # type: ignore[call-arg, arg-type]
    rope_and_write(qkv, table, nine, nine, cache, 0, 2, 1, 0.02, 0.03)
    stored, wanted = on_device[4].cpu().float(), cache.float()
    if IS_INTERPRETED:
        assert error(stored, wanted) < 0.1
    else:
        # The same number, but where the quotient lies between two: some of the last bits of 1 / scale may differ.
        assert error(stored, wanted) < 2e-3
    assert float(stored.abs().max()) == 448.0


@dtypes
@pytest.mark.parametrize("shape", [(1, 576), (37, 4096), (300, 5120)])
def test_norms_and_gates_equal_their_twins(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    weight = torch.rand(shape[1], generator=generator).to(dtype)
    assert (
        error(rms_norm(x.to(device), weight.to(device), 1e-5).cpu(), reference.rms_norm(x, weight, 1e-5))
        < (TOLERANCE[dtype])
    )
    twin, added = residual.clone(), residual.clone().to(device)
    normed = add_rms_norm(x.to(device), added, weight.to(device), 1e-5).cpu()
    assert error(normed, reference.add_rms_norm(x, twin, weight, 1e-5)) < TOLERANCE[dtype]
    assert error(added.cpu(), twin) < TOLERANCE[dtype]
    assert error(silu_and_mul(x.to(device)).cpu(), reference.silu_and_mul(x)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [*DTYPES, FP8], ids=str)
def test_blocks_are_moved_bit_by_bit_and_their_checksums_are_the_cpu_s(
    device: torch.device, dtype: torch.dtype
) -> None:
    blocks = torch.randn((40, 3, 2, 16, 2, 64), generator=torch.Generator().manual_seed(0)).to(dtype)
    moved = blocks.to(device)
    assert torch.equal(block_checksums(moved).cpu(), block_checksums(blocks))
    ids = torch.tensor([7, 3, 39, 11], device=device)
    staging = torch.zeros((4, *blocks.shape[1:]), dtype=torch.float32, device=device).to(dtype)
    gather_blocks(moved, ids, staging)
    assert torch.equal(block_checksums(staging).cpu(), block_checksums(blocks)[ids.cpu()])
    copy_blocks(moved, torch.tensor([7, 0], device=device), torch.tensor([30, 31], device=device))
    scatter_blocks(staging, torch.tensor([20, 21, 22, 23], device=device), moved)
    places = [30, 31, 20, 21, 22, 23]
    sums, others = block_checksums(moved).cpu(), [block for block in range(40) if block not in places]
    assert torch.equal(sums[places], block_checksums(blocks)[[7, 0, 7, 3, 39, 11]])
    assert torch.equal(sums[others], block_checksums(blocks)[others])


def test_draws_are_the_cpu_s(device: torch.device) -> None:
    """Of the same logits, seeds and positions, whatever each row asks for."""
    logits = torch.randn((9, 5000), generator=torch.Generator().manual_seed(0)) * 3
    temperature = torch.tensor([0.0, 1.0, 1.0, 0.7, 1.0, 0.3, 1.5, 1.0, 0.0])
    top_k = torch.tensor([0, 0, 50, 0, 40, 1, 0, 5000, 7])
    top_p = torch.tensor([1.0, 1.0, 1.0, 0.9, 0.8, 1.0, 0.2, 1.0, 0.5])
    seeds, positions = torch.arange(9) * 7919, torch.arange(9) + 100
    args = [logits, temperature, top_k, top_p, seeds, positions]
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.05, 0.0, 0.1, 0.3, 0.1])
    drawn = sample(*[tensor.to(device) for tensor in args], 4990, min_p.to(device))  # type: ignore[call-arg, arg-type]
    assert drawn.cpu().tolist() == reference.sample(*args, 4990, min_p).tolist()  # type: ignore[call-arg, arg-type]


def test_penalties_are_the_cpu_s_to_the_bit(device: torch.device) -> None:
    """Each token is counted by atomics and changed once, however many programs meet it at the same time."""
    generator = torch.Generator().manual_seed(0)
    num_rows, max_len = 5, sized(4000, 1100)
    token_ids = torch.randint(-1, 301, (num_rows, max_len), generator=generator)
    num_tokens = torch.tensor([0, 1, max_len // 2, max_len - 1, max_len])
    columns = (
        *(torch.arange(num_rows), num_tokens // 3, num_tokens),
        *(torch.rand(num_rows, generator=generator) + 0.5 for _ in range(3)),
    )
    logits = torch.randn((num_rows, 300), generator=generator)
    wanted = logits.clone()
    with implementation("torch"):
        apply_penalties(wanted, Penalties(token_ids, *columns))
    on_device = logits.to(device)
    apply_penalties(on_device, Penalties(token_ids.to(device), *(column.to(device) for column in columns)))
    assert torch.equal(on_device.cpu(), wanted)


@dtypes
@pytest.mark.parametrize(("vocab", "k"), [(sized(9000, 5000), 5), (200, 64)])
def test_the_likeliest_tokens_are_those_of_the_twin(
    device: torch.device, dtype: torch.dtype, vocab: int, k: int
) -> None:
    logits = (torch.randn((3, vocab), generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    logits[1, ::3], logits[2, 5:] = torch.nan, -torch.inf
    logprobs, ids = top_logprobs(logits.to(device), k, vocab)
    wanted, wanted_ids = reference.top_logprobs(logits.float(), k, vocab)
    assert ids.tolist() == wanted_ids.tolist()
    torch.testing.assert_close(logprobs.cpu(), wanted, rtol=1e-6, atol=2e-6)
