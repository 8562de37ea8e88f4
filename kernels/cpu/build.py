"""Compiling bodies to C functions, once for each machine and version of the sources.

numba's own cache looks at the file of the function alone: a change in a helper's file would leave stale code behind. So
the code lies in a folder that is named by a digest of all sources here, the compiler's version and the processor
(code_cache.py).
"""

import hashlib
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

from kernels.cpu.code_cache import CodeCache, cache_root, open_cache

# Name of a body → (module in this folder, number of int64 arguments).
BODIES: Final = {
    "product": ("tile", 13),
    "run_on_pool": ("pool", 4),
    "help_pool": ("pool", 1),
    "linear": ("linear", 1),
    "gather_rows": ("linear", 1),
    "quantize_rows": ("quantized_linear", 1),
    "quantized_linear": ("quantized_linear", 1),
    "gather_quantized_rows": ("quantized_linear", 1),
    "int4_linear": ("int4_linear", 1),
    "attention": ("attention", 1),
    "rope_and_write": ("elementwise", 1),
    "rms_norm": ("elementwise", 1),
    "silu_and_mul": ("elementwise", 1),
    "penalties": ("penalties", 1),
    "sample": ("sampling", 1),
    "top_logprobs": ("top_logprobs", 1),
}
_lock = threading.Lock()
_loaded: dict[str, Any] = {}


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


def _open_cache() -> CodeCache | None:
    return open_cache(cache_root(), _digest())


def is_cached(name: str) -> bool:
    """True where the cache on disk holds the body complete, so that loading it takes milliseconds."""
    held = _open_cache()
    return held is not None and held.is_intact(name, BODIES[name][0])


def is_at_hand(name: str) -> bool:
    """True where nothing has to be compiled to call the body: it is loaded, or in the cache on disk."""
    return name in _loaded or is_cached(name)


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
    held, module = _open_cache(), BODIES[name][0]
    if held is None:
        return _compile(name, None)
    try:
        if held.is_intact(name, module):
            return _load_intact(name, held)
        if not held.is_read_only:
            return _compile_and_keep(name, held)
    except OSError as error:
        held.give_up(error)
    return _compile(name, None)


def _load_intact(name: str, held: CodeCache) -> Any:
    """Load a body whose files are as they were written. Raises OSError."""
    module = BODIES[name][0]
    try:
        compiled = _compile(name, held.folder)
    except OSError:
        raise
    except Exception:  # unpickling raises what it likes; should the body itself be at fault, compiling tells
        held.tell_damage()
        with held.locked(name):
            held.forget(name, module)
        return _compile_and_keep(name, held)
    if not compiled.cache_hits:  # some versions of numba look at the time of the sources, and have written anew
        with held.locked(name):
            held.seal(name, module)
    return compiled


def _compile_and_keep(name: str, held: CodeCache) -> Any:
    """Compile a body and write it to the cache, or load it where another process did so meanwhile. Raises OSError."""
    module = BODIES[name][0]
    with held.locked(name):
        if not held.is_intact(name, module):
            if held.is_damaged(name, module):
                held.tell_damage()
            held.forget(name, module)
        compiled = _compile(name, held.folder)
        if not compiled.cache_hits:
            held.seal(name, module)
        return compiled


def _compile(name: str, folder: Path | None) -> Any:
    """Compile a body, or load it from numba's files in `folder`, which are written where there are none.

    Raises OSError where they can't be.
    """
    module, num_arguments = BODIES[name]
    body: Callable[..., None] = getattr(import_module(f"kernels.cpu.{module}"), name)
    signature = types.void(*[types.int64] * num_arguments)
    config, settings = numba.config, ("CACHE_DIR", "CACHE_LOCATOR_CLASSES")
    before = {setting: getattr(config, setting, "") for setting in settings}
    if folder is not None:
        # This folder or none: numba would fall back to __pycache__ beside the sources.
        config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = str(folder), "UserProvidedCacheLocator"
    try:
        return cfunc(signature, cache=folder is not None, error_model="numpy")(body)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        raise OSError(f"numba can't write to {folder}") from error
    finally:
        for setting, value in before.items():
            setattr(config, setting, value)
