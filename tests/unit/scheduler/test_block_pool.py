"""The free list of one tier."""

import pytest

from scheduler.block_pool import Block, BlockContent, BlockPool


@pytest.fixture
def evicted() -> list[BlockContent]:
    return []


def make_pool(num_blocks: int, evicted: list[BlockContent]) -> BlockPool:
    return BlockPool(num_blocks, evicted.append)


def take(pool: BlockPool, num_blocks: int) -> list[Block]:
    blocks = pool.allocate(num_blocks)
    assert blocks is not None
    return blocks


def seal(pool: BlockPool, block: Block) -> BlockContent:
    content = BlockContent(hash=100 + block.block_id, parent=0, tokens=b"", name=block.block_id)
    pool.set_content(block, content)
    return content


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def test_it_hands_out_all_its_blocks_and_then_none(evicted: list[BlockContent]) -> None:
    pool = make_pool(3, evicted)
    assert ids(take(pool, 2)) == [0, 1]
    assert pool.allocate(2) is None
    assert pool.num_free == 1, "a refused request takes nothing"
    assert ids(take(pool, 1)) == [2]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_blocks_that_hold_nothing_are_used_before_cached_ones(evicted: list[BlockContent]) -> None:
    pool = make_pool(3, evicted)
    first, second, third = take(pool, 3)
    content = seal(pool, second)
    pool.free([second])
    pool.free([third, first])
    assert ids(pool.free_list()) == [0, 2, 1]
    take(pool, 2)
    assert evicted == []
    take(pool, 1)
    assert evicted == [content]
    assert second.hash is None, "the hash goes when the block is handed out again"


def test_of_cached_blocks_the_tail_is_evicted_before_the_head(evicted: list[BlockContent]) -> None:
    pool = make_pool(4, evicted)
    blocks = take(pool, 4)
    contents = [seal(pool, block) for block in blocks]
    pool.free(reversed(blocks))
    take(pool, 3)
    assert evicted == contents[:0:-1]


def test_a_block_that_is_hit_leaves_the_middle_of_the_free_list(evicted: list[BlockContent]) -> None:
    pool = make_pool(5, evicted)
    blocks = take(pool, 5)
    for block in blocks:
        seal(pool, block)
    pool.free(blocks)
    pool.touch([blocks[2], blocks[4]])
    assert ids(pool.free_list()) == [0, 1, 3]
    assert (pool.num_free, pool.num_free_cached) == (3, 3)
    assert blocks[2].hash == 102
    take(pool, 3)
    assert pool.allocate(1) is None
    pool.free([blocks[2]])
    assert ids(pool.free_list()) == [2]


def test_a_shared_block_is_free_only_after_its_last_owner(evicted: list[BlockContent]) -> None:
    pool = make_pool(2, evicted)
    (block,) = take(pool, 1)
    pool.touch([block])
    pool.free([block])
    assert pool.num_free == 1
    pool.free([block])
    assert pool.num_free == 2


def test_freeing_a_free_block_is_an_error_that_names_it(evicted: list[BlockContent]) -> None:
    pool = make_pool(2, evicted)
    (block,) = take(pool, 1)
    pool.free([block])
    with pytest.raises(AssertionError, match=r"Block\(0, ref_cnt=0.*nobody owns it"):
        pool.free([block])


def test_a_forgotten_content_is_not_evicted_again(evicted: list[BlockContent]) -> None:
    pool = make_pool(1, evicted)
    (block,) = take(pool, 1)
    seal(pool, block)
    pool.free([block])
    pool.drop_content(block)
    assert pool.num_free_cached == 0
    take(pool, 1)
    assert evicted == []


def test_a_block_is_sealed_once_and_only_by_an_owner(evicted: list[BlockContent]) -> None:
    pool = make_pool(1, evicted)
    with pytest.raises(AssertionError, match="nobody owns it"):
        seal(pool, pool.blocks[0])
    (block,) = take(pool, 1)
    seal(pool, block)
    with pytest.raises(AssertionError, match="sealed twice"):
        seal(pool, block)
