"""The fields of a job's body: their types, how the flat form spells them, and which of them this version does.

Flat strings are first turned into the real types that a `payload` has; then one set of checks serves both forms.
Everything that is wrong raises JobError with `bad_request`, named after the field.
"""

import contextlib
import re
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, Literal

from worker.errors import ErrorCode, JobError
from worker.protocol_codec import MalformedError, decode_json

MAX_TOKEN_ID = 2**31 - 1
MAX_INT = 2**63 - 1
MAX_LABEL_CHARS = 128
ROLES = ("system", "developer", "user", "assistant")

# However long, so that a number out of range is told as that; Python reads no more than 4300 digits.
_INT = re.compile(r"-?[0-9]{1,4000}")
_FLOAT = re.compile(r"-?([0-9]{1,32}(\.[0-9]{0,32})?|\.[0-9]{1,32})([eE][+-]?[0-9]{1,3})?")
_TRUE = frozenset({"1", "true"})
_FALSE = frozenset({"0", "false"})


class Kind(Enum):
    """How a field is spelled in the flat form."""

    INT = auto()
    FLOAT = auto()
    BOOL = auto()
    TEXT = auto()
    JSON = auto()
    TEXT_OR_JSON = auto()


# What a request may say about its prompt, its sampling and its reply.
BODY_FIELDS: Mapping[str, Kind] = {
    "prompt": Kind.TEXT,
    "messages": Kind.JSON,
    "tokens": Kind.JSON,
    "max_tokens": Kind.INT,
    "temperature": Kind.FLOAT,
    "top_p": Kind.FLOAT,
    "top_k": Kind.INT,
    "min_p": Kind.FLOAT,
    "presence_penalty": Kind.FLOAT,
    "frequency_penalty": Kind.FLOAT,
    "repetition_penalty": Kind.FLOAT,
    "seed": Kind.INT,
    "stop": Kind.TEXT_OR_JSON,
    "stop_token_ids": Kind.JSON,
    "include_stop": Kind.BOOL,
    "ignore_eos": Kind.BOOL,
    "n": Kind.INT,
    "best_of": Kind.INT,
    "beam_width": Kind.INT,
    "length_penalty": Kind.FLOAT,
    "early_stopping": Kind.TEXT,
    "model": Kind.TEXT,
    "stream": Kind.BOOL,
    "chunk_ms": Kind.INT,
    "cache_salt": Kind.TEXT,
    "deterministic": Kind.BOOL,
    "meta": Kind.TEXT,
}

# Fields of the protocol that this version doesn't do yet, with the values that ask for nothing.
NOT_YET_FIELDS: Mapping[str, tuple[Kind, tuple[Any, ...]]] = {
    "min_tokens": (Kind.INT, (0,)),
    "logit_bias": (Kind.JSON, ({}, [])),
    "logprobs": (Kind.JSON, (0, False)),
    "prompt_logprobs": (Kind.JSON, (0, False)),
    "echo": (Kind.BOOL, (False,)),
    "response_format": (Kind.JSON, ({"type": "text"},)),
    "tools": (Kind.JSON, ([],)),
    "tool_choice": (Kind.TEXT_OR_JSON, ("none", "auto")),
    "adapter": (Kind.TEXT, ("",)),
}


def bad_request(message: str) -> JobError:
    """A `bad_request` with a message that says what to do."""
    return JobError(ErrorCode.BAD_REQUEST, message)


def decode_text(name: str, raw: bytes) -> str:
    """The UTF-8 text of a flat field."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_request(f"{name} is not UTF-8 at byte {error.start}: send it as UTF-8") from error


def decode_flat(name: str, kind: Kind, raw: bytes, max_depth: int) -> Any:
    """A flat field as the real type that a `payload` would carry."""
    if kind is Kind.JSON:
        return _decode_json_field(name, raw, max_depth)
    text = decode_text(name, raw)
    match kind:
        case Kind.INT:
            value: Any = parse_int(name, text)
        case Kind.FLOAT:
            value = _parse_float(name, text)
        case Kind.BOOL:
            value = _parse_bool(name, text)
        case Kind.TEXT_OR_JSON:
            value = _parse_text_or_list(text, max_depth)
        case _:
            value = text
    return value


def parse_int(name: str, text: str) -> int:
    """A whole number of a flat field."""
    if not _INT.fullmatch(text):
        raise bad_request(f"{name} is {shown(text)}: use a whole number")
    return int(text)


def _parse_float(name: str, text: str) -> float:
    if not _FLOAT.fullmatch(text):
        raise bad_request(f"{name} is {shown(text)}: use a number such as 0.7")
    return float(text)


def _parse_bool(name: str, text: str) -> bool:
    if text not in _TRUE | _FALSE:
        raise bad_request(f"{name} is {shown(text)}: use 1 or 0")
    return text in _TRUE


def _parse_text_or_list(text: str, max_depth: int) -> Any:
    if text.startswith("["):
        with contextlib.suppress(MalformedError):  # a stop string may well begin with a bracket
            return decode_json(text.encode(), max_depth)
    return text


def refuse_not_yet(name: str, value: Any) -> None:
    """Raises unless `value` asks for nothing that this version lacks."""
    _, neutral = NOT_YET_FIELDS[name]
    # bool is an int in Python: 1 must not pass for True, nor False for 0, unless both are named.
    if not any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral):
        raise bad_request(f"{name} is not supported yet: leave it out")


def as_int(name: str, value: Any, low: int, high: int) -> int:
    """A whole number within [low, high]; no bool, no float."""
    if type(value) is not int:
        raise bad_request(f"{name} is {kind_name(value)}: use a whole number")
    if not low <= value <= high:
        raise bad_request(f"{name} is {shown(value)}: use a whole number from {low} to {high}")
    return value


def as_float(name: str, value: Any) -> float:
    """A number; no bool. Ranges are checked by whoever uses it."""
    if type(value) is not int and type(value) is not float:
        raise bad_request(f"{name} is {kind_name(value)}: use a number")
    try:
        return float(value)
    except OverflowError as error:
        raise bad_request(f"{name} is out of range: use a smaller number") from error


def as_bool(name: str, value: Any) -> bool:
    """True or false; 1 and 0 pass for them."""
    if type(value) is bool:
        return value
    if type(value) is int and value in (0, 1):
        return value == 1
    raise bad_request(f"{name} is {kind_name(value)}: use true or false")


def as_bool_or_never(name: str, value: Any) -> bool | Literal["never"]:
    """True or false, in either form's spelling, or the word never."""
    if value == "never":
        return "never"
    if type(value) is not str:
        return as_bool(name, value)
    if value not in _TRUE | _FALSE:
        raise bad_request(f"{name} is {shown(value)}: use 1, 0 or never")
    return value in _TRUE


