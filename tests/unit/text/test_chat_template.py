"""Conversations to prompts."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from model.chat_template import ChatTemplate
from model.errors import ChatTemplateError
from model.gguf_tokenizer import parts_from_gguf
from model.tokenizer import Tokenizer
from tests.unit.model.gguf_files import tokenizer_metadata

USER = [{"role": "user", "content": "Hi"}]


def _render(source: str, messages: Any = USER, **tokens: str) -> str:
    return ChatTemplate(source, tokens).render(messages)


def test_the_demo_model_s_template_gives_the_text_it_was_trained_on(demo_model_path: Path) -> None:
    tokenizer = Tokenizer.from_checkpoint(demo_model_path)
    assert tokenizer.render_chat([{"role": "user", "content": "What is 2+2?"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hello\n"},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": [{"type": "text", "text": "2"}, {"type": "text", "text": "0"}]},
    ]
    assert tokenizer.render_chat(messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hello\n<|im_end|>\n"
        "<|im_start|>assistant\nHi!<|im_end|>\n<|im_start|>user\n20<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode_chat(messages)
    assert ids.count(1) == 5
    assert ids.count(2) == 4
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.render_chat(messages)


def test_templates_are_rendered_as_transformers_sets_jinja_up() -> None:
    assert _render("{% if true %}\n  {% set x = 1 %}\nA{% endif %}\nB") == "AB"
    assert _render("{% for m in messages %}{% break %}{% endfor %}x") == "x"
    assert _render("{{ messages | tojson }}", [{"role": "user", "content": "<é & 'x'>"}]) == (
        '[{"role": "user", "content": "<é & \'x\'>"}]'
    )
    assert _render("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": 2,\n "b": 1\n}'
    assert _render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "Hi!"
    assert _render("{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}", bos_token="<s>") == "<s>True"
    assert _render("{{ messages[0].name is defined }}") == "False"
    year = int(_render("{{ strftime_now('%Y') }}"))
    assert datetime.now(UTC) - timedelta(days=2) < datetime(year, 12, 31, tzinfo=UTC)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "not a list of messages"),
        ({"role": "user", "content": "x"}, "not a list of messages"),
        (None, "not a list of messages"),
        ([], "not a list of messages"),
        (["hello"], r"messages\[0\] is not an object"),
        ([{"content": "x"}], r"messages\[0\] has no role"),
        ([{"role": 7, "content": "x"}], r"messages\[0\] has no role"),
        ([*USER, {"role": "user"}], r"messages\[1\] has no content"),
        ([{"role": "user", "content": None}], r"messages\[0\]\.content is not a text"),
        ([{"role": "user", "content": 7}], r"messages\[0\]\.content is not a text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "a part that isn't text"),
        ([{"role": "user", "content": ["x"]}], "a part that isn't text"),
        ([{"role": "user", "content": "x", "extra": object()}], "can't be written as JSON"),
    ],
)
def test_messages_that_are_none_are_refused_with_the_place(messages: Any, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        _render("{{ messages }}", messages)


STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('Conversation must start with a user') }}{% endif %}ok"


def test_what_the_template_refuses_is_told_in_its_own_words() -> None:
    assert _render(STRICT) == "ok"
    with pytest.raises(ChatTemplateError, match="refuses these messages: Conversation must start with a user"):
        _render(STRICT, [{"role": "tool", "content": "x"}])
    with pytest.raises(ChatTemplateError, match="refuses these messages"):
        _render("{{ messages[0].content + 1 }}")
    with pytest.raises(ChatTemplateError, match="isn't valid Jinja"):
        _render("{% if %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_can_not_leave_its_sandbox(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        _render(source)


@pytest.mark.parametrize(
    ("template", "adds_bos"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", True),
        ("{{ messages[0].content }}", True),
        ("{{ bos_token }}{{ messages[0].content }}", False),
    ],
)
def test_a_conversation_begins_with_exactly_one_bos(template: str, adds_bos: bool) -> None:
    """Two of them, from template and tokenizer, cost other servers their answers' quality."""
    metadata = tokenizer_metadata() | {
        "tokenizer.chat_template": template,
        "tokenizer.ggml.add_bos_token": adds_bos,
    }
    tokenizer = Tokenizer(parts_from_gguf(metadata, Path("m.gguf")))
    ids = tokenizer.encode_chat(USER)
    assert ids == [1, *tokenizer.encode("Hi", add_special_tokens=False)]


def test_a_template_without_bos_adds_none_where_the_tokenizer_adds_none() -> None:
    metadata = tokenizer_metadata() | {"tokenizer.chat_template": "{{ messages[0].content }}"}
    tokenizer = Tokenizer(parts_from_gguf(metadata, Path("m.gguf")))
    assert tokenizer.encode_chat(USER) == tokenizer.encode("Hi")


def test_a_checkpoint_without_a_template_says_what_to_send_instead() -> None:
    tokenizer = Tokenizer(parts_from_gguf(tokenizer_metadata(), Path("m.gguf")))
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match=re.escape("has no chat template: send a prompt")):
        tokenizer.encode_chat(USER)
