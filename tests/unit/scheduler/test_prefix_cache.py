"""Reuse of cached prefixes: what is found, and what must never be."""

import pytest

from scheduler.config import CacheConfig
from scheduler.kv_cache_manager import KVCacheManager
from scheduler.sampling_params import SamplingParams
from scheduler.sequence import Sequence

BLOCK_SIZE = 4
A, B, C = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]


def constant_hash(parent_hash: int, tokens: bytes) -> int:
    """Every block collides with every other."""
    return 7


def make_manager(num_blocks: int = 16, *, is_shared: bool = False, is_constant: bool = False) -> KVCacheManager:
    config = CacheConfig(num_blocks, BLOCK_SIZE, is_prefix_shared_by_tenants=is_shared)
    return KVCacheManager(config, constant_hash) if is_constant else KVCacheManager(config)


def make(tokens: list[int], *, tenant: str = "", adapter: str = "", cache_salt: str = "") -> Sequence:
    return Sequence("s", tokens, SamplingParams(), tenant=tenant, adapter=adapter, cache_salt=cache_salt)


def compute(kv: KVCacheManager, seq: Sequence) -> Sequence:
    """Compute all tokens of `seq`, using the cache; returns it, holding its blocks."""
    kv.take_prefix(seq, kv.find_prefix(seq))
    assert kv.allocate_slots(seq, seq.num_tokens - seq.num_computed_tokens) is not None
    seq.num_computed_tokens = seq.num_tokens
    kv.seal_full_blocks(seq)
    return seq


def hit_ids(kv: KVCacheManager, seq: Sequence) -> list[int]:
    return [block.block_id for block in kv.find_prefix(seq)]


def test_a_prompt_finds_the_full_blocks_of_an_equal_beginning() -> None:
    kv = make_manager()
    first = compute(kv, make([*A, *B, 9, 10]))
    assert hit_ids(kv, make([*A, *B, *C])) == list(first.block_table.block_ids()[:2])
    assert hit_ids(kv, make([*A, 5, 6, 7, 0, 1])) == list(first.block_table.block_ids()[:1])
    assert hit_ids(kv, make([*B, *A, 1])) == []


def test_a_freed_prefix_is_found_until_its_blocks_are_handed_out() -> None:
    kv = make_manager(num_blocks=3)
    kv.free(compute(kv, make([*A, *B])))
    assert len(hit_ids(kv, make([*A, *B, 1]))) == 2
    other = make([0] * 8)
    assert kv.allocate_slots(other, 8) is not None
    assert len(hit_ids(kv, make([*A, *B, 1]))) == 1, "the tail goes first"
    assert kv.allocate_slots(other, 12) is not None
    assert hit_ids(kv, make([*A, *B, 1])) == []


@pytest.mark.parametrize("num_blocks_in_prompt", [1, 2, 3])
def test_a_hit_on_the_whole_prompt_leaves_a_token_to_compute(num_blocks_in_prompt: int) -> None:
    kv = make_manager()
    prompt = [*A, *B, *C][: num_blocks_in_prompt * BLOCK_SIZE]
    compute(kv, make(prompt))
    again = make(prompt)
    kv.take_prefix(again, kv.find_prefix(again))
    assert again.num_computed_tokens == (num_blocks_in_prompt - 1) * BLOCK_SIZE
    assert again.num_cached_tokens == again.num_computed_tokens


@pytest.mark.parametrize("is_constant", [False, True])
def test_equal_tokens_below_another_prefix_are_another_content(is_constant: bool) -> None:
    kv = make_manager(is_constant=is_constant)
    kv.free(compute(kv, make([*A, *B])))
    for prompt in ([*B, 1], [*C, *B, 1], [*B, *A, 1], [*B, *B, 1]):
        assert hit_ids(kv, make(prompt)) == [], f"{prompt} was served a block of another prompt"


def test_colliding_hashes_never_serve_another_prompts_blocks() -> None:
    kv = make_manager(num_blocks=64, is_constant=True)
    owner_of_block: dict[int, list[int]] = {}
    prompts = [[*x, *y, *z, 1] for x in (A, B, C) for y in (A, B, C) for z in (A, B, C)]
    for prompt in prompts + prompts[::-1]:
        seq = make(prompt)
        for index, block in enumerate(kv.find_prefix(seq)):
            assert owner_of_block[block.block_id] == prompt[: (index + 1) * BLOCK_SIZE]
        compute(kv, seq)
        for index, block in enumerate(seq.block_table):
            owner_of_block[block.block_id] = prompt[: (index + 1) * BLOCK_SIZE]
        kv.free(seq)
    assert kv.prefix_cache is not None
    assert len(kv.prefix_cache) == 1, "one entry a hash, whatever collides"
    assert kv.pool.num_free_cached == 1


