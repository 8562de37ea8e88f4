"""The kinds of tokenizer that text is streamed from: one decodes bytes, one pieces with byte fallback, one words."""

from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from model.gguf_tokenizer import parts_from_gguf
from model.tokenizer import Tokenizer
from model.tokenizer_parts import TokenizerParts
from tests.unit.model.gguf_files import tokenizer_metadata
from tests.unit.text.sentencepiece_files import sentencepiece_metadata

KINDS = ["byte-level", "sentencepiece", "sentencepiece without prefix", "metaspace", "wordpiece", "no decoder"]


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    """A small tokenizer of this kind."""
    if kind == "byte-level":
        return Tokenizer(parts_from_gguf(tokenizer_metadata(), Path("m.gguf")))
    if kind.startswith("sentencepiece"):
        changes = {"tokenizer.ggml.add_space_prefix": kind == "sentencepiece"}
        return Tokenizer(parts_from_gguf(sentencepiece_metadata() | changes, Path("m.gguf")))
    words = [
        "[UNK]",
        "<s>",
        "▁the",
        "▁mill",
        "▁",
        "er",
        "##er",
        "the",
        "mill",
        "n't",
        ".",
        ",",
        "'",
        "日本",
        "é",
        "[x]",
    ]
    backend = tokenizers.Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if kind == "metaspace":
        backend.decoder = decoders.Metaspace()
    elif kind == "wordpiece":
        backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["<s>"])
    return Tokenizer(TokenizerParts(backend))
