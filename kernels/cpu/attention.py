"""Causal attention over block tables, read in place, by tiles with an online softmax (Milakov, arXiv 1805.02867).

    query tile: up to MAX_ROWS rows = positions × the query heads of one KV head (one pass over the keys serves all)
    keys        |-- tile of 32 --|-- 32 --|...              tile and split borders lie at fixed positions of the
                |---------- split of 512 ----------|...     sequence, so a row's sums are taken in one order whether
                                                            it comes in a chunk, alone, or in any batch

Per tile: the keys are transposed into panels, S = Q Kᵀ and O += P V are register-tile products, with the softmax
between them (attention_softmax.py), while the next tile is fetched (attention_fetch.py). Each split has its own
maximum, sum and output, merged in ascending order. Only keys below a sequence's length are read, through the table
entries they need; what stands in other slots, blocks or table entries is never touched. A sliding window begins at the
tile of the first key that any row sees; those that a row doesn't see are masked in it.
"""

from kernels.cpu.attention_fetch import (
    FETCHED,
    LINE_BYTES,
    NUM_PARTS,
    NUM_SLOTS,
    SLOT_BYTES,
    SLOTS,
    fetch_until,
    find_slots,
)
from kernels.cpu.attention_softmax import KEY_TILE, PARTS_OF_ROW, ROWS_WITH_PARTS, clear, merge, softmax_tile
from kernels.cpu.helper import helper
from kernels.cpu.parallel import ARGUMENTS, NEXT_THREAD
from kernels.cpu.tile import call_product
from kernels.cpu.transpose import transpose_panel
from kernels.cpu.vector import (
    LANES,
    VECTOR_BYTES,
    div,
    fetch_add,
    load,
    load_f32,
    load_f64,
    load_i32,
    load_i64,
    mul,
    splat,
    store,
    store_i64,
)

MAX_ROWS = 96
KEY_SPLIT = 512
# Of a KV head's work on a tile, beside a part of each transposition: in how many parts the next tile is fetched.
PARTS_BEFORE_SCORES, PARTS_BEFORE_WEIGHTS, PARTS_OF_VALUES = 2, 2, 2
PARTS = PARTS_BEFORE_SCORES + PARTS_BEFORE_WEIGHTS + PARTS_OF_ROW * ROWS_WITH_PARTS + PARTS_OF_VALUES
# Words of the task block.
(
    QUERY, QUERY_TOKEN, OUT, OUT_TOKEN, CACHE, BLOCK_STRIDE, VALUE_OFFSET, SLOT_STRIDE, BLOCK_SIZE, TABLES, TABLE_ROW,
    STARTS, LENGTHS, NUM_SEQS, NUM_KV_HEADS, GROUP, HEAD_DIM, SCALE, SCRATCH, SCRATCH_STRIDE,
    PRODUCT, MAX_KEYS, WINDOW, HEADS_AT_ONCE,
) = range(ARGUMENTS, ARGUMENTS + 8 * 24, 8)  # fmt: skip


def scratch_bytes(head_dim: int, max_rows: int) -> int:
    """Working memory of one thread: Q, O of a split and in all, S, the key panels, m and l twice, zeros, addresses.

    Whole cache lines, so that all but the last of it begins at one.
    """
    num_zeros = max(head_dim, 4 * LANES)
    floats = 3 * max_rows * head_dim + max_rows * KEY_TILE + KEY_TILE * head_dim + 4 * max_rows + num_zeros
    return (4 * floats + 3 * 8 * KEY_TILE + SLOTS + 2 * LINE_BYTES) // LINE_BYTES * LINE_BYTES


@helper
def _load_query(task: int, first_row: int, num_tokens: int, kv_head: int, target: int) -> None:
    """Q of the tile, times the scale: row = position * group + head within the group."""
    head_dim, group = load_i64(task + HEAD_DIM), load_i64(task + GROUP)
    scale = splat(load_f64(task + SCALE))
    token = load_i64(task + QUERY) + first_row * load_i64(task + QUERY_TOKEN) + kv_head * group * head_dim * 4
    for _ in range(num_tokens):
        for offset in range(0, group * head_dim * 4, VECTOR_BYTES):
            store(target + offset, mul(load(token + offset), scale))
        target += group * head_dim * 4
        token += load_i64(task + QUERY_TOKEN)


