"""How the Triton attention is launched: on tensors without memory, so that nothing can be read of them on the host."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: the launches are its")

from kernels.attention_inputs import FP8, PLAIN, AttentionMetadata, AttentionOptions
from kernels.gpu.attention_cases import CASES
from kernels.gpu.attention_sizes import FIXED_SPLIT, MAX_SPLIT, MIN_SPLIT, split_len
from kernels.gpu.case import TARGETS
from kernels.gpu.common import launching_by
from kernels.gpu.paged_attention import attend_with_triton, why_not_triton

MAX_GRID = 65535


@dataclass(frozen=True, slots=True)
class Launch:
    """One recorded launch."""

    name: str
    grid: tuple[int, ...]
    constants: dict[str, Any]


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.gpu.paged_attention.capability", lambda device: 90)


def launches(
    num_seqs: int,
    query_len: int,
    context_len: int,
    options: AttentionOptions = PLAIN,
    *,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    is_deterministic: bool = True,
) -> list[Launch]:
    """What one call launches, with tensors of the device `meta`, of which nothing can be read."""
    seen: list[Launch] = []

    def record(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        seen.append(Launch(kernel.__name__, grid, constants))

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    batch = AttentionMetadata(
        ints(num_seqs, -(-context_len // 16)),
        ints(num_seqs + 1),
        ints(num_seqs),
        query_len,
        context_len,
        is_deterministic,
    )
    query = torch.empty(num_seqs * query_len, num_heads, 128, dtype=torch.bfloat16, device="meta")
    cache = torch.empty(1000, 2, 2, 16, num_kv_heads, 128, dtype=torch.bfloat16, device="meta")
    with launching_by(record):
        attend_with_triton(query, cache, 1, batch, 0.1, options, torch.empty_like(query))
    return seen


def test_a_batch_of_decodes_takes_the_split_kernel_and_its_merge() -> None:
    assert [(launch.name, launch.grid) for launch in launches(5, 1, 4000)] == [
        ("decode_kernel", (5, 8, 8)),
        ("merge_kernel", (5, 32)),
    ]


def test_contexts_of_one_split_need_no_merge() -> None:
    assert [(launch.name, launch.grid) for launch in launches(5, 1, FIXED_SPLIT)] == [("decode_kernel", (5, 8, 1))]


def test_a_batch_with_chunks_takes_the_prefill_kernel_too() -> None:
    names = [launch.name for launch in launches(5, 30, 4000)]
    assert names == ["prefill_kernel", "decode_kernel", "merge_kernel"]


def test_the_fixed_split_does_not_depend_on_the_batch() -> None:
    for num_programs in (1, 100, 100_000):
        assert split_len(num_programs, 30_000, 132, is_deterministic=True) == FIXED_SPLIT


def test_a_split_chosen_by_shape_fills_the_device_and_is_bounded() -> None:
    def choose(num_programs: int, context_len: int) -> int:
        return split_len(num_programs, context_len, 132, is_deterministic=False)

    assert choose(8, 32_768) == 512, "one sequence of 8 KV heads: 64 splits, 512 programs for 132 multiprocessors"
    assert choose(8, 4096) == MIN_SPLIT
    assert choose(100_000, 32_768) == MAX_SPLIT
    assert choose(512, 4096) == 4096, "enough programs without splits"


def test_the_sizes_of_tiles_do_not_depend_on_the_batch_in_deterministic_mode() -> None:
    tiles = {
        (launch.name, launch.constants.get("TILE"), launch.constants.get("BLOCK_M"), launch.constants.get("ROWS"))
        for num_seqs, query_len, context_len in ((1, 2, 900), (40, 2000, 4000), (200, 1, 9000))
        for launch in launches(num_seqs, query_len, context_len)
    }
    assert len(tiles) == 3, "one size for each of the three kernels"


def test_a_short_chunk_has_a_small_tile_where_the_batch_may_decide() -> None:
    assert launches(1, 4, 900, is_deterministic=False)[0].constants["BLOCK_M"] == 16
    assert launches(1, 4, 900)[0].constants["BLOCK_M"] == 128


def test_the_second_and_third_axis_stay_below_the_limit_of_a_grid() -> None:
    """Tokens and sequences are many, so they stand on the first axis, which alone takes more than 65,535."""
    for launch in (*launches(70_000, 1, 1000), *launches(70_000, 2, 1000), *launches(2, 1, 1 << 20)):
        assert max(launch.grid[1:]) <= MAX_GRID
    assert launches(70_000, 1, 1000)[0].grid[0] == 70_000


def test_a_batch_of_no_tokens_launches_nothing() -> None:
    assert launches(0, 1, 16) == []
    assert launches(3, 0, 16) == []


def test_a_large_group_is_shared_by_several_programs() -> None:
    (decode,) = launches(2, 1, 100, num_heads=71, num_kv_heads=1)
    assert decode.grid == (2, 3, 1)
    assert (decode.constants["HEADS"], decode.constants["ROWS"]) == (32, 32)


def test_grids_of_a_captured_graph_follow_its_bounds() -> None:
    """Fewer tokens than the bounds allow change nothing: only shapes and the metadata's two numbers count."""
    assert launches(8, 1, 4096)[0].grid == (8, 8, 8)
    assert launches(8, 1, 100)[0].grid == (8, 8, 1)


