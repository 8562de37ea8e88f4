"""What each step computes, and who holds which blocks after it, written out step by step."""

from scheduler import FinishReason
from tests.unit.scheduler.fake_runner import Driver, generate
from tests.unit.scheduler.makers import make_scheduler, make_seq


def test_a_lone_sequence_is_prefilled_decoded_and_gone() -> None:
    driver = Driver(make_scheduler(num_blocks=8, block_size=4))
    seq = make_seq("a", num_prompt_tokens=6, max_tokens=3)
    driver.add(seq)
    steps = []
    while driver.scheduler.has_unfinished:
        driver.step()
        steps.append((driver.num_tokens_by_id(), driver.num_blocks_by_id()))
    assert steps == [
        ({"a": 6}, {"a": 2}),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {}),
    ]
    assert driver.generated["a"] == generate("", seq.token_ids[:6], 3)
    assert driver.ends["a"].finish_reason is FinishReason.LENGTH


def test_a_long_prompt_is_computed_in_chunks_while_others_decode() -> None:
    """Budget 8, blocks of 4: the decode keeps its token a step, the prompt of 18 gets what is left."""
    driver = Driver(make_scheduler(num_blocks=20, block_size=4, max_num_batched_tokens=8))
    driver.add(make_seq("a", num_prompt_tokens=3, max_tokens=20))
    driver.step()
    driver.add(make_seq("b", num_prompt_tokens=18, max_tokens=20))
    table = [
        # computed            blocks held      drawn for
        ({"a": 1, "b": 7}, {"a": 1, "b": 2}, ["a"]),
        ({"a": 1, "b": 7}, {"a": 2, "b": 4}, ["a"]),
        ({"a": 1, "b": 4}, {"a": 2, "b": 5}, ["a", "b"]),
        ({"a": 1, "b": 1}, {"a": 2, "b": 5}, ["a", "b"]),
    ]
    for computed, blocks, drawn in table:
        outputs = driver.step()
        assert driver.num_tokens_by_id() == computed
        assert driver.num_blocks_by_id() == blocks
        assert [output.seq_id for output in outputs] == drawn


def test_a_prefill_ahead_leaves_each_decode_behind_it_its_token() -> None:
    """The urgent prompt is served first, but the two decodes behind it don't wait for its 30 tokens."""
    driver = Driver(make_scheduler(num_blocks=40, block_size=4, max_num_batched_tokens=10))
    driver.add(make_seq("lead", 2, 30), make_seq("a", 2, 30), make_seq("b", 2, 30))
    driver.step()
    driver.add(make_seq("urgent", 30, 5, priority=1))
    driver.step()
    assert driver.num_tokens_by_id() == {"lead": 1, "a": 1, "b": 1, "urgent": 7}
    for _ in range(2):
        driver.step()
        assert driver.num_tokens_by_id() == {"lead": 1, "urgent": 7, "a": 1, "b": 1}


def test_the_victim_gives_its_blocks_and_comes_back_where_it_was() -> None:
    """Pool of 6 blocks of 2. Both need a fourth block when they have 7 tokens; b gives way, then a ends."""
    driver = Driver(make_scheduler(num_blocks=6, block_size=2, enable_prefix_caching=False))
    first, second = make_seq("a", 3, 6), make_seq("b", 3, 6)
    driver.add(first, second)
    table = [
        # computed            blocks held       removed  new
        ({"a": 3, "b": 3}, {"a": 2, "b": 2}, (), ["a", "b"]),
        ({"a": 1, "b": 1}, {"a": 2, "b": 2}, (), []),
        ({"a": 1, "b": 1}, {"a": 3, "b": 3}, (), []),
        ({"a": 1, "b": 1}, {"a": 3, "b": 3}, (), []),
        ({"a": 1}, {"a": 4}, ("b",), []),
        ({"a": 1}, {}, (), []),
        ({"b": 7}, {"b": 4}, ("a",), ["b"]),
        ({"b": 1}, {}, (), []),
    ]
    for computed, blocks, removed_ids, new_ids in table:
        driver.step()
        assert driver.last_output is not None
        assert driver.num_tokens_by_id() == computed
        assert driver.num_blocks_by_id() == blocks
        assert driver.last_output.removed_ids == removed_ids
        assert [row.seq_id for row in driver.last_output.new_rows] == new_ids
    assert driver.generated == {seq.seq_id: generate("", seq.token_ids[:3], 6) for seq in (first, second)}
    end = driver.ends["b"].stats
    assert end is not None
    assert (end.num_preemptions, end.num_recomputed_tokens) == (1, 6)
    assert driver.scheduler.stats().num_recomputed_tokens == 6


def test_what_the_prefix_cache_has_kept_of_a_victim_is_not_computed_again() -> None:
    driver = Driver(make_scheduler(num_blocks=6, block_size=2))
    driver.add(make_seq("a", 3, 6), make_seq("b", 3, 6))
    driver.run()
    end = driver.ends["b"].stats
    assert end is not None
    assert end.num_preemptions == 1
    assert end.num_recomputed_tokens == 2, "of its three blocks of 2, the first two were still there when it came back"


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    driver = Driver(make_scheduler(num_blocks=6, block_size=2, enable_prefix_caching=False))
    driver.add(make_seq("a", 3, 6), make_seq("b", 3, 6))
    for _ in range(4):
        driver.step()
    driver.add(make_seq("tiny", 1, 1, priority=5))
    driver.step()
    assert driver.scheduler.stats().num_preemptions_recompute == 1
    assert driver.num_tokens_by_id() == {"a": 1}
    driver.step()
    assert driver.num_tokens_by_id() == {"a": 1, "tiny": 1}


def test_a_burst_is_bounded_by_sequences_and_by_tokens() -> None:
    driver = Driver(make_scheduler(num_blocks=99, max_num_seqs=3, max_num_batched_tokens=40))
    driver.add(*(make_seq(f"s{number}", 16, 2) for number in range(5)))
    driver.step()
    assert driver.num_tokens_by_id() == {"s0": 16, "s1": 16, "s2": 8}
    driver.step()
    assert driver.num_tokens_by_id() == {"s0": 1, "s1": 1, "s2": 8}
    driver.step()
    assert driver.num_tokens_by_id() == {"s2": 1, "s3": 16, "s4": 16}


def test_a_budget_smaller_than_the_batch_still_moves_everyone_on() -> None:
    driver = Driver(make_scheduler(num_blocks=99, block_size=4, max_num_batched_tokens=2))
    seqs = [make_seq(f"s{number}", 5, 4) for number in range(6)]
    driver.add(*seqs)
    driver.run(max_steps=60)
    assert driver.generated == {seq.seq_id: generate("", seq.token_ids[:5], 4) for seq in seqs}


def test_slots_are_filled_but_for_the_last_block_of_each_sequence() -> None:
    driver = Driver(make_scheduler(num_blocks=20, block_size=4))
    driver.add(make_seq("a", 6, 9), make_seq("b", 9, 9))
    driver.step()
    stats = driver.scheduler.stats()
    assert (stats.num_filled_slots, stats.num_allocated_slots) == (15, 20)
    assert (stats.num_blocks, stats.num_free_blocks, stats.num_cached_blocks) == (20, 15, 0)
    driver.add(make_seq("c", prompt=driver.scheduler.running[1].token_ids[:9].tolist()))
    driver.step()
    stats = driver.scheduler.stats()
    assert (stats.num_filled_slots, stats.num_allocated_slots) == (18, 24), "two blocks of c are those of b"
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (24, 8)