def test_a_collision_after_the_parent_was_replaced_is_refused() -> None:
    """With equal hashes for A and C, the block of B below A must not be found below C."""

    def colliding(parent_hash: int, tokens: bytes) -> int:
        return 1 if parent_hash not in (1, 2) else 2

    kv = KVCacheManager(CacheConfig(16, BLOCK_SIZE), colliding)
    below_a = compute(kv, make([*A, *B]))
    compute(kv, make(C))
    assert len(hit_ids(kv, make([*C, 1]))) == 1
    assert len(hit_ids(kv, make([*C, *B, 1]))) == 1, "B below A was served as B below C"
    kv.free(below_a)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"tenant": "a"}, {"tenant": "b"}),
        ({"tenant": "a"}, {}),
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"adapter": "a"}, {"cache_salt": "a"}),
        ({"adapter": "a"}, {"tenant": "a"}),
        ({"tenant": "ab"}, {"tenant": "a", "adapter": "b"}),
    ],
)
@pytest.mark.parametrize("is_constant", [False, True])
def test_tenant_adapter_and_salt_keep_equal_prompts_apart(
    first: dict[str, str], second: dict[str, str], is_constant: bool
) -> None:
    kv = make_manager(is_constant=is_constant)
    compute(kv, make(A, **first))
    assert hit_ids(kv, make([*A, 1], **second)) == []
    assert len(hit_ids(kv, make([*A, 1], **first))) == 1


def test_tenants_see_one_anothers_prefixes_only_where_sharing_is_on() -> None:
    kv = make_manager(is_shared=True)
    compute(kv, make(A, tenant="a"))
    assert len(hit_ids(kv, make([*A, 1], tenant="b"))) == 1
    assert hit_ids(kv, make([*A, 1], tenant="b", cache_salt="own")) == []


def test_of_two_equal_blocks_the_first_stays_and_the_chain_goes_on() -> None:
    kv = make_manager()
    first, second = make([*A]), make([*A, *B])
    for seq in (first, second):
        assert kv.allocate_slots(seq, seq.num_tokens) is not None
        seq.num_computed_tokens = seq.num_tokens
    kv.seal_full_blocks(first)
    kv.seal_full_blocks(second)
    assert hit_ids(kv, make([*A, *B, 1])) == [first.block_table[0].block_id, second.block_table[1].block_id]


def test_a_prefix_can_be_cached_again_after_its_parent_was_evicted() -> None:
    """The child outlives its parent where the two belong to different sequences; it must not block its successor."""
    kv = make_manager(num_blocks=6)
    first, second = make([*A]), make([*A, *B])
    for seq in (first, second):
        assert kv.allocate_slots(seq, seq.num_tokens) is not None
        seq.num_computed_tokens = seq.num_tokens
        kv.seal_full_blocks(seq)
    kv.free(first)
    assert kv.allocate_slots(make([0]), 4 * 4) is not None
    assert hit_ids(kv, make([*A, *B, 1])) == []
    kv.free(second)
    third = compute(kv, make([*A, *B]))
    assert hit_ids(kv, make([*A, *B, 1])) == list(third.block_table.block_ids())


def test_a_sequence_that_lost_its_blocks_is_cached_anew_when_it_comes_back() -> None:
    kv = make_manager(num_blocks=3)
    seq = compute(kv, make([*A, *B]))
    kv.free(seq)
    other = make([0])
    assert kv.allocate_slots(other, 12) is not None
    kv.free(other)
    compute(kv, seq)
    assert hit_ids(kv, make([*A, *B, 1])) == list(seq.block_table.block_ids())


def test_metadata_never_outgrows_the_pool() -> None:
    kv = make_manager(num_blocks=8)
    for number in range(200):
        kv.free(compute(kv, make([number, *A, *B, *C])))
    assert kv.prefix_cache is not None
    assert len(kv.prefix_cache) <= 8
    assert sum(block.content is not None for block in kv.pool.blocks) == len(kv.prefix_cache)


def test_what_a_failed_sequence_computed_is_not_found_again() -> None:
    kv = make_manager()
    kv.discard(compute(kv, make([*A, *B])))
    assert hit_ids(kv, make([*A, *B, 1])) == []
    assert kv.pool.num_free == 16
    assert kv.pool.num_free_cached == 0


def test_without_prefix_caching_nothing_is_kept() -> None:
    kv = KVCacheManager(CacheConfig(8, BLOCK_SIZE, enable_prefix_caching=False))
    kv.free(compute(kv, make([*A, *B])))
    assert hit_ids(kv, make([*A, *B, 1])) == []
    assert kv.pool.num_free_cached == 0
