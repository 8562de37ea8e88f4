"""A step that runs out of memory is computed in parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from scheduler.output import Chunk

# What torch says where it has no exception class of its own: the CPU's allocator, cuBLAS's workspace.
_MESSAGES = ("DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that there was too little memory, on whichever device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)


@dataclass(slots=True)
class SplitStep:
    """What became of a step: the drawn tokens by sequence, why others failed, and how often it was split."""

    drawn: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    num_splits: int = 0


def compute_in_parts(chunks: Sequence[Chunk], compute: Callable[[Sequence[Chunk]], dict[str, int]]) -> SplitStep:
    """Compute the chunks at once, or where memory runs out in halves, and so on; whose tokens don't change by that.

        [a b c d]  ─ out of memory ─►  [a b] [c d]  ─ [c d] too ─►  [a b] [c] [d]
        [one long chunk]  ─ out of memory ─►  [its first half] [its second half]

    `compute` returns the tokens drawn, and may be called again for chunks in whose midst it has failed: it writes the
    same keys and values to the same slots. A sequence fails where a single token of it doesn't fit alone; the others
    go on. Errors of any other kind pass through.
    """
    step = SplitStep()
    parts = [list(chunks)]
    while parts:
        part = parts.pop()
        drawn = _try_compute(part, compute)
        if drawn is not None:
            step.drawn |= drawn
            continue
        step.num_splits += 1
        # What the failed attempt held is free by now: give it back, so that pieces of it don't stand in the way.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        halves = _halves(part)
        parts += reversed(halves)
        if not halves:
            seq_id = part[0].seq_id
            step.failed[seq_id] = (
                f"out of memory: not even one token of this request fits beside the KV cache, at position "
                f"{part[0].start}; send it again later, or start the worker with a smaller KV cache"
            )
            parts = [rest for rest in ([chunk for chunk in p if chunk.seq_id != seq_id] for p in parts) if rest]
    return step


def _try_compute(part: list[Chunk], compute: Callable[[Sequence[Chunk]], dict[str, int]]) -> dict[str, int] | None:
    """None where memory ran out. The error, whose traceback holds the attempt's tensors, is gone on return."""
    try:
        return compute(part)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None


def _halves(part: list[Chunk]) -> list[list[Chunk]]:
    """Two parts, each of half the chunks, or of half of a single chunk's tokens; none where that is one token.

    The blocks of a chunk have come to its row already, so its pieces bring none.
    """
    if len(part) > 1:
        middle = len(part) // 2
        return [part[:middle], part[middle:]]
    (chunk,) = part
    if chunk.num_tokens == 1:
        return []
    num_first = chunk.num_tokens // 2
    first = Chunk(chunk.seq_id, chunk.start, num_first, (), is_sampled=False)
    rest = Chunk(chunk.seq_id, chunk.start + num_first, chunk.num_tokens - num_first, (), chunk.is_sampled)
    return [[first], [rest]]
