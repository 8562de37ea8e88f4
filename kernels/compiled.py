"""The compiled CPU kernels as the wrappers see them: named bodies that are launched on a team of threads of our own.

The team (cpu/pool.py) is as large as torch's, whose threads it leaves alone. Loading is by name on first use; `warmup`
does it ahead, so that a first start can show what it waits for.
"""

import struct
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from kernels.dispatch import KERNELS, has_compiled, tell_fallback, use_compiled

# Floats in one vector of the compiled kernels; a dimension that is no multiple of it goes to torch's operators.
LANES = 16
# Below this much work (bytes that a kernel reads and writes) waking a second thread costs more than it saves.
MIN_BYTES_PER_THREAD = 128 << 10
# Bodies that several kernels call, and those that belong to a kernel of another name.
_POOL = ("run_on_pool", "help_pool")
_SHARED = ("product", *_POOL)
# Those that choose tokens: of logits, which are float32 there whatever the model is in.
_OF_LOGITS = ("sample", "penalties", "top_logprobs")
# Bodies of the linear layers by how a model's weights are kept. Of int4 the embeddings are int8.
_INT8_LINEAR = ("quantize_rows", "quantized_linear", "gather_quantized_rows")
_LINEAR = {"none": ("linear", "gather_rows"), "int8": _INT8_LINEAR, "int4": (*_INT8_LINEAR, "int4_linear")}
_KERNEL_OF = {name: "linear" for names in _LINEAR.values() for name in names}


@cache
def _address(name: str) -> int:
    from kernels.cpu.build import address

    return address(name)


@cache
def float_bits(value: float) -> int:
    """A float64 as the int64 word that `load_f64` reads back."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


_local = threading.local()


def scratch(num_bytes: int) -> torch.Tensor:
    """Working memory of at least this size that belongs to the calling Python thread until its next call."""
    held: torch.Tensor | None = getattr(_local, "buffer", None)
    if held is None or held.numel() < num_bytes:
        held = torch.empty(num_bytes, dtype=torch.uint8)
        _local.buffer = held
    return held


@cache
def _run_body() -> Callable[[int, tuple[int, ...], int], None]:
    from kernels.cpu.parallel import run_body

    return run_body


def launch(name: str, arguments: tuple[int, ...], num_threads: int | None = None) -> None:
    """Run a body over its work items; `num_threads` defaults to torch.get_num_threads()."""
    _run_body()(_address(name), arguments, torch.get_num_threads() if num_threads is None else num_threads)


def takes_rows(kernel: str, x: torch.Tensor, num_columns: int) -> bool:
    """True where a row-wise kernel can read x [rows, ...]: float32 on the CPU, adjacent columns in whole vectors."""
    if not use_compiled(kernel, x):
        return False
    if x.stride(1) == 1 and num_columns % LANES == 0:
        return True
    tell_fallback(kernel, f"it takes rows of adjacent elements, {LANES} at a time, and these have {num_columns}")
    return False


def product_address() -> int:
    """Address of the product function, which `linear` and `attention` call through a pointer."""
    return _address("product")


def threads_for(num_bytes: int) -> int:
    """How many threads a pass over this much memory is worth."""
    return max(1, min(torch.get_num_threads(), num_bytes // MIN_BYTES_PER_THREAD))


def _needed(dtype: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int, quantization: str) -> tuple[str, ...]:
    """Names of the bodies that such a model on the CPU calls."""
    if not any(has_compiled(kernel) for kernel in KERNELS):
        return ()
    from kernels.cpu.build import BODIES

    has_attention = head_dim % LANES == 0 and num_heads % num_kv_heads == 0
    called = tuple(BODIES) if dtype is torch.float32 else (*_OF_LOGITS, *_POOL)
    return tuple(
        name
        for name in called
        if (name not in _KERNEL_OF or name in _LINEAR[quantization])
        and (has_attention or name != "attention")
        and (name in _SHARED or has_compiled(_KERNEL_OF.get(name, name)))
    )


def set_cache_root(folder: Path | None) -> None:
    """Keep code that is compiled from here on in this folder. None: $NUMBA_CACHE_DIR, or the user's cache folder."""
    from kernels.cpu.code_cache import set_cache_root

    set_cache_root(folder)


def is_compiled(
    dtype: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int, quantization: str = "none"
) -> bool:
    """True where such a model on the CPU starts without compiling: its kernels are loaded or cached on disk, or it
    needs none."""
    names = _needed(dtype, head_dim, num_heads, num_kv_heads, quantization)
    if not names:
        return True
    from kernels.cpu.build import is_at_hand

    return all(is_at_hand(name) for name in names)


def warmup(
    dtype: torch.dtype,
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    progress: Callable[[int, int, str], None] | None = None,
    quantization: str = "none",
) -> None:
    """Load every kernel that such a model on the CPU uses, compiling what the cache on disk does not hold.

    progress(done, total, name) is called before each kernel, and once more at the end with done == total.
    """
    names = _needed(dtype, head_dim, num_heads, num_kv_heads, quantization)
    for done, name in enumerate(names):
        if progress is not None:
            progress(done, len(names), name)
        _address(name)
    if progress is not None and names:
        progress(len(names), len(names), "")
