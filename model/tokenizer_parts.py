"""What a checkpoint says about its text, whichever kind of file said it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from model.config import declared_eos_ids
from model.errors import CorruptCheckpointError, UnsupportedModelError
from model.json_files import read_json, read_json_if_there

TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
"""Special tokens that chat templates may use by name."""


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """A tokenizer and what its checkpoint says beside it.

    adds_bos: put `bos_token_id` before every text, because `backend` doesn't do it by itself.
    template_tokens: the texts of special tokens, by the names that chat templates use.
    """

    backend: tokenizers.Tokenizer
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    adds_bos: bool = False
    chat_template: str | None = None
    template_tokens: Mapping[str, str] = field(default_factory=dict)


def parts_from_directory(directory: Path) -> TokenizerParts:
    """The tokenizer of a Hugging Face checkpoint: tokenizer.json and the small files beside it.

    Raises UnsupportedModelError where there is no tokenizer.json, CorruptCheckpointError where a file can't be read.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedModelError(
            f"{directory} has no tokenizer.json: write one with transformers, "
            f"AutoTokenizer.from_pretrained({str(directory)!r}).save_pretrained({str(directory)!r})"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CorruptCheckpointError(f"{path} is damaged: {_first_line(error)}; fetch it again") from error
    # A training run may have left its limits in the file; a prompt is never cut or padded in silence.
    backend.no_truncation()
    backend.no_padding()
    config = read_json_if_there(directory / "tokenizer_config.json")
    special = read_json_if_there(directory / "special_tokens_map.json") | config
    texts = {name: text for name in TEMPLATE_TOKENS if (text := _token_text(special.get(name))) is not None}
    bos = texts.get("bos_token")
    return TokenizerParts(
        backend=backend,
        bos_token_id=backend.token_to_id(bos) if bos else None,
        eos_token_ids=_eos_ids(directory, backend, texts.get("eos_token")),
        chat_template=_chat_template(directory, config),
        template_tokens=texts,
    )


def _eos_ids(directory: Path, backend: tokenizers.Tokenizer, eos: str | None) -> tuple[int, ...]:
    if declared := declared_eos_ids(directory):
        return declared
    token_id = backend.token_to_id(eos) if eos else None
    return () if token_id is None else (token_id,)


def _token_text(value: Any) -> str | None:
    """A special token is written as its text, or as an object that holds it."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The default chat template: its own file comes before the entry in tokenizer_config.json."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CorruptCheckpointError(f"{path} can't be read as UTF-8 text: fetch it again") from error
    legacy = directory / "chat_template.json"
    template = read_json(legacy).get("chat_template") if legacy.is_file() else config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CorruptCheckpointError(f"{directory}: the chat template is {json.dumps(template)[:80]}, not a text")
    return template


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
