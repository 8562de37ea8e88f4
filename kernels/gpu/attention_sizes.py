"""How large the attention kernels' tiles and splits are: a table instead of tuning at run time.

Tuning at run time costs a launch's time again and can't be asked for inside a captured graph. The rows of the table are
what compiles without spills for each target and within its shared memory (`make kernels-aot`).
"""

from dataclasses import dataclass
from typing import Final

from kernels.gpu.common import next_power_of_2

# Keys of a split where a row must not depend on its batch. Its partials are 1 to 2 % of the bytes of its keys.
FIXED_SPLIT: Final = 512
MIN_SPLIT, MAX_SPLIT = 256, 4096
# Programs for each multiprocessor that a decode should have: enough that the last of them don't run alone for long.
_WAVES: Final = 4
# Query heads of a KV head in one program of the decode; a larger group is shared by several.
_MAX_ROWS: Final = 32


@dataclass(frozen=True, slots=True)
class Sizes:
    """block_m: query rows of a program; tile: keys of a step."""

    block_m: int
    tile: int
    num_warps: int
    num_stages: int


def padded_head_dim(head_dim: int) -> int:
    """Elements of a row in registers: a power of two, and at least what a matrix instruction takes."""
    return max(16, next_power_of_2(head_dim))


def decode_sizes(head_dim: int, group: int, element_bytes: int) -> Sizes:
    """For sequences of one query row; block_m is the number of rows that the group is padded to."""
    rows = next_power_of_2(min(group, _MAX_ROWS))
    tile = 64 if padded_head_dim(head_dim) <= 128 else 32
    if element_bytes == 4:
        return Sizes(rows, tile // 2, 4, 2)
    # Three stages let a tile's block ids arrive while the tile before it does. Masks on padding take their registers.
    num_stages = 3 if padded_head_dim(head_dim) == head_dim else 2
    return Sizes(rows, tile, 4 if rows <= 16 else 8, num_stages)


def prefill_sizes(head_dim: int, group: int, element_bytes: int, capability: int, max_query_len: int | None) -> Sizes:
    """For sequences of several query rows; `max_query_len` is None where the batch must not matter."""
    width = padded_head_dim(head_dim)
    if element_bytes == 4:
        if width <= 128:
            return Sizes(32, 32 if width <= 64 else 16, 8, 2)
        return Sizes(16, 16, 8, 2)
    if max_query_len is not None and max_query_len * group <= 16:
        return Sizes(16, 64 if width <= 128 else 32, 4, 2)
    if width > 128:
        return Sizes(64, 32, 8, 2)
    # Hopper's matrix instruction takes 64 rows of a warp group. Before it, an accumulator of 128 rows doesn't fit
    # beside the scores of 64 keys.
    return Sizes(128, 64, 8, 2) if capability >= 90 else Sizes(64, 32, 4, 2)


def split_len(num_programs: int, max_context_len: int, num_sms: int, *, is_deterministic: bool) -> int:
    """Keys of a split: a fixed number, or by shape, so that `num_programs` times the splits fill the device."""
    if is_deterministic:
        return FIXED_SPLIT
    num_wanted = max(1, _WAVES * num_sms // max(1, num_programs))
    return min(MAX_SPLIT, max(MIN_SPLIT, next_power_of_2(-(-max_context_len // num_wanted))))
