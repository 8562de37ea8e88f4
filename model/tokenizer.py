"""Text to token ids and back, and the chat template: all from the checkpoint, without torch or transformers."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

# Set before the library starts threads: a pool of its own would fight the engine for the cores, and a process that
# forks afterwards would be warned about it.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import tokenizers

from model.chat_template import ChatTemplate
from model.checkpoint_files import CheckpointKind, checkpoint_kind
from model.dummy import dummy_config
from model.dummy_tokenizer import dummy_parts
from model.errors import ChatTemplateError, TokenizerError, UnsupportedModelError
from model.gguf import GGUFFile
from model.gguf_tokenizer import parts_from_gguf
from model.tokenizer_parts import TokenizerParts, parts_from_directory


class Tokenizer:
    """The tokenizer of a checkpoint. Read-only after construction, so threads may share it.

    is_byte_level: the letters of its tokens stand for bytes, as in GPT-2.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self.bos_token_id = parts.bos_token_id
        self.eos_token_ids = parts.eos_token_ids
        self.backend = parts.backend
        self.is_byte_level = _is_byte_level(parts.backend)
        self._parts = parts
        self._special_ids = frozenset(
            token_id for token_id, token in parts.backend.get_added_tokens_decoder().items() if token.special
        )

    @classmethod
    def from_checkpoint(cls, path: Path | str, load_format: str = "auto") -> "Tokenizer":
        """The tokenizer of a .gguf file or of a directory with tokenizer.json; dummy: if need be a stand-in.

        Raises ModelNotFoundError, CorruptCheckpointError, or UnsupportedModelError for a kind that can't be rebuilt
        exactly.
        """
        path = Path(path)
        if load_format == "dummy" and not (path / "tokenizer.json").is_file():
            return cls(dummy_parts(dummy_config(path).vocab_size))
        if checkpoint_kind(path) is CheckpointKind.DIRECTORY:
            return cls(parts_from_directory(path))
        return cls(parts_from_gguf(GGUFFile(path).metadata, path))

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id that this tokenizer knows. A model's output may be padded beyond it."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text. Special tokens that are written out in it become their ids.

        add_special_tokens: put before (and around) it what the checkpoint puts there, such as BOS. Raises
        TokenizerError for a text that isn't Unicode (lone surrogates).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"the text has a lone surrogate at character {error.start}: send valid Unicode"
            ) from error
        ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._parts.adds_bos and self.bos_token_id is not None:
            return [self.bos_token_id, *ids]
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of some ids; unknown ids are empty, bytes that are no UTF-8 become U+FFFD.

        Raises TokenizerError for a number that can't be an id.
        """
        try:
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise TokenizerError("token ids are whole numbers from 0: these aren't") from error

    def piece(self, token_id: int) -> str | None:
        """How the vocabulary writes an id; None for one that it doesn't know."""
        return self.backend.id_to_token(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether decoding leaves this id out."""
        return token_id in self._special_ids

    @cached_property
    def adds_bos(self) -> bool:
        """Whether `encode` puts BOS before every text."""
        return self.bos_token_id is not None and self.encode("")[:1] == [self.bos_token_id]

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint says how to write a conversation."""
        return self._parts.chat_template is not None

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt text of a conversation, up to where the assistant begins. Raises ChatTemplateError."""
        return self._template.render(messages)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt ids of a conversation, with exactly one BOS where this tokenizer puts one before a text.

        Templates differ in whether they write BOS themselves, so it is neither doubled nor left out. Raises
        ChatTemplateError and TokenizerError.
        """
        ids = self.encode(self.render_chat(messages), add_special_tokens=False)
        if self.adds_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            return [self.bos_token_id, *ids]
        return ids

    @cached_property
    def _template(self) -> ChatTemplate:
        if self._parts.chat_template is None:
            raise ChatTemplateError("this checkpoint has no chat template: send a prompt instead of messages")
        return ChatTemplate(self._parts.chat_template, self._parts.template_tokens)


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    if backend.decoder is None:
        return False
    decoder = json.loads(backend.decoder.__getstate__())
    kinds = {step["type"] for step in decoder.get("decoders", [decoder])}
    if "ByteLevel" in kinds and kinds - {"ByteLevel", "Fuse"}:
        raise UnsupportedModelError(
            f"the tokenizer decodes bytes together with {', '.join(sorted(kinds - {'ByteLevel'}))}: such text can't be "
            "streamed exactly; use another checkpoint"
        )
    return "ByteLevel" in kinds
