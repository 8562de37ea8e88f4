"""A reply that goes on after an earlier attempt: what is still owed is exactly what that one did not tell."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.output import FinishReason, SequenceOutput
from scheduler.sampling_params import SamplingParams
from tests.unit.text.tokenizers import tokenizer_of
from worker.generation import Generation

PROMPT = (65, 66)
NO_EOS: frozenset[int] = frozenset()


def _said(generation: Generation) -> str:
    return generation.take_text() + generation.take_tail()


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_resumed_reply_owes_exactly_what_was_not_told(kind: str, data: st.DataObject) -> None:
    """Events carry ids, and text that may lag behind them; the last may carry the tail, too, and outlive the end."""
    tokenizer = tokenizer_of(kind)
    text = data.draw(st.text(st.sampled_from("aab日é "), max_size=30))
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids = ids[: data.draw(st.integers(1, max(1, len(ids))))] or [65]  # may end inside a character
    stops = tuple(data.draw(st.lists(st.text(st.sampled_from("aab日"), min_size=1, max_size=3), max_size=2)))
    sampling = SamplingParams(temperature=0, max_tokens=len(ids), stop=stops, ignore_eos=True)

    whole = Generation(sampling, tokenizer, PROMPT)
    whole.replay(ids, NO_EOS, len(ids))
    told = _said(whole)
    first = Generation(sampling, tokenizer, PROMPT)
    cut = data.draw(st.integers(0, len(whole.ids)))
    first.replay(whole.ids[:cut], NO_EOS, len(ids))
    ready = _said(first) if first.is_finished else first.take_text()
    sent = ready[: data.draw(st.sampled_from([len(ready), data.draw(st.integers(0, len(ready)))]))]

    second = Generation(sampling, tokenizer, PROMPT)
    second.replay(whole.ids[:cut], NO_EOS, len(ids))
    second.skip_text(len(sent))
    owed = second.take_text()
    for count, token_id in enumerate(ids[cut:], start=cut + 1):
        reason = FinishReason.LENGTH if count == len(ids) else None
        second.absorb(SequenceOutput("a", (token_id,), reason))
    assert sent + owed + _said(second) == told
    assert (second.ids, second.finish_reason) == (whole.ids, whole.finish_reason)
