"""One request: what it accepts, and what it tells of itself."""

import pytest

from scheduler.errors import InvalidPromptError
from scheduler.sampling_params import SamplingParams
from scheduler.sequence import Sequence, SequenceStatus

SAMPLING = SamplingParams()


def test_a_fresh_sequence_has_its_prompt_and_nothing_computed() -> None:
    seq = Sequence("a", [5, 6, 7], SAMPLING, seed=9)
    assert seq.token_ids.tolist() == [5, 6, 7]
    assert (seq.num_tokens, seq.num_prompt_tokens, seq.num_generated_tokens) == (3, 3, 0)
    assert (seq.num_computed_tokens, len(seq.block_table)) == (0, 0)
    assert seq.status is SequenceStatus.WAITING
    assert not seq.is_finished


def test_a_resumed_sequence_counts_the_tokens_of_its_earlier_run_as_generated() -> None:
    seq = Sequence("a", (5, 6), SAMPLING, generated_token_ids=[7, 8, 9])
    assert seq.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert (seq.num_prompt_tokens, seq.num_generated_tokens) == (2, 3)
    assert seq.generated_token_ids == [7, 8, 9]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty prompt"),
        ([1, -1], "token id -1"),
        ([2**31], "no token id"),
        ([1.5], "no token id"),
        (["7"], "no token id"),
        ([None], "no token id"),
    ],
)
def test_a_prompt_that_is_none_is_refused_by_name(prompt: list[int], words: str) -> None:
    with pytest.raises(InvalidPromptError, match=f"sequence job-7 .*{words}"):
        Sequence("job-7", prompt, SAMPLING)


def test_bad_resumed_tokens_are_refused_as_well() -> None:
    with pytest.raises(InvalidPromptError, match="token id -5"):
        Sequence("a", [1], SAMPLING, generated_token_ids=[-5])


def test_stats_tell_what_it_has_cost() -> None:
    seq = Sequence("a", [1, 2], SAMPLING, generated_token_ids=[3], arrival_s=4.5)
    stats = seq.stats(now=6.0)
    assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (2, 1)
    assert (stats.arrival_s, stats.first_scheduled_s, stats.first_token_s, stats.finished_s) == (4.5, None, None, 6.0)
