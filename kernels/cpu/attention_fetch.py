"""Where the keys and values of a tile lie, and those of the next one on their way while this one is computed.

    Fetch:  fetched │ slots │ parts │ bytes of a slot │ addresses of the next tile's keys, then of its values

The hardware doesn't foresee where a block table leads, so the lines are prefetched, into the L2 cache. A core has room
for some twenty missing lines and drops prefetches beyond: they are asked for in small parts, all along the work of a
tile (measured: docs/kernels.md).
"""

from typing import Final

from kernels.cpu.helper import helper
from kernels.cpu.vector import load_i32, load_i64, prefetch, store_i64

LINE_BYTES: Final = 64
FETCHED, NUM_SLOTS, NUM_PARTS, SLOT_BYTES, SLOTS = range(0, 40, 8)


@helper
def find_slots(
    table: int, base: int, block_size: int, block_stride: int, slot_stride: int, first: int, count: int, addresses: int
) -> None:  # fmt: skip
    """The addresses of slots first .. first + count - 1 of a sequence, where block 0 lies at `base`."""
    block_index, offset = first // block_size, first % block_size
    lane = 0
    while lane < count:
        address = base + load_i32(table + block_index * 4) * block_stride + offset * slot_stride
        run_end = min(count, lane + block_size - offset)
        while lane < run_end:
            store_i64(addresses + lane * 8, address)
            address += slot_stride
            lane += 1
        block_index, offset = block_index + 1, 0


@helper
def fetch_until(fetch: int, part: int) -> None:
    """Ask for what of the next tile belongs to the parts up to `part`, and was not asked for yet."""
    slot, num_bytes = load_i64(fetch + FETCHED), load_i64(fetch + SLOT_BYTES)
    end = load_i64(fetch + NUM_SLOTS) * part // load_i64(fetch + NUM_PARTS)
    while slot < end:
        address = load_i64(fetch + SLOTS + slot * 8)
        for line in range(address, address + num_bytes, LINE_BYTES):
            prefetch(line)
        slot += 1
    store_i64(fetch + FETCHED, slot)
