"""Text deltas: whole characters, exact, and never a part of a stop string."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.decode_stream import piece_bytes
from model.tokenizer import Tokenizer
from tests.unit.text.tokenizers import KINDS, tokenizer_of
from worker.text import TextStream

TEXTS = st.text(max_size=40) | st.text(st.sampled_from("the mil2é日👩\u200d👧\ufffd "), max_size=40)


def _cuts(data: st.DataObject, ids: Sequence[int]) -> list[Sequence[int]]:
    """The ids in groups of any size, empty ones included."""
    places = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    return [ids[start:end] for start, end in zip([0, *places], [*places, len(ids)], strict=True)]


def _streamed(stream: TextStream, groups: Sequence[Sequence[int]]) -> tuple[str, int]:
    """(all text, number of tokens kept)."""
    text, kept = "", 0
    for group in groups:
        delta = stream.push(group)
        text += delta.text
        kept += delta.num_tokens_kept
        if delta.finished_by_stop:
            break
    return text + stream.finish(), kept


def _first_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """(start, end) of the stop string that is complete first; of two that end together, the longer."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return min(ends)[::-1] if ends else None


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_deltas_of_any_ids_join_to_what_decoding_them_all_gives(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=30))
    text, kept = _streamed(TextStream(tokenizer), _cuts(data, ids))
    assert text == tokenizer.decode(ids)
    assert kept == len(ids)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "sentencepiece without prefix"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_deltas_of_any_text_join_to_it_and_never_show_half_a_character(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    text = data.draw(TEXTS)
    stream = TextStream(tokenizer)
    deltas = [stream.push([token_id]).text for token_id in tokenizer.encode(text, add_special_tokens=False)]
    assert "".join(deltas) + stream.finish() == text
    assert "".join(deltas).count("\ufffd") <= text.count("\ufffd")


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_random_bytes_become_what_decoding_them_all_gives(demo_bytes: list[int], data: st.DataObject) -> None:
    tokenizer = tokenizer_of("byte-level")
    raw = data.draw(st.binary(max_size=24) | st.lists(st.sampled_from(demo_bytes), max_size=24).map(bytes))
    of_byte = {piece_bytes(str(tokenizer.piece(token_id)))[0]: token_id for token_id in range(3, 259)}
    ids = [of_byte[byte] for byte in raw]
    text, _ = _streamed(TextStream(tokenizer), _cuts(data, ids))
    assert text == tokenizer.decode(ids) == raw.decode(errors="replace")


@pytest.fixture(scope="module")
def demo_bytes() -> list[int]:
    """Bytes on which decoders of UTF-8 are apt to differ: overlong forms, surrogates, ends of the range."""
    return [0x41, 0x80, 0x9F, 0xA0, 0xBF, 0xC0, 0xC2, 0xE0, 0xED, 0xEF, 0xF0, 0xF4, 0xF5, 0xFF, 0x90, 0x8F]


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_text_ends_at_the_first_stop_string_however_the_ids_are_grouped(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    text = data.draw(st.text(st.sampled_from("aabé日 "), max_size=30))
    stops = data.draw(st.lists(st.text(st.sampled_from("aabé日 "), min_size=1, max_size=4), max_size=3))
    include_stop = data.draw(st.booleans())
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = TextStream(tokenizer, stops, include_stop=include_stop)
    got, kept = _streamed(stream, _cuts(data, ids))
    match = _first_stop(text, stops)
    assert stream.finished_by_stop == (match is not None)
    assert got == (text if match is None else text[: match[1] if include_stop else match[0]])
    assert kept <= len(ids)
    if match is not None and kind == "byte-level":
        assert tokenizer.decode(ids[:kept]).startswith(text[: match[1]])
        assert not tokenizer.decode(ids[: kept - 1]).startswith(text[: match[1]])


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_what_is_kept_back_is_the_start_of_a_stop_string_and_no_more(data: st.DataObject) -> None:
    tokenizer = tokenizer_of("byte-level")
    text = data.draw(st.text(st.sampled_from("aab"), max_size=20))
    stops = data.draw(st.lists(st.text(st.sampled_from("aabc"), min_size=1, max_size=5), min_size=1, max_size=3))
    stream = TextStream(tokenizer, stops)
    sent, known = "", ""
    for token_id in tokenizer.encode(text):
        known += tokenizer.decode([token_id])
        delta = stream.push([token_id])
        sent += delta.text
        if delta.finished_by_stop:
            return
        prefixes = [stop[:length] for stop in stops for length in range(1, len(stop))]
        longest = max((len(prefix) for prefix in prefixes if known.endswith(prefix)), default=0)
        assert sent == known[: len(known) - longest]


def test_a_stop_string_in_four_pieces_leaks_nothing() -> None:
    """DEF|G|HI|J, as one server sent it to its readers piece by piece."""
    tokenizer = tokenizer_of("byte-level")
    stream = TextStream(tokenizer, ["DEFGHIJ"])
    deltas = [stream.push(tokenizer.encode(piece)) for piece in ("ABC", "DEF", "G", "HI", "JK")]
    assert [delta.text for delta in deltas] == ["ABC", "", "", "", ""]
    assert [delta.finished_by_stop for delta in deltas] == [False, False, False, False, True]
    assert deltas[-1].num_tokens_kept == 1
    assert stream.finish() == ""
    assert stream.push(tokenizer.encode("more")).num_tokens_kept == 0


def test_the_start_of_a_stop_string_that_never_came_is_flushed_at_the_end() -> None:
    tokenizer = tokenizer_of("byte-level")
    stream = TextStream(tokenizer, ["\n\nUser:"])
    assert stream.push(tokenizer.encode("Hello\n\nUs")).text == "Hello"
    assert stream.finish() == "\n\nUs"
    assert not stream.finished_by_stop


def test_of_two_stop_strings_that_end_together_the_longer_is_cut() -> None:
    tokenizer = tokenizer_of("byte-level")
    assert _streamed(TextStream(tokenizer, ["c", "abc"]), [tokenizer.encode("xabcd")])[0] == "x"
    assert _streamed(TextStream(tokenizer, ["abcd", "bc"]), [tokenizer.encode("xabcd")])[0] == "xa"


def test_a_stop_string_in_the_prompt_or_across_its_end_does_not_fire() -> None:
    tokenizer = tokenizer_of("byte-level")
    stream = TextStream(tokenizer, ["STOP", "b"], prompt_tail=tokenizer.encode("a STOP b ST"))
    delta = stream.push(tokenizer.encode("OP and on"))
    assert (delta.text, delta.finished_by_stop) == ("OP and on", False)


def test_a_character_in_three_tokens_comes_whole(demo_model_path: Path) -> None:
    """客单价 and ď came as U+FFFD from servers that decode token by token."""
    tokenizer = Tokenizer.from_checkpoint(demo_model_path)
    for text in ("客单价", "ď", "👩‍👩‍👧‍👦", "🏳️‍🌈!"):
        ids = tokenizer.encode(text)
        assert len(ids) > 1
        stream = TextStream(tokenizer)
        deltas = [stream.push([token_id]).text for token_id in ids]
        assert "".join(deltas) == text
        assert "\ufffd" not in "".join(deltas)
        assert "" in deltas


def test_incomplete_bytes_at_the_end_are_flushed_as_one_replacement_character() -> None:
    tokenizer = tokenizer_of("byte-level")
    ids = tokenizer.encode("a日")[:-1]
    stream = TextStream(tokenizer)
    assert stream.push(ids).text == "a"
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_a_prompt_that_ends_inside_a_character_leaks_nothing_of_itself(kind: str) -> None:
    """The prompt ends in two of the three bytes of 日; the reply brings the third, or doesn't."""
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode("A long prompt 日", add_special_tokens=False)
    prompt, rest = ids[:-1], ids[-1:]
    exclamation = tokenizer.encode("日er", add_special_tokens=False)[-1:]
    for reply, expected in [(rest, "日"), (rest + exclamation, "日er"), (exclamation, "er"), ([], ""), ([1], "")]:
        assert _streamed(TextStream(tokenizer, prompt_tail=prompt), [reply])[0] == expected


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_behind_a_prompt_the_text_is_what_the_whole_has_more_than_the_prompt(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    prompt = tokenizer.encode(data.draw(TEXTS), add_special_tokens=False)
    ids = tokenizer.encode(data.draw(TEXTS), add_special_tokens=False)
    text, _ = _streamed(TextStream(tokenizer, prompt_tail=prompt), _cuts(data, ids))
    assert tokenizer.decode(prompt) + text == tokenizer.decode(prompt + ids)


def test_no_token_is_decoded_more_than_a_few_times() -> None:
    """The longest runs that must be kept back: bytes that never become a character."""
    for kind in ("byte-level", "sentencepiece"):
        tokenizer = tokenizer_of(kind)
        counts = _CountingTokenizer(tokenizer)
        ids = [random.Random(7).choice(range(131, 258)) for _ in range(4000)] + tokenizer.encode(" end")
        stream = TextStream(counts)  # type: ignore[arg-type]  # it passes every call on
        text = "".join(stream.push([token_id]).text for token_id in ids) + stream.finish()
        assert text == tokenizer.decode(ids)
        assert counts.num_decoded < 4 * len(ids)


class _CountingTokenizer:
    """A tokenizer that counts the ids it is asked to decode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.num_decoded = 0
        self.is_byte_level = tokenizer.is_byte_level
        self.is_special = tokenizer.is_special

    def piece(self, token_id: int) -> str | None:
        self.num_decoded += 1
        return self._tokenizer.piece(token_id)

    def decode(self, ids: Sequence[int]) -> str:
        self.num_decoded += len(ids)
        return self._tokenizer.decode(ids)
