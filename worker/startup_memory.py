"""Too little memory for a start: how much it takes, which errors mean it, and the one line that is said.

Needs no torch, so that it can also tell why torch can't be loaded.
"""

import errno
import re
from dataclasses import dataclass

from worker.memory import Headroom, gib, headroom, is_address_space_limited

# Measured on Linux: what importing torch takes, of memory and of address space.
TORCH_BYTES = 230 << 20
TORCH_ADDRESS_BYTES = 620 << 20
# And beside it: numba and LLVM, threads, compiled kernels, a step's activations.
REST_BYTES = 300 << 20
REST_ADDRESS_BYTES = 600 << 20

# What libraries say that have no exception class for it: torch's allocator, safetensors, the dynamic linker, C++.
_MESSAGES = (
    "can't allocate memory",
    "Cannot allocate memory",
    "unable to mmap",
    "failed to map segment",
    "bad_alloc",
    "OutOfMemory",
    "out of memory",
    "Unable to allocate",
)
_THREAD_MESSAGES = ("can't start new thread", "Thread creation failed", "Resource temporarily unavailable")
_BYTES_WANTED = re.compile(r"(?:allocate|mmap)\s+(\d+) bytes")


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a start takes from here on. `mapped_bytes` counts where files in the address space do."""

    weight_bytes: int
    kv_bytes: int
    mapped_bytes: int
    rest_bytes: int

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.kv_bytes + self.mapped_bytes + self.rest_bytes

    def __str__(self) -> str:
        parts = [f"{gib(self.weight_bytes)} of weights"]
        parts += [f"{gib(self.kv_bytes)} of KV cache"] if self.kv_bytes else []
        parts += [f"{gib(self.mapped_bytes)} for its file"] if self.mapped_bytes else []
        return f"about {gib(self.num_bytes)} ({', '.join(parts)}, {gib(self.rest_bytes)} for the rest)"


def need_on_cpu(weight_bytes: int, kv_bytes: int) -> Need:
    """What an engine on the CPU takes beside torch, which is loaded."""
    if is_address_space_limited():
        return Need(weight_bytes, kv_bytes, weight_bytes, REST_ADDRESS_BYTES)
    return Need(weight_bytes, kv_bytes, 0, REST_BYTES)


def missing_for_torch() -> str | None:
    """Why torch can't be loaded: less memory is left than it takes. None where it can."""
    room = headroom()
    needed = TORCH_ADDRESS_BYTES if is_address_space_limited() else TORCH_BYTES
    if room.num_bytes >= needed:
        return None
    return f"there is too little memory to begin: torch alone takes {gib(needed)}, but {left(room)}: {_remedy(room)}"


def too_little(name: str, need: Need | None, room: Headroom, error: BaseException | None = None) -> str:
    """The line for a model that doesn't fit. `room` is what was left before, `error` what it has failed with.

    `need` is None where it isn't known.
    """
    wanted = None if error is None else _BYTES_WANTED.search(_texts(error))
    failed = "" if wanted is None else f", and {gib(int(wanted[1]))} could not be had"
    takes = "" if need is None else f"it takes {need}, but "
    smaller = "" if need is not None and not need.kv_bytes else "lower num_kv_blocks, "
    return (
        f"{name} doesn't fit into memory: {takes}{left(room)}{failed}: {smaller}use a smaller model or dtype bfloat16, "
        f"or {_remedy(room)}"
    )


def left(room: Headroom) -> str:
    """What there is, in words."""
    return f"{gib(room.num_bytes)} are left of {room.limit}"


def is_memory_failure(error: BaseException) -> bool:
    """Whether `error`, or one that it was raised from, says that there was too little memory."""
    for cause in _chain(error):
        if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM):
            return True
        if isinstance(cause, RuntimeError | ImportError | OSError) and _says(cause, _MESSAGES):
            return True
    return False


def is_thread_failure(error: BaseException) -> bool:
    """Whether `error`, or one that it was raised from, says that a thread could not be started."""
    return any(isinstance(cause, RuntimeError | OSError) and _says(cause, _THREAD_MESSAGES) for cause in _chain(error))


def too_few_threads() -> str:
    """The line for a start that a limit of threads ends."""
    return (
        "a thread could not be started: raise the limit of processes (ulimit -u, or pids.max of the container), lower "
        "num_threads, or free some memory"
    )


def possible_cause() -> str:
    """For an engine that was ended without a word: what there was to take."""
    return f"perhaps for lack of memory ({left(headroom())}) or of threads (ulimit -u)"


def _remedy(room: Headroom) -> str:
    return "free some memory" if room.limit == "the machine's memory" else "raise that limit"


def _chain(error: BaseException | None) -> list[BaseException]:
    causes: list[BaseException] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__
    return causes


def _texts(error: BaseException) -> str:
    return " ".join(str(cause) for cause in _chain(error))


def _says(error: BaseException, messages: tuple[str, ...]) -> bool:
    return any(text in str(error) for text in messages)
