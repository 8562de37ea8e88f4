"""A step that runs out of memory is computed in parts."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from scheduler.output import Chunks

T = TypeVar("T")

# What torch says where it has no exception class of its own: the CPU's allocator, cuBLAS's workspace.
_MESSAGES = ("DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that there was too little memory, on whichever device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)


@dataclass(slots=True)
class SplitStep(Generic[T]):
    """What became of a step: what its parts have brought, why sequences failed, and how often it was split."""

    parts: list[T] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    num_splits: int = 0


def compute_in_parts(chunks: Chunks, compute: Callable[[Chunks], T]) -> SplitStep[T]:
    """Compute the chunks at once, or where memory runs out in halves, and so on; whose tokens don't change by that.

        [a b c d]  ─ out of memory ─►  [a b] [c d]  ─ [c d] too ─►  [a b] [c] [d]
        [one long chunk]  ─ out of memory ─►  [its first half] [its second half]

    `compute` returns what it has brought, and may be called again for chunks in whose midst it has failed: it writes
    the same keys and values to the same slots. A sequence fails where a single token of it doesn't fit alone; the
    others go on. Errors of any other kind pass through.
    """
    step: SplitStep[T] = SplitStep()
    parts = [chunks]
    while parts:
        part = parts.pop()
        brought = _try_compute(part, compute)
        if brought is not None:
            step.parts.append(brought)
            continue
        step.num_splits += 1
        # What the failed attempt held is free by now: give it back, so that pieces of it don't stand in the way.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        halves = _halves(part)
        parts += reversed(halves)
        if not halves:
            (seq_id,), (start,) = part.seq_ids, part.starts
            step.failed[seq_id] = (
                f"out of memory: not even one token of this request fits beside the KV cache, at position "
                f"{start}; send it again later, or start the worker with a smaller KV cache"
            )
            parts = [rest for rest in parts if rest.seq_ids != (seq_id,)]
    return step


def _try_compute(part: Chunks, compute: Callable[[Chunks], T]) -> T | None:
    """None where memory ran out. The error, whose traceback holds the attempt's tensors, is gone on return."""
    try:
        return compute(part)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None


def _halves(part: Chunks) -> list[Chunks]:
    """Two parts, each of half the chunks, or of half of a single chunk's tokens; none where that is one token."""
    if len(part) > 1:
        middle = len(part) // 2
        return [part.part(0, middle), part.part(middle, len(part))]
    (start,), (num_tokens,) = part.starts, part.num_tokens
    if num_tokens == 1:
        return []
    num_first = num_tokens // 2
    first = Chunks(part.seq_ids, (start,), (num_first,), (False,))
    rest = Chunks(part.seq_ids, (start + num_first,), (num_tokens - num_first,), part.is_sampled)
    return [first, rest]
