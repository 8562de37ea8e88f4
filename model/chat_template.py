"""Renders chat templates: Jinja as `transformers` sets it up, in a sandbox, since a template comes with the weights."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from model.errors import ChatTemplateError


class ChatTemplate:
    """A compiled chat template. Raises ChatTemplateError where it isn't valid Jinja."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """`tokens` are texts of special tokens under the names that templates use, such as bos_token."""
        self._tokens = dict(tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(
                f"the checkpoint's chat template isn't valid Jinja ({error}): correct it, or send a prompt instead"
            ) from error

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt of a conversation, up to where the assistant begins to speak.

        Each message has a `role` and a `content`: a text, or a list of parts of type text. Raises ChatTemplateError.
        """
        checked = _check_messages(messages)
        try:
            return self._template.render(**self._tokens, messages=checked, add_generation_prompt=True)
        except Exception as error:  # a template is a program: it can fail in any way
            what = str(error).splitlines() or [type(error).__name__]
            raise ChatTemplateError(f"the chat template refuses these messages: {what[0]}") from error


def _check_messages(messages: Any) -> list[dict[str, Any]]:
    """A copy of the messages in plain JSON types, so that a template can reach nothing else."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise ChatTemplateError('messages is not a list of messages: send [{"role": "user", "content": "..."}]')
    return [_check_message(index, message) for index, message in enumerate(messages)]


def _check_message(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f"messages[{index}] is not an object: it needs a role and a content")
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise ChatTemplateError(f"messages[{index}] has no role: use system, user or assistant")
    if "content" not in message:
        raise ChatTemplateError(f"messages[{index}] has no content: give a text")
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(message)))
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatTemplateError(f"messages[{index}] can't be written as JSON: {error}") from error
    plain["content"] = _text_of(index, plain["content"])
    return plain


def _text_of(index: int, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ChatTemplateError(f"messages[{index}].content is not a text: give a string or a list of text parts")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ChatTemplateError(f"messages[{index}].content has a part that isn't text: this model reads text only")
        texts.append(part["text"])
    return "".join(texts)


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant said, for training; here its body is plain output."""

    tags = {"generation"}  # noqa: RUF012  (Jinja reads it from the class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter writes &, < and > as escapes that no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    """Templates write the date of the user's clock into their system message."""
    return datetime.now().astimezone().strftime(pattern)
