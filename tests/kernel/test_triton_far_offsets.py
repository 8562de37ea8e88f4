"""Triton's kernels where an index times a stride passes 2^31: of every axis with a stride, and of working memory."""

import sys
from typing import Final

import pytest

from tests.kernel.test_triton_rows import run_python

pytestmark = pytest.mark.usefixtures("triton_in_use")

# Address space that costs no memory, 40 GiB of it. Strides fit into 32 bits, times an index they do not. Each tensor
# begins at another place below 2^26 elements, so that none lies on another.
SPACE: Final = """
import mmap
import torch

MAP_NORESERVE = 0x4000  # Linux's number for it
space = mmap.mmap(-1, 40 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
memory = torch.frombuffer(space, dtype=torch.int64)
floats = memory.view(torch.float32)
FAR = 1 << 30
"""

BLOCKS: Final = """
from kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks
from kernels.checksum import block_checksums

few = torch.as_strided(memory, (5, 1, 2, 1024), (FAR, 2048, 1024, 1))
few[3] = torch.arange(2048).view(1, 2, 1024)
copy_blocks(few, torch.tensor([3]), torch.tensor([4]))
assert torch.equal(few[4], few[3])
staging = torch.zeros(2, 1, 2, 1024, dtype=torch.int64)
gather_blocks(few, torch.tensor([4, 3]), staging)
assert torch.equal(staging[0], few[3])
scatter_blocks(staging + 1, torch.tensor([2, 4]), few)
assert torch.equal(few[4], few[3] + 1)
"""

ROWS: Final = """
from kernels.activation import silu_and_mul
from kernels.kv_cache_write import rope_and_write
from kernels.rms_norm import add_rms_norm, rms_norm

far = torch.as_strided(floats, (4, 64), (FAR, 1), 1 << 20)
far.copy_(torch.randn(4, 64))
weight, near = torch.ones(64), far.clone()
assert torch.equal(rms_norm(far, weight, 1e-5), rms_norm(near, weight, 1e-5))
assert torch.equal(silu_and_mul(far), silu_and_mul(near))
added = add_rms_norm(torch.zeros(4, 64), far, weight, 1e-5)
assert torch.equal(added, rms_norm(near, weight, 1e-5))

# Blocks, slots and heads of the cache, tokens of qkv, positions of the table.
table = torch.as_strided(floats, (4, 16), (FAR, 1), 2 << 20)
table.copy_(torch.randn(4, 16))
four = torch.arange(4)
for strides in ((FAR, 2048, 192, 48, 16, 1), (256, 2048, 128, FAR, 16, 1), (256, 2048, 128, 16, FAR, 1)):
    shape = (4, 1, 2, 4, 3, 16)
    cache = torch.as_strided(floats, shape, strides, 3 << 20)
    qkv = torch.as_strided(floats, (4, 144), (FAR, 1), 4 << 20)
    qkv.copy_(torch.randn(4, 144))
    slots, close = torch.tensor([3, 7, 15, -1]), torch.zeros(shape)
    cache.zero_()
    query = rope_and_write(qkv, table, four, slots, cache, 0, 3, 3)
    assert torch.equal(query, rope_and_write(qkv.clone(), table.clone(), four, slots, close, 0, 3, 3))
    assert torch.equal(cache, close)
"""

# What a model has of each is far apart in turn: heads of the cache, its slots, blocks, rows of the table; heads and
# tokens of the queries and of the output; and the partial results of the splits.
ATTENTION: Final = """
from kernels.gpu.common import launching_by
from kernels.paged_attention import AttentionMetadata, paged_attention

def far_partials(kernel, grid, *args, **options):
    args = list(args)
    if kernel.__name__ == "decode_kernel":
        args[5:7], args[9] = (floats[5 << 20:], floats[6 << 20:]), 1 << 26
    if kernel.__name__ == "merge_kernel":
        args[0:2], args[6] = (floats[5 << 20:], floats[6 << 20:]), 1 << 26
    kernel[grid](*args, **options)

starts, lens = torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([7, 520], dtype=torch.int32)
tables = torch.as_strided(memory.view(torch.int32), (2, 33), (FAR + 16, 1), 7 << 20)
tables.fill_(3)  # one block, again and again
meta = AttentionMetadata(tables, starts, lens, 2, 520)
shape = (4, 1, 2, 16, 3, 16)
for strides, heads in (((FAR, 2048, 1024, 48, 16, 1), (16, FAR)), ((4096, 9999, 1024, FAR // 4, 16, 1), (FAR, 16)),
                       ((4096, 9999, 1024, 32, FAR, 1), (16, FAR))):
    cache = torch.as_strided(floats, shape, strides)
    cache[3] = torch.randn(shape[1:])
    query, out = (torch.as_strided(floats, (3, 3, 16), (*heads, 1), place << 20) for place in (8, 9))
    query.copy_(torch.randn(3, 3, 16))
    close = torch.zeros(shape)
    close[3] = cache[3]
    wanted = paged_attention(query.clone(), close, 0, meta, 0.25)
    with launching_by(far_partials):
        paged_attention(query, cache, 0, meta, 0.25, out=out)
    assert torch.equal(out, wanted), (out - wanted).abs().max()
"""

LOGITS: Final = """
from kernels.penalties import Penalties, apply_penalties
from kernels.sampling import sample
from kernels.top_logprobs import top_logprobs

logits = torch.as_strided(floats, (3, 40), (FAR, 1), 10 << 20)
logits.copy_(torch.randn(3, 40))
one, half, near = torch.ones(3, dtype=torch.int64), torch.full((3,), 0.5), logits.clone()
args = (half, 9 * one, half, one, one, 40)
assert torch.equal(sample(logits, *args), sample(near, *args))
assert all(map(torch.equal, top_logprobs(logits, 3, 40), top_logprobs(near, 3, 40)))

# A vocabulary of 2^30 tokens, whose counts lie 2^30 apart as well.
zeros = torch.zeros
torch.zeros = lambda shape, dtype, device: torch.as_strided(memory.view(dtype), shape, (FAR, 1), 11 << 20)
wide = torch.as_strided(floats, (3, FAR), (FAR, 1), 12 << 20)
token_ids = torch.as_strided(memory, (3, 2), (FAR, 1), 13 << 20)
token_ids.copy_(torch.tensor([[5, FAR - 3]] * 3))
wide[:, 5] = wide[:, FAR - 3] = 4.0
apply_penalties(wide, Penalties(token_ids, torch.arange(3), 0 * one, 2 * one, 4 * half, 0 * half, half))
assert wide[:, [5, FAR - 3]].tolist() == [[1.5, 1.5]] * 3
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs address space that takes no memory")
def test_what_lies_beyond_two_to_the_31_is_reached() -> None:
    """In a process of its own: an offset of 32 bits would end it, or read what lies elsewhere."""
    kinds = {"blocks": BLOCKS, "rows": ROWS, "attention": ATTENTION, "logits": LOGITS}
    ran = run_python(SPACE + "".join(f"{code}\nprint('{kind}', flush=True)\n" for kind, code in kinds.items()))
    assert ran.stdout.split() == list(kinds), ran.stderr[-2000:]
