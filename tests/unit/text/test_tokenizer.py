"""Text to ids and back."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex  # type: ignore[import-untyped]
from hypothesis import example, given, settings
from hypothesis import strategies as st

from model.errors import CorruptCheckpointError, TokenizerError, UnsupportedModelError
from model.gguf import GGUFFile
from model.gguf_tokenizer import parts_from_gguf
from model.tokenizer import Tokenizer
from tests.unit.model.gguf_files import BYTE_LETTERS, tokenizer_metadata
from tests.unit.text.sentencepiece_files import sentencepiece_metadata, textbook_encode

ORIGIN = Path("m.gguf")
HOSTILE = [
    "",
    " ",
    "\n\n\t ",
    "2024",
    "x²½Ⅷ٣४",
    "don't WE'LL they'Re",
    "e\u0301 é",
    "👩‍👩‍👧‍👦🏳️‍🌈",
    "\u202eabc\u202c\u0000\ufffd\ufeff",
    "客单价 ď",
    "\U0010ffff\U00040000\x04",
    "a" * 3000,
    "<|im_start",
    "  leading and trailing  ",
    "\r\n\r\n",
    "ﷺ\u0bcd",
]


def _gguf(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(parts_from_gguf(metadata, ORIGIN))


@pytest.fixture(scope="module")
def demo(demo_model_path: Path) -> Tokenizer:
    return Tokenizer.from_checkpoint(demo_model_path)


class TextbookBpe:
    """Byte-level BPE by its definition: cut, then apply the merges in the order of their rank."""

    def __init__(self, metadata: dict[str, Any], pattern: str) -> None:
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        merges: list[str] = metadata["tokenizer.ggml.merges"]
        self.ids = {token: index for index, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        order = printable + [byte for byte in range(256) if byte not in printable]
        self.letters = dict(zip(order, BYTE_LETTERS, strict=True))
        self.pattern = regex.compile(pattern)

    def encode(self, text: str) -> list[int]:
        return [token_id for word in self.pattern.findall(text) for token_id in self._word(word)]

    def _word(self, word: str) -> list[int]:
        # The demo vocabulary lacks 21 of the letters; they fall away before anything is merged.
        symbols = [letter for byte in word.encode() if (letter := self.letters[byte]) in self.ids]
        while len(symbols) > 1:
            pairs = list(pairwise(symbols))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, 1 << 30))
            if best not in self.ranks:
                break
            merged: list[str] = []
            for symbol in symbols:
                if merged and (merged[-1], symbol) == best:
                    merged[-1] += symbol
                else:
                    merged.append(symbol)
            symbols = merged
        return [self.ids[symbol] for symbol in symbols]


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _smollm_words(text: str) -> list[str]:
    """Each digit alone first, and what lies between them by GPT-2's pattern, each stretch on its own."""
    words: list[str] = []
    for stretch in regex.split(r"(\p{N})", text):
        words += [stretch] if regex.fullmatch(r"\p{N}", stretch) else regex.findall(GPT2, stretch)
    return words


@pytest.fixture(scope="module")
def textbook(demo_model_path: Path) -> TextbookBpe:
    return TextbookBpe(GGUFFile(demo_model_path).metadata, GPT2)


texts = st.text() | st.text(st.sampled_from("ab 2½'\n st.Zé日👩\u200d")) | st.sampled_from(HOSTILE)


@settings(max_examples=300, deadline=None)
@given(text=texts)
@example(text="\x83\U0007d000")
def test_the_demo_tokenizer_encodes_as_the_definition_says(demo: Tokenizer, textbook: TextbookBpe, text: str) -> None:
    expected = [token_id for word in _smollm_words(text) for token_id in textbook._word(word)]
    assert demo.encode(text) == expected


@settings(max_examples=300, deadline=None)
@given(text=texts)
def test_any_text_comes_back_from_its_ids(demo: Tokenizer, textbook: TextbookBpe, text: str) -> None:
    """But for a few control characters and unassigned planes, whose bytes the vocabulary lacks."""
    known = [char for char in text if all(textbook.letters[byte] in textbook.ids for byte in char.encode())]
    assert demo.decode(demo.encode("".join(known))) == "".join(known)


def test_each_digit_is_a_token(demo: Tokenizer) -> None:
    assert demo.encode("2024") == [34, 32, 34, 36]
    assert [demo.decode([token_id]) for token_id in demo.encode("In 2024")] == ["In", " ", "2", "0", "2", "4"]


def test_special_tokens_written_in_a_text_become_their_ids(demo: Tokenizer) -> None:
    assert demo.encode("<|im_start|>user<|im_end|>") == [1, 4093, 2]
    assert demo.decode([1, 4093, 2]) == "user"
    assert demo.decode([1, 4093, 2], skip_special_tokens=False) == "<|im_start|>user<|im_end|>"
    assert all(demo.is_special(token_id) for token_id in range(17))
    assert not demo.is_special(17)


def test_the_demo_tokenizer_knows_its_size_and_its_ends(demo: Tokenizer) -> None:
    assert (demo.vocab_size, demo.bos_token_id, demo.eos_token_ids) == (49152, 1, (2,))
    assert not demo.adds_bos
    assert demo.encode("") == []


def test_what_can_not_be_translated_is_a_named_error(demo: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="lone surrogate at character 1"):
        demo.encode("a\ud800")
    for ids in ([-1], [1 << 40]):
        with pytest.raises(TokenizerError, match="whole numbers from 0"):
            demo.decode(ids)
    assert demo.decode([49152, 34]) == "2"


