"""The workload is a pure function of shape, seed and salt, and its lengths are lognormal."""

import math
import statistics

from ops.bench.measure import num_blocks_for
from ops.bench.workload import (
    MAX_FACTOR,
    Lengths,
    WorkloadShape,
    draw_lengths,
    make_requests,
    warm_up_lengths,
)

SHAPE = WorkloadShape(prompt_mean=120, prompt_sigma=0.4, output_mean=32, output_sigma=0.8)
FIRST_LENGTHS = [(79, 18), (95, 32), (79, 28), (103, 12)]


def test_the_same_seed_draws_the_same_lengths_and_another_seed_others() -> None:
    assert draw_lengths(SHAPE, 50, seed=3) == draw_lengths(SHAPE, 50, seed=3)
    assert draw_lengths(SHAPE, 50, seed=3) != draw_lengths(SHAPE, 50, seed=4)


def test_the_lengths_of_a_seed_never_change() -> None:
    """Figures of two versions can be compared only if they come from one workload."""
    assert [(each.num_prompt, each.num_output) for each in draw_lengths(SHAPE, 4, seed=0)] == FIRST_LENGTHS


def test_a_longer_list_begins_with_the_shorter_one() -> None:
    assert draw_lengths(SHAPE, 64, seed=0)[:8] == draw_lengths(SHAPE, 8, seed=0)


def test_lengths_have_the_mean_and_the_deviation_that_are_asked_for() -> None:
    lengths = draw_lengths(SHAPE, 20_000, seed=0)
    for values, mean, sigma in (
        ([each.num_prompt for each in lengths], SHAPE.prompt_mean, SHAPE.prompt_sigma),
        ([each.num_output for each in lengths], SHAPE.output_mean, SHAPE.output_sigma),
    ):
        # Five standard errors of a lognormal's mean, and what cutting the tail takes away.
        error = 5 * mean * math.sqrt(math.expm1(sigma**2) / len(values))
        assert abs(statistics.fmean(values) - mean) < error + 0.01 * mean
        assert abs(statistics.median(values) - mean * math.exp(-(sigma**2) / 2)) < error + 0.5
        logs = [math.log(value) for value in values]
        assert abs(statistics.stdev(logs) - sigma) < 0.03


def test_no_length_is_less_than_one_or_more_than_the_cut() -> None:
    lengths = draw_lengths(WorkloadShape(2, 2.0, 2, 2.0), 5_000, seed=0)
    found = {each.num_prompt for each in lengths} | {each.num_output for each in lengths}
    assert min(found) == 1
    assert max(found) == 2 * MAX_FACTOR


def test_without_deviation_every_request_has_the_mean_length() -> None:
    assert set(draw_lengths(WorkloadShape(24, 0, 8, 0), 10, seed=5)) == {Lengths(24, 8)}


def test_ids_are_of_the_vocabulary_and_depend_on_seed_and_salt_alone() -> None:
    lengths = draw_lengths(SHAPE, 5, seed=0)
    requests = make_requests(lengths, vocab_size=50, seed=0, salt="a")
    assert requests == make_requests(lengths, vocab_size=50, seed=0, salt="a")
    assert [(len(each.prompt_ids), each.num_output) for each in requests] == [
        (each.num_prompt, each.num_output) for each in lengths
    ]
    assert {token_id for each in requests for token_id in each.prompt_ids} == set(range(50))
    for seed, salt in ((0, "b"), (1, "a")):
        others = make_requests(lengths, vocab_size=50, seed=seed, salt=salt)
        assert all(mine.prompt_ids[:16] != other.prompt_ids[:16] for mine, other in zip(requests, others, strict=True))


def test_the_warm_up_is_short() -> None:
    assert warm_up_lengths([Lengths(500, 300)] * 20) == [Lengths(32, 4)] * 8
    assert warm_up_lengths([Lengths(5, 1)]) == [Lengths(5, 1)]


def test_the_cache_has_room_for_the_largest_sequences_that_can_meet() -> None:
    lengths = [Lengths(16, 1), Lengths(30, 2), Lengths(100, 12), Lengths(3, 1)]
    assert num_blocks_for(lengths, 2, 16) == 7 + 2
    assert num_blocks_for(lengths, 100, 16) == 7 + 2 + 2 + 1
    assert num_blocks_for([Lengths(1, 1)], 1, 16) == 2
