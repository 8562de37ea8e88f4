"""Compiling bodies to C functions, once for each machine and version of the sources.

numba's own cache looks at the file of the function alone: a change in a helper's file would leave stale code behind. So
the code lies in a folder that is named by a digest of all sources here, the compiler's version and the processor:

    $NUMBA_CACHE_DIR, or <user cache>/pagemill/kernels
        <digest>/            numba's index and code files, and an empty file NAME.ready for each body that is complete
"""

import hashlib
import os
import sys
import threading
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numba
from numba import cfunc, types
from numba.core.registry import cpu_target

# Name of a body → (module in this folder, number of int64 arguments).
BODIES: Final = {
    "product": ("tile", 13),
    "run_on_pool": ("pool", 4),
    "help_pool": ("pool", 1),
    "linear": ("linear", 1),
    "gather_rows": ("linear", 1),
    "attention": ("attention", 1),
    "rope_and_write": ("elementwise", 1),
    "rms_norm": ("elementwise", 1),
    "silu_and_mul": ("elementwise", 1),
    "sample": ("sampling", 1),
    "top_logprobs": ("top_logprobs", 1),
}
_lock = threading.Lock()
_loaded: dict[str, Any] = {}


def _cache_root() -> Path:
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "pagemill" / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagemill" / "kernels"


def sources() -> tuple[Path, ...]:
    """Every file whose text can change the compiled code."""
    folder = Path(__file__).resolve().parent
    return (*sorted(folder.glob("*.py")), folder.parent / "noise.py")


@cache
def _digest() -> str:
    digest = hashlib.sha256()
    for source in sources():
        digest.update(source.name.encode() + source.read_bytes())
    digest.update(repr((numba.__version__, sys.version, cpu_target.target_context.codegen().magic_tuple())).encode())
    return digest.hexdigest()[:24]


@cache
def _cache_folder() -> Path | None:
    """The folder for code files, made if need be; None where nothing can be written, and each start compiles anew."""
    folder = _cache_root() / _digest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError:
        return None
    return folder


def is_cached(name: str) -> bool:
    """True where the cache on disk holds the body complete, so that loading it takes milliseconds."""
    folder = _cache_folder()
    return folder is not None and (folder / f"{name}.ready").exists()


def address(name: str) -> int:
    """Address of the C function of a body of BODIES, compiled or loaded on the first call."""
    held = _loaded.get(name)
    if held is None:
        with _lock:
            held = _loaded.get(name)
            if held is None:
                held = _loaded[name] = _load(name)
    return int(held.address)


def _load(name: str) -> Any:
    module, num_arguments = BODIES[name]
    body: Callable[..., None] = getattr(import_module(f"kernels.cpu.{module}"), name)
    signature = types.void(*[types.int64] * num_arguments)
    folder = _cache_folder()
    before = numba.config.CACHE_DIR
    if folder is not None:
        numba.config.CACHE_DIR = str(folder)
    try:
        compiled = cfunc(signature, cache=folder is not None, error_model="numpy")(body)
    finally:
        numba.config.CACHE_DIR = before
    if folder is not None:
        (folder / f"{name}.ready").touch()
    return compiled