def reason(dtype: torch.dtype = torch.bfloat16, head_dim: int = 128, scale: float = 0.1, **changes: Any) -> str | None:
    tables, starts, lens = (torch.zeros(shape, dtype=torch.int32) for shape in ((1, 4), (2,), (1,)))
    batch = AttentionMetadata(tables, starts, lens, 1, 50)
    query = torch.empty(1, 4, head_dim, dtype=dtype)
    cache = torch.empty(9, 2, 2, 16, 2, head_dim, dtype=changes.get("cache_dtype", dtype))
    return why_not_triton(changes.get("query", query), cache, replace(batch, **changes.get("meta", {})), scale, query)


def test_what_the_kernels_do_not_compute_is_named() -> None:
    assert reason() is None
    assert reason(cache_dtype=FP8) is None
    assert reason(head_dim=320) == "the head size 320 is above 256"
    assert reason(torch.float64) == "torch.float64 has no kernel on cpu"
    assert reason(scale=-1.0) == "the scale -1.0 is not above 0"
    assert reason(scale=float("nan")) == "the scale nan is not above 0"
    strided = torch.empty(1, 4, 256, dtype=torch.bfloat16)[..., ::2]
    assert reason(query=strided) == "the elements of a head are not adjacent in memory"
    apart = {"context_lens": torch.zeros(2, dtype=torch.int32).expand(1, 2)[:, 0].as_strided((1,), (2,))}
    assert reason(meta=apart) == "the entries of the metadata are not adjacent in memory"
    far = reason(meta={"max_context_len": 100_000_000})
    assert far is not None
    assert "more than a grid of programs has" in far


def test_the_ahead_of_time_cases_cover_every_target_and_every_kind_of_launch() -> None:
    """What models have most on every target; what is rare on one at least."""
    everywhere: dict[int, set[tuple[str, torch.dtype]]] = {target: set() for target in TARGETS}
    seen: dict[str, set[Any]] = {name: set() for name in ("HEAD_DIM", "BLOCK_SIZE", "query", "cache", "HAS_CAP")}

    def record(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        for target in case.targets:
            everywhere[target].add((kernel.__name__, args[0].dtype))
        constants |= {"query": args[0].dtype, "cache": args[1].dtype}
        if kernel.__name__ == "prefill_kernel":
            for name, values in seen.items():
                values.add(constants[name])

    with launching_by(record):
        for case in CASES:
            case.run()
    halves = {(f"{name}_kernel", dtype) for name in ("prefill", "decode") for dtype in (torch.bfloat16, torch.float16)}
    for kernels in everywhere.values():
        assert kernels >= halves | {("merge_kernel", torch.float32)}
    assert seen["HEAD_DIM"] == {64, 80, 96, 128, 256}
    assert seen["BLOCK_SIZE"] == {8, 16, 32, 64}
    assert seen["query"] == {torch.float32, torch.float16, torch.bfloat16}
    assert seen["cache"] == {torch.float32, torch.float16, torch.bfloat16, FP8}
    assert seen["HAS_CAP"] == {False, True}