TEXT_FOR_PATTERNS = st.text(st.sampled_from("ab the 20244½'sSlL\r\n\t .,!é日Ⅷ"), max_size=40)
LLAMA3 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    ("pre", "pattern"),
    [("gpt-2", GPT2), ("llama-bpe", LLAMA3), ("qwen2", LLAMA3.replace("{1,3}", ""))],
    ids=["gpt-2", "llama-bpe", "qwen2"],
)
@settings(max_examples=200, deadline=None)
@given(text=TEXT_FOR_PATTERNS)
def test_each_way_of_cutting_text_follows_its_published_pattern(pre: str, pattern: str, text: str) -> None:
    metadata = tokenizer_metadata(pre)
    tokenizer = _gguf(metadata)
    assert tokenizer.encode(text, add_special_tokens=False) == TextbookBpe(metadata, pattern).encode(text)


def test_llama_3_puts_bos_before_a_text_and_others_do_when_the_file_says_so() -> None:
    assert _gguf(tokenizer_metadata("llama-bpe")).encode("")[:1] == [1]
    assert _gguf(tokenizer_metadata("gpt-2")).encode("") == []
    asked = _gguf(tokenizer_metadata("gpt-2") | {"tokenizer.ggml.add_bos_token": True})
    assert asked.encode("") == [1]
    assert asked.encode("", add_special_tokens=False) == []


def test_a_turn_s_end_ends_a_generation_even_where_the_file_names_another() -> None:
    assert _gguf(tokenizer_metadata() | {"tokenizer.ggml.eos_token_id": 0}).eos_token_ids == (0, 2)
    assert _gguf(tokenizer_metadata() | {"tokenizer.ggml.eot_token_id": 1}).eos_token_ids == (2, 1)


def test_user_defined_tokens_are_single_ids_whose_text_is_shown() -> None:
    metadata = tokenizer_metadata()
    metadata["tokenizer.ggml.token_type"][-1] = 4
    metadata["tokenizer.ggml.tokens"][-1] = "<tool call>"
    metadata["tokenizer.ggml.merges"] = metadata["tokenizer.ggml.merges"][:-1]
    tokenizer = _gguf(metadata)
    ids = tokenizer.encode("a<tool call>b")
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "a<tool call>b"


SENTENCEPIECE = sentencepiece_metadata()


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(st.sampled_from("ab l the"), max_size=40)
    | st.lists(st.sampled_from(["the", "mill", "er", " ", "  ", "é", "日", "a", "b", "s"])).map("".join)
)
def test_sentencepiece_encodes_as_the_definition_says(text: str) -> None:
    tokenizer = _gguf(SENTENCEPIECE)
    assert tokenizer.encode(text) == [1, *textbook_encode(text, SENTENCEPIECE)]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "type 'bert': gpt2 and llama are read"),
        ({"model": None}, "type None"),
        ({"pre": "viking"}, "rules 'viking'.*known are gpt-2, smollm"),
        ({"pre": "default"}, "rules 'default'"),
        ({"pre": None}, "rules None"),
    ],
)
def test_a_tokenizer_that_can_not_be_rebuilt_exactly_is_refused(changes: dict[str, Any], message: str) -> None:
    metadata = tokenizer_metadata() | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    with pytest.raises(UnsupportedModelError, match=message):
        _gguf(metadata)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": []}, "has no vocabulary"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "comes twice"),
        ({"token_type": [1]}, "tokens have 1 types"),
        ({"merges": []}, "isn't a list of pairs"),
        ({"merges": ["a"]}, "isn't a list of pairs"),
        ({"merges": ["zz y"]}, "damaged tokenizer"),
        ({"tokens": ["a", "\udcff"], "token_type": [1, 1]}, "element 1 of tokenizer.ggml.tokens isn't UTF-8"),
        ({"bos_token_id": 1 << 20}, "bos_token_id is 1048576"),
    ],
)
def test_a_damaged_vocabulary_is_named(changes: dict[str, Any], message: str) -> None:
    metadata = tokenizer_metadata() | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    with pytest.raises(CorruptCheckpointError, match=message):
        _gguf(metadata)


def _write_directory(path: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> Path:
    path.mkdir()
    tokenizer.backend.enable_truncation(4)
    tokenizer.backend.enable_padding(length=8)
    tokenizer.backend.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_a_directory_s_tokenizer_json_is_used_without_the_limits_it_was_saved_with(tmp_path: Path) -> None:
    built = _gguf(tokenizer_metadata())
    wanted = built.encode("the miller of 2024")
    config = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "chat_template": "{{ bos_token }}"}
    tokenizer = Tokenizer.from_checkpoint(_write_directory(tmp_path / "m", built, config))
    assert tokenizer.encode("the miller of 2024") == wanted
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2, 0))
    assert tokenizer.has_chat_template


def test_a_directory_without_a_usable_tokenizer_json_says_what_to_do(tmp_path: Path) -> None:
    path = _write_directory(tmp_path / "m", _gguf(tokenizer_metadata()), {})
    (path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(CorruptCheckpointError, match=r"tokenizer\.json is damaged"):
        Tokenizer.from_checkpoint(path)
    (path / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedModelError, match=r"no tokenizer\.json: write one with transformers"):
        Tokenizer.from_checkpoint(path)


def test_a_process_that_forks_after_encoding_is_not_warned(demo_model_path: Path) -> None:
    program = (
        "import os, sys; from model.tokenizer import Tokenizer; t = Tokenizer.from_checkpoint(sys.argv[1]);"
        "t.backend.encode_batch(['a b'] * 1000); pid = os.fork();"
        "t.backend.encode_batch(['a b'] * 1000); pid and os.waitpid(pid, 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(demo_model_path)], check=True, capture_output=True, text=True
    )
    assert done.stderr == ""
