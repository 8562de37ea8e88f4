"""The real prefix cache on its own, beside a plain LRU of the same size."""

import random
from pathlib import Path

import pytest

from ops.simulate.adapt import window
from ops.simulate.errors import SimulateError
from ops.simulate.prefix_only import check_has_hashes, run_cache, run_plain_lru
from ops.simulate.traces import Trace, read_trace
from tests.unit.simulate.traces_at_hand import MOONCAKE, made_trace, public_trace, write_lines


def chats(folder: Path, *prompts: list[int], tenants: list[str] | None = None) -> Trace:
    """One request a prompt, each a list of hash ids."""
    lines = [
        {"timestamp": n, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        | ({} if tenants is None else {"tenant": tenants[n]})
        for n, ids in enumerate(prompts)
    ]
    return read_trace(write_lines(folder / "chats.jsonl", lines))


def test_blocks_that_were_there_before_are_hit_up_to_the_first_that_differs(tmp_path: Path) -> None:
    trace = chats(tmp_path, [1, 2, 3], [1, 2, 4], [1, 2, 3], [5])
    run = run_cache(trace, num_blocks=10, block_size=512)
    assert (run.num_prompt_blocks, run.num_hit_blocks) == (10, 2 + 3)
    assert run == run_plain_lru(trace, 10)


def test_without_room_the_least_recently_used_prompt_is_lost_tail_first(tmp_path: Path) -> None:
    trace = chats(tmp_path, [1, 2], [3, 4], [5], [1, 2], [3, 4])
    # [5] takes the block of 2, whose head 1 is still hit; 2 then takes that of 4, whose head 3 is.
    assert run_cache(trace, num_blocks=4, block_size=512).num_hit_blocks == 2
    # A plain LRU loses 1 for 5, then 2 for 1, and so on: always the one that comes next.
    assert run_plain_lru(trace, 4).num_hit_blocks == 0


def test_tenants_share_nothing(tmp_path: Path) -> None:
    trace = chats(tmp_path, [1, 2], [1, 2], [1, 2], tenants=["a", "b", "a"])
    assert run_cache(trace, num_blocks=10, block_size=512).num_hit_blocks == 2
    assert run_plain_lru(trace, 10).num_hit_blocks == 2
    assert trace.num_distinct_hashes == 4


@pytest.mark.parametrize(("block_size", "num_hit"), [(128, 8), (256, 4), (1024, 1)])
def test_other_block_sizes_hit_the_same_tokens_in_whole_blocks(tmp_path: Path, block_size: int, num_hit: int) -> None:
    trace = chats(tmp_path, [1, 2, 3], [1, 2, 4])
    assert run_cache(trace, num_blocks=100, block_size=block_size).num_hit_blocks == num_hit


def test_a_prompt_larger_than_the_pool_finds_nothing_and_loses_nothing(tmp_path: Path) -> None:
    trace = chats(tmp_path, [1, 2], [1, 2, 3, 4], [1, 2])
    assert run_cache(trace, num_blocks=3, block_size=512).num_hit_blocks == 2


def test_random_chats_are_hit_no_less_than_by_a_plain_lru(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    trace = made_trace(tmp_path, 200, seed)
    for num_blocks in (4, 8, 16, 64, 1000):
        ours, plain = run_cache(trace, num_blocks, 512), run_plain_lru(trace, num_blocks)
        assert ours.num_hit_blocks >= plain.num_hit_blocks, f"seed {seed}, {num_blocks} blocks"


def test_a_trace_without_hashes_has_nothing_to_find(tmp_path: Path) -> None:
    trace = made_trace(tmp_path, 3, seed=1, has_hashes=False)
    with pytest.raises(SimulateError, match="has no hash_ids"):
        check_has_hashes(trace)


def test_the_begin_of_the_public_trace_is_hit_as_by_a_plain_lru() -> None:
    trace = window(read_trace(public_trace(MOONCAKE)), 2_000, seed=None)
    for percent in (5, 25):
        num_blocks = round(trace.num_distinct_hashes * percent / 100)
        ours, plain = run_cache(trace, num_blocks, 512), run_plain_lru(trace, num_blocks)
        assert ours.num_prompt_blocks == plain.num_prompt_blocks
        assert ours.hit_share >= plain.hit_share - 0.005


@pytest.mark.slow
@pytest.mark.parametrize(("percent", "plain"), [(5, 0.196), (10, 0.279), (25, 0.353), (50, 0.363), (100, 0.366)])
def test_the_public_trace_is_hit_as_by_a_plain_lru_of_the_same_size(percent: int, plain: float) -> None:
    trace = read_trace(public_trace(MOONCAKE))
    num_blocks = round(trace.num_distinct_hashes * percent / 100)
    assert run_plain_lru(trace, num_blocks).hit_share == pytest.approx(plain, abs=0.001)
    assert run_cache(trace, num_blocks, 512).hit_share >= plain - 0.005