@helper
def _find_next(task: int, table: int, base: int, first_key: int, num_keys: int, num_heads: int, fetch: int) -> None:
    """What is to be fetched while the tile before `first_key` is computed: the next one's keys and values, if any."""
    block_size, block_stride = load_i64(task + BLOCK_SIZE), load_i64(task + BLOCK_STRIDE)
    slot_stride, head_dim = load_i64(task + SLOT_STRIDE), load_i64(task + HEAD_DIM)
    count = max(0, min(KEY_TILE, num_keys - first_key))
    for is_values in range(2):
        slot_base = base + is_values * load_i64(task + VALUE_OFFSET)
        addresses = fetch + SLOTS + is_values * count * 8
        find_slots(table, slot_base, block_size, block_stride, slot_stride, first_key, count, addresses)
    store_i64(fetch + FETCHED, 0)
    store_i64(fetch + NUM_SLOTS, 2 * count)
    store_i64(fetch + NUM_PARTS, num_heads * (KEY_TILE // LANES * (head_dim // LANES) + PARTS))
    store_i64(fetch + SLOT_BYTES, num_heads * head_dim * 4)


@helper
def _load_keys(
    task: int, table: int, base: int, first_key: int, count: int, addresses: int, zeros: int, panels: int, fetch: int,
    part: int,
) -> None:  # fmt: skip
    """Keys first_key .. first_key + count - 1 as panels, zeros in the lanes up to the next multiple of 16."""
    block_size, block_stride = load_i64(task + BLOCK_SIZE), load_i64(task + BLOCK_STRIDE)
    slot_stride, head_dim = load_i64(task + SLOT_STRIDE), load_i64(task + HEAD_DIM)
    find_slots(table, base, block_size, block_stride, slot_stride, first_key, count, addresses)
    num_panels = (count + LANES - 1) // LANES
    for lane in range(count, num_panels * LANES):
        store_i64(addresses + lane * 8, zeros)
    for panel in range(num_panels):
        for element in range(0, head_dim, LANES):
            transpose_panel(addresses + panel * 128, element * 4, panels + (panel * head_dim + element) * VECTOR_BYTES)
            part += 1
            fetch_until(fetch, part)


@helper
def _add_values(
    task: int, table: int, layer_base: int, first_key: int, count: int, weights: int, num_rows: int, out: int,
    fetch: int, part: int,
) -> None:  # fmt: skip
    """out[num_rows, head_dim] += weights[num_rows, count] · V, block by block."""
    block_size, block_stride = load_i64(task + BLOCK_SIZE), load_i64(task + BLOCK_STRIDE)
    slot_stride, head_dim = load_i64(task + SLOT_STRIDE), load_i64(task + HEAD_DIM)
    value_base = layer_base + load_i64(task + VALUE_OFFSET)
    product = load_i64(task + PRODUCT)
    done = 0
    while done < count:
        key = first_key + done
        run = min(block_size - key % block_size, count - done)
        block = load_i32(table + key // block_size * 4)
        values = value_base + block * block_stride + key % block_size * slot_stride
        call_product(
            product, weights + done * 4, KEY_TILE * 4, num_rows, values, slot_stride, VECTOR_BYTES, head_dim // LANES,
            out, head_dim * 4, VECTOR_BYTES, out, head_dim * 4, run,
        )  # fmt: skip
        done += run
        fetch_until(fetch, part)


@helper
def _attend_split(
    task: int, table: int, base: int, num_heads: int, query: int, num_rows: int, first_position: int, first_key: int,
    last_key: int, num_keys: int, stats: int, out: int, work: int,
) -> None:  # fmt: skip
    """Keys first_key .. last_key - 1 for the tile's rows, `num_rows` of each head, one head after the other.

    stats and out are overwritten with this split's. Of the next tile, up to num_keys, all heads' keys are fetched
    together: they lie side by side.
    """
    head_dim, group = load_i64(task + HEAD_DIM), load_i64(task + GROUP)
    product, window = load_i64(task + PRODUCT), load_i64(task + WINDOW)
    panels = work + num_rows * KEY_TILE * 4
    zeros = panels + KEY_TILE * head_dim * 4
    addresses = zeros + max(head_dim * 4, 4 * VECTOR_BYTES)
    fetch = addresses + KEY_TILE * 8
    for offset in range(0, max(head_dim * 4, 4 * VECTOR_BYTES), VECTOR_BYTES):
        store(zeros + offset, splat(0.0))
    clear(stats, out, num_heads * num_rows, head_dim)
    for key in range(first_key, last_key, KEY_TILE):
        count = min(KEY_TILE, last_key - key)
        _find_next(task, table, base, key + KEY_TILE, num_keys, num_heads, fetch)
        part = 0
        for head in range(num_heads):
            head_base, rows = base + head * head_dim * 4, head * num_rows * head_dim * 4
            _load_keys(task, table, head_base, key, count, addresses, zeros, panels, fetch, part)
            part += KEY_TILE // LANES * (head_dim // LANES) + PARTS_BEFORE_SCORES
            fetch_until(fetch, part)
            call_product(
                product, query + rows, head_dim * 4, num_rows, panels, VECTOR_BYTES, head_dim * VECTOR_BYTES,
                (count + LANES - 1) // LANES, zeros, 0, 0, work, KEY_TILE * 4, head_dim,
            )  # fmt: skip
            part += PARTS_BEFORE_WEIGHTS
            fetch_until(fetch, part)
            softmax_tile(
                work, num_rows, group, first_position + 1 - key, window, count, stats + head * num_rows * 8,
                out + rows, head_dim, fetch, part,
            )  # fmt: skip
            part += PARTS_OF_ROW * ROWS_WITH_PARTS + PARTS_OF_VALUES
            _add_values(task, table, head_base, key, count, work, num_rows, out + rows, fetch, part)


@helper
def _store_rows(task: int, first_row: int, num_tokens: int, kv_head: int, stats: int, out: int) -> None:
    head_dim, group = load_i64(task + HEAD_DIM), load_i64(task + GROUP)
    token = load_i64(task + OUT) + first_row * load_i64(task + OUT_TOKEN) + kv_head * group * head_dim * 4
    for row in range(num_tokens * group):
        total = load_f32(stats + row * 8 + 4)
        divisor = splat(total if total != 0.0 else 1.0)
        target = token + row // group * load_i64(task + OUT_TOKEN) + row % group * head_dim * 4
        for offset in range(0, head_dim * 4, VECTOR_BYTES):
            store(target + offset, div(load(out + row * head_dim * 4 + offset), divisor))


@helper
def _attend_tile(
    task: int, seq: int, query_end: int, first_row: int, num_tokens: int, kv_head: int, num_heads: int, memory: int
) -> None:  # fmt: skip
    """One query tile of one sequence for `num_heads` KV heads from kv_head on."""
    group, head_dim = load_i64(task + GROUP), load_i64(task + HEAD_DIM)
    num_rows = num_tokens * group
    all_rows, head_bytes = num_heads * num_rows, num_rows * head_dim * 4
    out_bytes, stat_bytes = num_heads * head_bytes, all_rows * 8
    query, out, split_out = memory, memory + out_bytes, memory + 2 * out_bytes
    stats = memory + 3 * out_bytes
    split_stats, work = stats + stat_bytes, stats + (2 * stat_bytes + LINE_BYTES - 1) // LINE_BYTES * LINE_BYTES
    table = load_i64(task + TABLES) + seq * load_i64(task + TABLE_ROW)
    base = load_i64(task + CACHE) + kv_head * head_dim * 4
    # A length that lies must not lead beyond the table. The last query row has the position of the last key.
    context_len = min(load_i32(load_i64(task + LENGTHS) + seq * 4), load_i64(task + MAX_KEYS))
    first_position = context_len - (query_end - first_row)
    num_keys = first_position + num_tokens
    first_key = max(0, first_position + 1 - load_i64(task + WINDOW)) // KEY_TILE * KEY_TILE
    first_end = (first_key // KEY_SPLIT + 1) * KEY_SPLIT
    for head in range(num_heads):
        _load_query(task, first_row, num_tokens, kv_head + head, query + head * head_bytes)
    _attend_split(
        task, table, base, num_heads, query, num_rows, first_position, first_key, min(first_end, num_keys), num_keys,
        stats, out, work,
    )  # fmt: skip
    for split in range(first_end, num_keys, KEY_SPLIT):
        _attend_split(
            task, table, base, num_heads, query, num_rows, first_position, split, min(split + KEY_SPLIT, num_keys),
            num_keys, split_stats, split_out, work,
        )  # fmt: skip
        merge(stats, out, split_stats, split_out, all_rows, head_dim)
    for head in range(num_heads):
        _store_rows(task, first_row, num_tokens, kv_head + head, stats + head * num_rows * 8, out + head * head_bytes)


def attention(task: int) -> None:
    """Work item: one query tile of one sequence and KV head, or of a decode and HEADS_AT_ONCE heads.

    Items ascend, so each thread walks the batch once.
    """
    num_kv_heads, starts = load_i64(task + NUM_KV_HEADS), load_i64(task + STARTS)
    tokens_per_tile = max(1, MAX_ROWS // load_i64(task + GROUP))
    memory = load_i64(task + SCRATCH) + fetch_add(task + NEXT_THREAD, 1) * load_i64(task + SCRATCH_STRIDE)
    item, first_item = fetch_add(task, 1), 0
    for seq in range(load_i64(task + NUM_SEQS)):
        query_start, query_end = load_i32(starts + seq * 4), load_i32(starts + seq * 4 + 4)
        num_heads = load_i64(task + HEADS_AT_ONCE) if query_end - query_start == 1 else 1
        items_per_tile = (num_kv_heads + num_heads - 1) // num_heads
        num_items = (query_end - query_start + tokens_per_tile - 1) // tokens_per_tile * items_per_tile
        while item < first_item + num_items:
            tile, kv_head = (item - first_item) // items_per_tile, (item - first_item) % items_per_tile * num_heads
            first_row = query_start + tile * tokens_per_tile
            num_tokens = min(tokens_per_tile, query_end - first_row)
            heads_here = min(num_heads, num_kv_heads - kv_head)
            _attend_tile(task, seq, query_end, first_row, num_tokens, kv_head, heads_here, memory)
            item = fetch_add(task, 1)
        first_item += num_items
