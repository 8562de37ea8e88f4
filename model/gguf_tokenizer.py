"""Builds the tokenizer that a GGUF file describes.

Two families are rebuilt exactly. `gpt2`: byte-level BPE with the merges of the file; `tokenizer.ggml.pre` names how
text is cut before. `llama`: SentencePiece BPE, whose merges follow from the scores of its pieces. Anything else is
refused by name: a tokenizer that is nearly right gives a model text that it was never trained on.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from model.errors import CorruptCheckpointError, UnsupportedModelError
from model.tokenizer_parts import TokenizerParts

PreTokenizer = pre_tokenizers.PreTokenizer

_NORMAL: Final = 1
_UNKNOWN: Final = 2
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_BYTE: Final = 6

# Tokens that end a turn. Files that were converted early name only the end of a document as their end of sequence.
_TURN_ENDS: Final = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>")

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3_PATTERN: Final = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2_PATTERN: Final = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"


def parts_from_gguf(metadata: Mapping[str, Any], path: Path) -> TokenizerParts:
    """The tokenizer of an open GGUF file. Raises CorruptCheckpointError or UnsupportedModelError."""
    reader = _Reader(metadata, path)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        backend, adds_bos = _byte_level(reader)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(reader), True
    else:
        raise UnsupportedModelError(
            f"{path.name} has a tokenizer of type {kind!r}: gpt2 and llama are read; use the safetensors checkpoint"
        )
    _add_special_tokens(backend, reader)
    bos = reader.token_id("bos")
    template = metadata.get("tokenizer.chat_template")
    return TokenizerParts(
        backend=backend,
        bos_token_id=bos,
        eos_token_ids=gguf_eos_ids(metadata),
        adds_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)) and bos is not None,
        chat_template=template if isinstance(template, str) else None,
        template_tokens=reader.template_tokens(),
    )


def gguf_eos_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Every token that ends a generation: of the sequence, of a turn, of a message."""
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ids = [token_id for token_id in named if isinstance(token_id, int)]
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, list):
        ends = [tokens.index(text) for text in _TURN_ENDS if text in tokens]
        ids += [token_id for token_id in ends if types[token_id : token_id + 1] == [_CONTROL]]
    return tuple(dict.fromkeys(ids))


class _Reader:
    """The vocabulary in the metadata, checked."""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self.metadata = metadata
        self.path = path
        self.tokens: list[str] = self.array("tokens", str)
        if not self.tokens:
            raise CorruptCheckpointError(f"{path} has no vocabulary (tokenizer.ggml.tokens): convert it again")
        self.types: list[int] = self.array("token_type", int) or [_NORMAL] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            self.fail(f"{len(self.tokens)} tokens have {len(self.types)} types")
        self.vocab = {token: token_id for token_id, token in enumerate(self.tokens)}
        if len(self.vocab) != len(self.tokens):
            self.fail("a token comes twice in its vocabulary")

    def fail(self, what: str) -> NoReturn:
        raise CorruptCheckpointError(f"{self.path} has a damaged tokenizer: {what}; convert it again")

    def array(self, name: str, kind: type) -> list[Any]:
        values = self.metadata.get(f"tokenizer.ggml.{name}", [])
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            self.fail(f"tokenizer.ggml.{name} isn't an array of {kind.__name__}")
        if kind is str and not "".join(values).isascii():
            for index, value in enumerate(values):
                # What wasn't UTF-8 was read as lone surrogates.
                if any("\udc80" <= char <= "\udcff" for char in value):
                    self.fail(f"element {index} of tokenizer.ggml.{name} isn't UTF-8")
        return list(values)

    def token_id(self, name: str) -> int | None:
        """The id of the special token `name`, where the file names one."""
        key = f"tokenizer.ggml.{name}_token_id"
        token_id = self.metadata.get(key)
        if token_id is None:
            return None
        if not isinstance(token_id, int) or not 0 <= token_id < len(self.tokens):
            self.fail(f"{key} is {token_id!r}, its vocabulary has {len(self.tokens)} tokens")
        return int(token_id)

    def template_tokens(self) -> dict[str, str]:
        ids = {name: self.token_id(name) for name in ("bos", "eos", "unknown", "padding")}
        names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
        return {names[name]: self.tokens[token_id] for name, token_id in ids.items() if token_id is not None}


