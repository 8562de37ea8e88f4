"""No kernel reads or writes beyond its tensors: each ends, or begins, where a page lies that may not be touched."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.kernel.conftest import needs_interpreter

CODE: Final = """
import ctypes
import mmap
import sys
from dataclasses import replace

import torch

from kernels.attention_inputs import AttentionOptions
from kernels.linear import PackedLinear
from kernels.paged_attention import paged_attention
from kernels.quantized_linear import QuantizedLinear
from kernels.rms_norm import rms_norm
from kernels.sampling import sample
from kernels.top_logprobs import top_logprobs
from tests.kernel.batches import error, ragged_batch
from tests.kernel.test_argument_checks import calls

at_end = sys.argv[1] == "end"
PAGE = mmap.PAGESIZE
PROT_NONE = 0
protect = ctypes.CDLL(None, use_errno=True).mprotect
protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
kept = []


def fenced(tensor):
    # A page on either side that may not be touched; the tensor is against one of them.
    num_pages = -(-tensor.nbytes // PAGE) + 2
    space = mmap.mmap(-1, num_pages * PAGE)
    kept.append(space)
    memory = torch.frombuffer(space, dtype=torch.uint8)
    for page in (0, num_pages - 1):
        assert protect(memory.data_ptr() + page * PAGE, PAGE, PROT_NONE) == 0
    first = (num_pages - 1) * PAGE - tensor.nbytes if at_end else PAGE
    copy = memory[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


for name, (call, tensors) in calls().items():
    print(name, flush=True)
    call(**{argument: fenced(tensor) for argument, tensor in tensors.items()})

# Sizes that end within a vector or a tile.
print("rows", flush=True)
ones = torch.ones(3, dtype=torch.int64)
half = ones * 0.5
for size in (1, 17, 100):
    x = torch.randn(3, size)
    rms_norm(fenced(x), fenced(x[0]), 1e-5)
    top_logprobs(fenced(x), 2, size)
    sample(fenced(x), fenced(half), fenced(9 * ones), fenced(half), fenced(ones), fenced(ones), size)
    for layer in (PackedLinear(torch.randn(size, size)), QuantizedLinear(torch.randn(size, size))):
        assert layer(fenced(x)).shape == (3, size)

# Tables are as wide as the longest sequence needs, the last of them, and the last block of the cache, is its last one.
is_quick = sys.argv[2] == "auto"
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 47, 48, 100, 513) if is_quick else (1, 16, 33)
for kind, seqs in (("decodes", [(1, n) for n in LENGTHS]), ("chunks", [(min(n, 5), n) for n in LENGTHS])):
    for window in (None, 1, 40) if is_quick else (None, 20):
        print(kind, window, flush=True)
        batch = ragged_batch(seqs, num_heads=4, num_kv_heads=2, head_dim=16, num_layers=1)
        tables = batch.meta.block_tables[:, : -(-LENGTHS[-1] // 16)].contiguous()
        last = int(tables[-1, -1])
        cache = torch.cat((batch.kv_cache[:last], batch.kv_cache[last + 1 :], batch.kv_cache[last : last + 1]))
        is_real = (tables >= 0) & (tables < len(cache))
        tables[is_real & (tables > last)] -= 1
        tables[-1, -1] = len(cache) - 1
        meta = replace(
            batch.meta,
            block_tables=fenced(tables),
            query_starts=fenced(batch.meta.query_starts),
            context_lens=fenced(batch.meta.context_lens),
        )
        query, cache = fenced(batch.query.contiguous()), fenced(cache)
        out, options = fenced(torch.zeros(query.shape)), AttentionOptions(window=window)
        paged_attention(query, cache, 0, meta, 0.25, out, options)
        wanted = paged_attention(batch.query, batch.kv_cache, 0, batch.meta, 0.25, options=options)
        assert error(out, wanted) < 1e-5
print("all")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs pages that may not be touched")
@pytest.mark.parametrize("side", ["begin", "end"])
@pytest.mark.parametrize("choice", ["auto", "triton"])
def test_nothing_before_or_behind_a_tensor_is_touched(choice: str, side: str) -> None:
    """In a process of its own, which such an access would end; what it was about is the last line that it said."""
    if choice == "triton":
        needs_interpreter()
    ran = subprocess.run(
        [sys.executable, "-c", CODE, side, choice],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PAGEMILL_KERNELS": choice, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.stdout.endswith("all\n"), f"code {ran.returncode} after {ran.stdout[-200:]!r}: {ran.stderr[-1500:]}"