def as_text(name: str, value: Any) -> str:
    """Text of any length."""
    if type(value) is not str:
        raise bad_request(f"{name} is {kind_name(value)}: use text")
    return value


def as_label(name: str, value: Any) -> str:
    """Short printable text: a tenant's or a model's name, a cache salt."""
    text = as_text(name, value)
    if len(text) > MAX_LABEL_CHARS or not text.isprintable():
        raise bad_request(f"{name} is too long or not printable: use up to {MAX_LABEL_CHARS} printable characters")
    return text


def as_text_list(name: str, value: Any) -> tuple[str, ...]:
    """One string or a list of strings."""
    if type(value) is str:
        return (value,)
    if type(value) is not list or any(type(item) is not str for item in value):
        raise bad_request(f"{name} is {kind_name(value)}: use one string or a list of strings")
    return tuple(value)


def as_token_ids(name: str, value: Any) -> tuple[int, ...]:
    """A list of token ids, each from 0; whether the model has them is not known here."""
    if type(value) is not list:
        raise bad_request(f"{name} is {kind_name(value)}: use a list of token ids")
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= MAX_TOKEN_ID:
        return tuple(value)  # long prompts are checked in C
    for position, item in enumerate(value):
        if type(item) is not int or not 0 <= item <= MAX_TOKEN_ID:
            raise bad_request(
                f"{name} holds {shown(item)} at place {position}: use whole numbers from 0 to {MAX_TOKEN_ID}"
            )
    return tuple(value)


def as_messages(value: Any) -> tuple[Mapping[str, str], ...]:
    """A chat: a non-empty list of maps with `role` and `content`."""
    if type(value) is not list or not value:
        raise bad_request('messages must be a list: use one like [{"role": "user", "content": "Hello"}]')
    return tuple(_as_message(f"messages[{place}]", item) for place, item in enumerate(value))


def _as_message(where: str, item: Any) -> Mapping[str, str]:
    if type(item) is not dict:
        raise bad_request(f'{where} is {kind_name(item)}: use a map with "role" and "content"')
    role = item.get("role")
    if role == "tool" or item.get("tool_calls") or item.get("tool_call_id"):
        raise bad_request(f"{where} uses tools, which are not supported yet: send text messages only")
    if type(role) is not str or role not in ROLES:
        raise bad_request(f"{where} has role {shown(role)}: use one of {', '.join(ROLES)}")
    message = {"role": role, "content": _as_content(where, item.get("content"))}
    if item.get("name") is not None:
        message["name"] = as_label(f"{where}.name", item["name"])
    return message


def _as_content(where: str, content: Any) -> str:
    """Text, or a list of text parts, which are joined."""
    if type(content) is str:
        return content
    if type(content) is not list:
        raise bad_request(f"{where} has content that is {kind_name(content)}: use text")
    parts: list[str] = []
    for part in content:
        if type(part) is not dict or part.get("type") != "text" or type(part.get("text")) is not str:
            raise bad_request(f'{where} has a content part that is no text: use {{"type": "text", "text": "..."}}')
        parts.append(part["text"])
    return "".join(parts)


def _decode_json_field(name: str, raw: bytes, max_depth: int) -> Any:
    try:
        return decode_json(raw, max_depth)
    except MalformedError as error:
        raise bad_request(f"{name} can't be read: {error}") from error


def kind_name(value: Any) -> str:
    """What a wrong value is, in the words of JSON."""
    names: Mapping[type, str] = {
        type(None): "missing",
        bool: "true or false",
        int: "a whole number",
        float: "a fraction",
        str: "text",
        list: "a list",
        dict: "a map",
    }
    return names.get(type(value), "of an unknown type")


def shown(value: Any) -> str:
    """A wrong value as an error message may show it: short, one line, no long user text."""
    if type(value) is int and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:36]}..."