def _byte_level(reader: _Reader) -> tuple[tokenizers.Tokenizer, bool]:
    """(tokenizer, whether this family puts BOS before a text unless the file says otherwise)."""
    pre = reader.metadata.get("tokenizer.ggml.pre")
    steps = _pre_tokenizers().get(pre) if isinstance(pre, str) else None
    if steps is None:
        known = ", ".join(_pre_tokenizers())
        raise UnsupportedModelError(
            f"{reader.path.name} cuts text by the rules {pre!r} (tokenizer.ggml.pre): known are {known}; "
            "use the safetensors checkpoint, whose tokenizer.json holds its rules"
        )
    is_llama3 = pre in ("llama-bpe", "llama3", "llama-v3")
    backend = tokenizers.Tokenizer(_bpe(reader, _merges(reader), ignore_merges=is_llama3))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre in ("qwen2", "deepseek-r1-qwen"):
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, is_llama3


def _pre_tokenizers() -> dict[str, list[PreTokenizer]]:
    """By `tokenizer.ggml.pre`: the steps that cut a text into the words that are merged, bytes as letters."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = [pre_tokenizers.Digits(individual_digits=True), gpt2]

    def pattern(regex: str) -> list[PreTokenizer]:
        split = pre_tokenizers.Split(tokenizers.Regex(regex), behavior="isolated")
        return [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]

    llama3, qwen2 = pattern(_LLAMA3_PATTERN), pattern(_QWEN2_PATTERN)
    return {
        "gpt-2": [gpt2],
        "smollm": digits,
        "starcoder": digits,
        "llama-bpe": llama3,
        "llama3": llama3,
        "llama-v3": llama3,
        "qwen2": qwen2,
        "deepseek-r1-qwen": qwen2,
    }


def _merges(reader: _Reader) -> list[tuple[str, str]]:
    merges = [tuple(merge.split(" ", 1)) for merge in reader.array("merges", str)]
    if not merges or not all(len(merge) == 2 for merge in merges):
        reader.fail("tokenizer.ggml.merges isn't a list of pairs")
    return [(merge[0], merge[1]) for merge in merges]


def _bpe(reader: _Reader, merges: Sequence[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=reader.vocab, merges=list(merges), **options)
    except Exception as error:  # the library raises bare Exception
        raise CorruptCheckpointError(f"{reader.path} has a damaged tokenizer: {error}; convert it again") from error


def _sentencepiece(reader: _Reader) -> tokenizers.Tokenizer:
    scores = reader.array("scores", float)
    if len(scores) != len(reader.tokens):
        reader.fail(f"{len(reader.tokens)} tokens have {len(scores)} scores")
    if reader.metadata.get("tokenizer.ggml.remove_extra_whitespaces"):
        raise UnsupportedModelError(
            f"{reader.path.name} has a tokenizer that drops white space: use the safetensors checkpoint"
        )
    unknown = reader.token_id("unknown")
    backend = tokenizers.Tokenizer(
        _bpe(
            reader,
            _scored_merges(reader, scores),
            byte_fallback=_BYTE in reader.types,
            unk_token=None if unknown is None else reader.tokens[unknown],
            fuse_unk=True,
        )
    )
    adds_space = reader.metadata.get("tokenizer.ggml.add_space_prefix", True)
    prepend, strip = ([normalizers.Prepend("▁")], [decoders.Strip(" ", 1, 0)]) if adds_space else ([], [])
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _scored_merges(reader: _Reader, scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose piece scores highest: as a list of merges, best piece first."""
    mergeable = {
        token: scores[token_id]
        for token, token_id in reader.vocab.items()
        if reader.types[token_id] in (_NORMAL, _USER_DEFINED)
    }
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, score in mergeable.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in mergeable and right in mergeable:
                merges.append((-score, reader.vocab[left], reader.vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def _add_special_tokens(backend: tokenizers.Tokenizer, reader: _Reader) -> None:
    """Control and user-defined tokens are found in a text as they stand, before anything else is done to it."""
    special, plain = [], []
    for token, kind in zip(reader.tokens, reader.types, strict=True):
        if kind == _CONTROL or (kind == _UNKNOWN and token):
            special.append(tokenizers.AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED and token:
            plain.append(tokenizers.AddedToken(token, special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)
