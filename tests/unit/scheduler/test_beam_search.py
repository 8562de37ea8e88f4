"""The arithmetic of beam search, against an enumeration of everything that could be said."""

import math
import random
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.beam_search import BeamSearch, num_blocks_at_most, num_candidates
from scheduler.output import Candidate, FinishReason, Hypothesis
from scheduler.sampling_params import EarlyStopping

EOS = 0


class Model:
    """A made-up language: the log probabilities of the next token follow from those before it."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.seed = seed
        self.vocab_size = vocab_size

    def candidates(self, token_ids: Sequence[int]) -> list[Candidate]:
        rng = random.Random(f"{self.seed}/{list(token_ids)}")
        weights = [rng.random() ** 2 + 1e-6 for _ in range(self.vocab_size)]
        total = sum(weights)
        made = [Candidate(token, math.log(weight / total)) for token, weight in enumerate(weights)]
        return sorted(made, key=lambda each: -each.logprob)

    def logprob(self, token_ids: Sequence[int]) -> float:
        return sum(
            next(each.logprob for each in self.candidates(token_ids[:end]) if each.token_id == token)
            for end, token in enumerate(token_ids)
        )


def end_of(token_id: int) -> FinishReason | None:
    return FinishReason.EOS if token_id == EOS else None


def search(model: Model, made: BeamSearch, num_each: int | None = None) -> list[Hypothesis]:
    """What a search finds if each beam is given its `num_each` likeliest candidates; None: all there are."""
    beams: list[tuple[int, ...]] = [()]
    while not made.is_done:
        given_each = [model.candidates(beam)[:num_each] for beam in beams]
        survivors = made.advance(given_each, beams, end_of)
        beams = [(*beams[survivor.parent], survivor.token_id) for survivor in survivors]
        assert len(beams) <= made.width
        assert len(set(beams)) == len(beams)
        for beam, logprob in zip(beams, made.logprobs, strict=True):
            assert logprob == pytest.approx(model.logprob(beam))
    return made.hypotheses


def every_reply(model: Model, max_tokens: int, length_penalty: float) -> list[tuple[float, tuple[int, ...]]]:
    """All replies there can be, the best first: those that end with EOS, and those that are cut off without it."""
    others = range(1, model.vocab_size)
    heads = [head for length in range(max_tokens) for head in product(others, repeat=length)]
    replies = [(*head, EOS) for head in heads] + list(product(others, repeat=max_tokens))
    return sorted(((model.logprob(reply) / len(reply) ** length_penalty, reply) for reply in replies), reverse=True)


penalties = st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), vocab_size=st.integers(2, 4), max_tokens=st.integers(1, 4), penalty=penalties)
def test_a_search_as_wide_as_the_language_finds_its_best_replies(
    seed: int, vocab_size: int, max_tokens: int, penalty: float
) -> None:
    model = Model(seed, vocab_size)
    width = vocab_size**max_tokens
    found = search(model, BeamSearch(width, max_tokens, penalty, "never"))
    expected = every_reply(model, max_tokens, penalty)
    assert [hypothesis.token_ids for hypothesis in found] == [reply for _, reply in expected[:width]]
    for hypothesis, (score, reply) in zip(found, expected, strict=False):
        assert hypothesis.score == pytest.approx(score)
        assert hypothesis.logprob == pytest.approx(model.logprob(reply))
        is_cut = hypothesis.token_ids[-1] != EOS
        assert hypothesis.finish_reason is (FinishReason.LENGTH if is_cut else FinishReason.EOS)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab_size=st.integers(2, 30),
    width=st.integers(1, 6),
    max_tokens=st.integers(1, 8),
    penalty=penalties,
    early_stopping=st.sampled_from([True, False, "never"]),
)
def test_a_beam_needs_no_more_candidates_than_it_is_given(
    seed: int, vocab_size: int, width: int, max_tokens: int, penalty: float, early_stopping: EarlyStopping
) -> None:
    model = Model(seed, vocab_size)
    some = search(model, BeamSearch(width, max_tokens, penalty, early_stopping), num_candidates(width, num_ends=1))
    assert some == search(model, BeamSearch(width, max_tokens, penalty, early_stopping))
    assert 1 <= len(some) <= width
    assert [hypothesis.score for hypothesis in some] == sorted((hypothesis.score for hypothesis in some), reverse=True)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), max_tokens=st.integers(1, 12))
def test_one_beam_follows_the_likeliest_token(seed: int, max_tokens: int) -> None:
    """And ends where that ends a reply: a shorter one, met on the way, would not be among the first."""
    model = Model(seed, 6)
    greedy: list[int] = []
    while len(greedy) < max_tokens and EOS not in greedy:
        greedy.append(model.candidates(greedy)[0].token_id)
    (found,) = search(model, BeamSearch(1, max_tokens, early_stopping=True))
    assert found.token_ids == tuple(greedy)


def test_only_ends_among_the_first_are_hypotheses_and_only_what_goes_on_survives() -> None:
    made = BeamSearch(2, 9)
    tokens = [Candidate(5, -0.1), Candidate(6, -0.2), Candidate(EOS, -0.3), Candidate(7, -0.4)]
    first = made.advance([tokens], [()], end_of)
    assert [(survivor.token_id, survivor.logprob) for survivor in first] == [(5, -0.1), (6, -0.2)]
    assert made.hypotheses == []
    second = made.advance([[Candidate(EOS, -0.1), Candidate(8, -9.0)], [Candidate(4, -0.5)]], [(5,), (6,)], end_of)
    assert [(survivor.parent, survivor.token_id) for survivor in second] == [(1, 4), (0, 8)]
    (hypothesis,) = made.hypotheses
    assert hypothesis.token_ids == (5, EOS)
    assert hypothesis.logprob == pytest.approx(-0.2)
    assert hypothesis.score == pytest.approx(-0.1)


@pytest.mark.parametrize(("early_stopping", "is_done"), [(True, True), (False, False), ("never", False)])
def test_when_there_are_enough_hypotheses_the_search_ends_as_it_is_told(
    early_stopping: EarlyStopping, is_done: bool
) -> None:
    """One beam, which is better than the hypothesis at its own length, and might be better still at the end."""
    made = BeamSearch(1, 9, early_stopping=early_stopping)
    made.hypotheses = [Hypothesis((EOS,), -5.0, -5.0, FinishReason.EOS)]
    made.advance([[Candidate(5, -1.0)]], [()], end_of)
    assert made.is_done is is_done


@pytest.mark.parametrize(("early_stopping", "penalty", "is_done"), [(False, 1.0, True), ("never", 1.0, False)])
def test_never_waits_for_a_beam_that_would_win_if_it_lost_nothing_more(
    early_stopping: EarlyStopping, penalty: float, is_done: bool
) -> None:
    made = BeamSearch(1, 9, penalty, early_stopping)
    made.hypotheses = [Hypothesis((EOS,), -0.5, -0.5, FinishReason.EOS)]
    made.advance([[Candidate(5, -1.0)]], [()], end_of)
    assert made.is_done is is_done


def test_tokens_that_can_not_come_are_no_candidates() -> None:
    made = BeamSearch(3, 4)
    (survivor,) = made.advance([[Candidate(3, -0.0), Candidate(4, -math.inf), Candidate(5, math.nan)]], [()], end_of)
    assert survivor.token_id == 3
    assert made.advance([[Candidate(4, -math.inf)]], [(3,)], end_of) == []
    assert made.is_done


@pytest.mark.parametrize(
    ("num_prompt", "num_tokens", "width", "expected"),
    [(8, 8, 4, 2), (8, 9, 4, 2 + 4), (10, 12, 4, 2 + 4), (10, 13, 4, 2 + 2 * 4), (1, 1, 16, 16), (7, 40, 1, 10)],
)
def test_the_most_blocks_are_the_prompts_full_ones_once_and_the_rest_for_each_beam(
    num_prompt: int, num_tokens: int, width: int, expected: int
) -> None:
    assert num_blocks_at_most(num_prompt, num_tokens, width, block_size=4) == expected
