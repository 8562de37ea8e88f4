"""Turns token ids into text as they come, so that the pieces join to exactly what decoding them all at once gives.

A piece of text is given out as soon as no later token can change it. What that takes depends on how the tokenizer
decodes:

- Byte-level: each token is some bytes. The bytes run through one incremental UTF-8 decoder, which keeps back a
  character that isn't whole yet.
- All others decode token by token, but for two things: what a token gives may depend on whether it is the first
  (a leading space is dropped), and a run of byte tokens is one text, valid or not as a whole. So each new piece is
  decoded behind the token before it, and a run of byte tokens is kept back until it ends.

Either way a token is decoded a fixed number of times, so the cost is linear.
"""

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from model.tokenizer import Tokenizer

_BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")
NUM_CONTEXT_TOKENS: Final = 64
"""Prompt tokens that are looked at: a character has four at most, but a run of byte tokens is judged as a whole."""


class DecodeStream(Protocol):
    """Decodes one sequence of ids, special tokens left out."""

    def push(self, token_id: int) -> str:
        """The text that this token settles; empty while a character is incomplete."""

    def finish(self) -> str:
        """The text of what is still kept back: incomplete bytes become U+FFFD."""

    def end_context(self) -> None:
        """What was pushed so far was a prompt; what it keeps back is shown only as far as later tokens change it."""


def decode_stream(tokenizer: Tokenizer, context: Sequence[int] = ()) -> DecodeStream:
    """A stream for what follows `context`, the last tokens of a prompt: its own text is not given out.

    A character that the context leaves incomplete is given out whole, once the tokens that follow complete it; where
    they don't, its U+FFFD is the context's. Without a context the text is what decoding the pushed ids alone gives.
    """
    stream = ByteLevelStream(tokenizer) if tokenizer.is_byte_level else TokenwiseStream(tokenizer)
    for token_id in context[-NUM_CONTEXT_TOKENS:]:
        stream.push(token_id)
    stream.end_context()
    return stream


class ByteLevelStream:
    """For tokenizers whose tokens are bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = _utf8_decoder()
        self._is_in_context_character = False

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        if self._tokenizer.is_special(token_id):
            return ""
        piece = self._tokenizer.piece(token_id)
        return "" if piece is None else self._beyond_context(self._utf8.decode(piece_bytes(piece)))

    def finish(self) -> str:
        """U+FFFD if a character is incomplete."""
        return self._beyond_context(self._utf8.decode(b"", final=True))

    def end_context(self) -> None:
        """See DecodeStream."""
        self._is_in_context_character = self._utf8.getstate()[0] != b""

    def _beyond_context(self, text: str) -> str:
        if text and self._is_in_context_character:
            self._is_in_context_character = False
            return text.removeprefix("\ufffd")
        return text


class TokenwiseStream:
    """For tokenizers that decode token by token: SentencePiece with byte fallback, and the like."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._settled: list[int] = []  # the last token that was given out, if any: the next is decoded behind it
        self._kept: list[int] = []  # a run of byte tokens
        self._context_bytes = b""  # those of the run that belong to the context

    def push(self, token_id: int) -> str:
        """The text of this token, and of the run of byte tokens that it ends."""
        piece = self._tokenizer.piece(token_id)
        if piece is None or self._tokenizer.is_special(token_id):
            return ""
        self._kept.append(token_id)
        return "" if _BYTE_TOKEN.fullmatch(piece) else self.finish()

    def finish(self) -> str:
        """The text of the run of byte tokens; U+FFFD for each byte where the run isn't UTF-8."""
        before = self._tokenizer.decode(self._settled)
        text = self._tokenizer.decode(self._settled + self._kept)[len(before) :]
        num_shown = self._num_context_chars()
        self._settled = self._kept[-1:] or self._settled
        self._kept, self._context_bytes = [], b""
        return text[num_shown:]

    def end_context(self) -> None:
        """See DecodeStream."""
        self._context_bytes = self._run_bytes()

    def _num_context_chars(self) -> int:
        """How many characters of the run's text are the context's: one a byte where the run isn't UTF-8."""
        try:
            self._run_bytes().decode()
        except UnicodeDecodeError:
            return len(self._context_bytes)
        return len(_utf8_decoder().decode(self._context_bytes))

    def _run_bytes(self) -> bytes:
        pieces = [self._tokenizer.piece(token_id) or "" for token_id in self._kept]
        return bytes(int(piece[3:5], 16) for piece in pieces if _BYTE_TOKEN.fullmatch(piece))


def _utf8_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")(errors="replace")


def piece_bytes(piece: str) -> bytes:
    """The bytes of a byte-level token; of a token that was added as plain text, its UTF-8."""
    try:
        return bytes([_BYTE_OF_LETTER[letter] for letter in piece])
    except KeyError:
        return piece.encode()


def _letters(first: str, last: str) -> Iterable[int]:
    return range(ord(first), ord(last) + 1)


def _byte_of_letter() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 and up, in order."""
    printable = {*_letters("!", "~"), *_letters("¡", "¬"), *_letters("®", "ÿ")}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_LETTER: Final = _byte_of_letter()
