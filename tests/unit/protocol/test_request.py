"""Requests as clients write them: three spellings of one thing, and clear words for what is wrong."""

import json
from typing import Any

import msgpack
import pytest

from scheduler.sampling_params import SamplingParams
from worker.errors import ErrorCode, JobError
from worker.protocol import GenerateRequest, ProtocolLimits, parse_envelope, parse_request


def flat(**fields: str | bytes) -> dict[bytes, bytes]:
    return {name.encode(): value if isinstance(value, bytes) else value.encode() for name, value in fields.items()}


def as_json(body: Any, **beside: str) -> dict[bytes, bytes]:
    return flat(encoding="json", payload=json.dumps(body), **beside)


def as_msgpack(body: Any, **beside: str) -> dict[bytes, bytes]:
    return flat(encoding="msgpack", payload=msgpack.packb(body), **beside)


def parse(fields: dict[bytes, bytes], **options: Any) -> GenerateRequest:
    envelope = parse_envelope("normal", "1764464400123-0", fields, now_ms=1_764_464_400_500)
    return parse_request(envelope, fields, **options)


def refusal(fields: dict[bytes, bytes], **options: Any) -> JobError:
    with pytest.raises(JobError) as caught:
        parse(fields, **options)
    return caught.value


def test_a_plain_prompt_is_a_whole_request() -> None:
    request = parse(flat(prompt="Tell me a joke"))
    assert (request.prompt, request.messages, request.tokens) == ("Tell me a joke", None, None)
    assert request.sampling == SamplingParams()
    assert request.stream


def test_three_spellings_of_one_request_are_equal() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüß Gott"}]
    written = flat(
        id="a",
        messages=json.dumps(messages),
        max_tokens="64",
        temperature="0.5",
        top_p="1",
        top_k="40",
        seed="-7",
        stop='["\\n\\n", "END"]',
        stop_token_ids="[1, 2]",
        include_stop="1",
        ignore_eos="0",
        stream="0",
        chunk_ms="50",
        cache_salt="s",
        meta="m",
        tenant="acme",
        priority="3",
        ttl_ms="60000",
    )
    body = {
        "messages": messages,
        "max_tokens": 64,
        "temperature": 0.5,
        "top_p": 1,
        "top_k": 40,
        "seed": -7,
        "stop": ["\n\n", "END"],
        "stop_token_ids": [1, 2],
        "include_stop": True,
        "ignore_eos": False,
        "stream": False,
        "chunk_ms": 50,
        "cache_salt": "s",
        "meta": "m",
    }
    beside = {"id": "a", "tenant": "acme", "priority": "3", "ttl_ms": "60000"}
    request = parse(written)
    assert request == parse(as_json(body, **beside)) == parse(as_msgpack(body, **beside))
    assert request.sampling.stop == ("\n\n", "END")
    assert (request.tenant, request.priority, request.deadline_ms) == ("acme", 3, 1_764_464_460_123)


@pytest.mark.parametrize(
    ("written", "stops"),
    [("END", ("END",)), ('["a","b"]', ("a", "b")), ("[", ("[",)), ("[INST]", ("[INST]",)), ("{}", ("{}",))],
)
def test_stop_is_one_string_or_a_json_list(written: str, stops: tuple[str, ...]) -> None:
    assert parse(flat(prompt="x", stop=written)).sampling.stop == stops


def test_content_parts_of_text_are_joined() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = parse(as_json({"messages": [{"role": "user", "content": content}]}))
    assert request.messages == ({"role": "user", "content": "ab"},)


def test_a_null_in_a_payload_is_a_field_left_out() -> None:
    assert parse(as_json({"prompt": "x", "messages": None, "seed": None, "tools": None})) == parse(flat(prompt="x"))


def test_meta_of_any_shape_comes_back_as_text() -> None:
    assert parse(as_json({"prompt": "x", "meta": {"a": [1]}})).meta == '{"a":[1]}'
    assert parse(flat(prompt="x", meta="free text")).meta == "free text"


def test_unknown_fields_are_ignored_unless_they_must_be_known() -> None:
    assert parse(flat(prompt="x", colour="blue", **{"\x00": b"\xff"})) == parse(flat(prompt="x"))
    assert parse(as_json({"prompt": "x", "colour": "blue"})) == parse(flat(prompt="x"))
    for fields in (flat(prompt="x", must_fly="1"), as_json({"prompt": "x", "must_fly": 1}), as_json({}, must_fly="1")):
        assert "must_fly" in refusal(fields).message


def test_a_prompt_ref_is_the_prompt_it_names() -> None:
    fields = flat(prompt_ref="big")
    assert parse(fields, prompt_ref_value="größer".encode()).prompt == "größer"
    assert "prompt_ref big names no prompt" in refusal(fields).message
    assert "empty" in refusal(fields, prompt_ref_value=b"").message
    assert "UTF-8" in refusal(fields, prompt_ref_value=b"\xff").message
    assert "exactly one" in refusal(flat(prompt_ref="big", prompt="x"), prompt_ref_value=b"y").message


def test_the_model_is_checked_against_the_queues_names() -> None:
    assert parse(flat(prompt="x", model="smollm2"), model_names={"smollm2"}).model == "smollm2"
    assert parse(flat(prompt="x", model="any")).model == "any"
    error = refusal(flat(prompt="x", model="gpt-9"), model_names={"smollm2"})
    assert error.code is ErrorCode.MODEL_NOT_FOUND
    assert "smollm2" in error.message


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({}, "exactly one of"),
        (flat(prompt="x", tokens="[1]"), "prompt, tokens"),
        (flat(prompt=""), "prompt is empty"),
        (flat(prompt=b"\xff"), "UTF-8"),
        (flat(tokens="[]"), "tokens is empty"),
        (flat(tokens="[1, true]"), "True at place 1"),
        (flat(tokens="[1.0]"), "1.0"),
        (flat(tokens="[-1]"), "-1"),
        (flat(tokens="[99999999999999999999999]"), "digits"),
        (flat(tokens="[2147483648]"), "2147483648"),
        (flat(tokens='"abc"'), "text"),
        (flat(tokens="[" * 100_000), "nested"),
        (flat(tokens="1" * 10_000), "digits"),
        (flat(tokens="[NaN]"), "NaN"),
        (flat(tokens="[1e999]"), "out of range"),
        (flat(messages="[]"), "messages must be a list"),
        (flat(messages="{}"), "messages must be a list"),
        (flat(messages="["), "JSON"),
        (flat(messages='["hi"]'), "messages[0]"),
        (flat(messages='[{"content": "x"}]'), "role"),
        (flat(messages='[{"role": "root", "content": "x"}]'), "role"),
        (flat(messages='[{"role": "user"}]'), "content"),
        (flat(messages='[{"role": "user", "content": [{"type": "image"}]}]'), "content part"),
        (flat(messages='[{"role": "tool", "content": "x"}]'), "not supported yet"),
        (flat(messages='[{"role": "user", "role": "system", "content": "x"}]'), "twice"),
        (flat(messages='[{"role": "user", "content": "\\ud800"}]'), "surrogate"),
        (flat(prompt="x", max_tokens="0"), "max_tokens"),
        (flat(prompt="x", max_tokens="-1"), "max_tokens"),
        (flat(prompt="x", max_tokens="1e3"), "max_tokens"),
        (flat(prompt="x", max_tokens="9" * 23), "use a whole number from -9223372036854775808 to 9223372036854775807"),
        (flat(prompt="x", max_tokens="9" * 5000), "max_tokens"),
        (flat(prompt="x", seed="-" + "9" * 26), "use a whole number from -9223372036854775808 to 9223372036854775807"),
        (flat(prompt="x", n="9" * 20), "use a whole number from"),
        (flat(prompt="x", temperature="hot"), "temperature"),
        (flat(prompt="x", temperature="nan"), "temperature"),
        (flat(prompt="x", temperature="inf"), "temperature"),
        (flat(prompt="x", temperature="1e999"), "temperature"),
        (flat(prompt="x", temperature="-1"), "temperature"),
        (flat(prompt="x", top_p="0"), "top_p"),
        (flat(prompt="x", min_p="1.5"), "min_p"),
        (flat(prompt="x", min_p="-0.1"), "min_p"),
        (flat(prompt="x", repetition_penalty="0"), "repetition_penalty"),
        (flat(prompt="x", repetition_penalty="101"), "repetition_penalty"),
        (flat(prompt="x", frequency_penalty="2.5"), "frequency_penalty"),
        (flat(prompt="x", presence_penalty="-2.5"), "presence_penalty"),
        (flat(prompt="x", stream="0", beam_width="2", presence_penalty="1"), "leave out repetition_penalty"),
        (flat(prompt="x", top_k="-1"), "top_k"),
        (flat(prompt="x", seed="9999999999999999999"), "seed"),
        (flat(prompt="x", stream="0", beam_width="17"), "from 1 (no beam search) to 16"),
        (flat(prompt="x", stream="0", beam_width="-1"), "beam_width"),
        (flat(prompt="x", stream="0", beam_width="2", n="3"), "use an n up to beam_width"),
        (flat(prompt="x", stream="0", beam_width="2", best_of="2"), "leave one of them out"),
        (flat(prompt="x", stream="0", beam_width="2", stop="x"), "use stop_token_ids"),
        (flat(prompt="x", stream="0", beam_width="2", length_penalty="11"), "length_penalty"),
        (flat(prompt="x", stream="0", beam_width="2", early_stopping="maybe"), "1, 0 or never"),
        (flat(prompt="x", beam_width="2"), "set stream to 0"),
        (flat(prompt="x", stop="[1]"), "stop"),
        (flat(prompt="x", stop=""), "stop"),
        (flat(prompt="x", stop_token_ids="[-1]"), "stop_token_ids"),
        (flat(prompt="x", stream="yes"), "stream"),
        (flat(prompt="x", chunk_ms="-1"), "chunk_ms"),
        (flat(prompt="x", cache_salt="a\nb"), "cache_salt"),
        (flat(prompt="x", meta=b"\xff"), "meta"),
        (flat(payload="{}"), "encoding"),
        (flat(encoding="json"), "encoding"),
        (flat(payload="{}", encoding="pickle"), "msgpack or json"),
        (flat(payload="[]", encoding="json"), "a map"),
        (flat(payload="{", encoding="json"), "JSON"),
        (flat(payload=b"\xff", encoding="json"), "UTF-8"),
        (as_json({"prompt": "x"}, prompt="y"), "beside payload"),
        (as_json({"prompt": "x"}, colour="y"), "beside payload"),
        (as_json({"prompt": "x", "id": "a"}), "inside payload"),
        (as_json({"prompt": 7}), "prompt is a whole number"),
        (as_json({"prompt": "x", "max_tokens": True}), "true or false"),
        (as_json({"prompt": "x", "max_tokens": 1.5}), "a fraction"),
        (as_json({"prompt": "x", "temperature": "1"}), "text"),
        (as_json({"prompt": "x", "stream": 2}), "stream"),
        (as_json({"prompt": "x", "early_stopping": 2}), "early_stopping"),
        (as_json({"prompt": "x", "seed": 2**70}), "seed"),
        (as_json({"prompt": "x", "temperature": 10**60}), "temperature"),
        (as_msgpack({"prompt": b"x"}), "bytes"),
        (as_msgpack({1: "x"}), "key"),
        (as_msgpack({"prompt": "x", "meta": msgpack.Timestamp(1)}), "Timestamp"),
        (as_msgpack({"prompt": "x", "meta": msgpack.ExtType(5, b"")}), "extension"),
        (as_msgpack({"prompt": "x", "temperature": float("nan")}), "NaN"),
        (flat(payload=b"\x82\xa1a\x01\xa1a\x02", encoding="msgpack"), "twice"),
        (flat(payload=b"\x81\xa1a", encoding="msgpack"), "cut off"),
        (flat(payload=b"\x80\x80", encoding="msgpack"), "follow"),
        (flat(payload=b"\x81\xa1a\xa1\xff", encoding="msgpack"), "UTF-8"),
        (flat(payload=b"\x91" * 10_000, encoding="msgpack"), "nested"),
        (flat(payload=b"\xdd\xff\xff\xff\xff", encoding="msgpack"), "MessagePack"),
    ],
)
def test_what_is_wrong_is_a_bad_request_that_says_what(fields: dict[bytes, bytes], word: str) -> None:
    error = refusal(fields)
    assert error.code is ErrorCode.BAD_REQUEST
    assert word in error.message
    assert len(error.message) < 300


def test_a_huge_max_tokens_is_left_to_the_context_check() -> None:
    assert parse(flat(prompt="x", max_tokens="1000000000")).sampling.max_tokens == 10**9


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (flat(prompt="x", beam_width="0"), (1, 1.0, False)),
        (flat(prompt="x", beam_width="1", length_penalty="2"), (1, 2.0, False)),
        (flat(prompt="x", beam_width="4", stream="0"), (4, 1.0, False)),
        (flat(prompt="x", beam_width="4", stream="0", early_stopping="1", length_penalty="-.5"), (4, -0.5, True)),
        (flat(prompt="x", beam_width="4", stream="0", early_stopping="never"), (4, 1.0, "never")),
        (as_json({"prompt": "x", "beam_width": 3, "stream": False, "early_stopping": "never"}), (3, 1.0, "never")),
        (as_json({"prompt": "x", "beam_width": 3, "stream": False, "early_stopping": True}), (3, 1.0, True)),
    ],
)
def test_a_beam_search_is_spelled_alike_in_both_forms(fields: dict[bytes, bytes], expected: tuple[Any, ...]) -> None:
    sampling = parse(fields).sampling
    assert (sampling.beam_width, sampling.length_penalty, sampling.early_stopping) == expected


@pytest.mark.parametrize(
    "fields",
    [
        flat(prompt="x", min_p=".05", repetition_penalty="1.5", frequency_penalty="-.5", presence_penalty="2"),
        as_json(
            {"prompt": "x", "min_p": 0.05, "repetition_penalty": 1.5, "frequency_penalty": -0.5, "presence_penalty": 2}
        ),
    ],
)
def test_penalties_and_min_p_are_spelled_alike_in_both_forms(fields: dict[bytes, bytes]) -> None:
    sampling = parse(fields).sampling
    assert sampling.min_p == 0.05
    assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) == (1.5, -0.5, 2.0)
    assert sampling.has_penalties
    assert not parse(flat(prompt="x", repetition_penalty="1", frequency_penalty="0")).sampling.has_penalties


@pytest.mark.parametrize(
    ("name", "neutral", "asked"),
    [
        ("min_tokens", 0, 5),
        ("logit_bias", {}, {"5": 1}),
        ("logprobs", False, 5),
        ("logprobs", 0, True),
        ("prompt_logprobs", 0, 1),
        ("echo", False, True),
        ("response_format", {"type": "text"}, {"type": "json_object"}),
        ("tools", [], [{}]),
        ("tool_choice", "none", {"type": "function"}),
        ("tool_choice", "auto", "required"),
        ("adapter", "", "lora-1"),
    ],
)
def test_what_is_not_done_yet_is_refused_by_name_unless_it_asks_for_nothing(
    name: str, neutral: Any, asked: Any
) -> None:
    def spelled(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    for value, is_fine in ((neutral, True), (asked, False)):
        for fields in (flat(prompt="x", **{name: spelled(value)}), as_json({"prompt": "x", name: value})):
            if is_fine:
                assert parse(fields).prompt == "x"
            else:
                assert refusal(fields).message.startswith(f"{name} is not supported yet")


def test_the_depth_limit_counts_containers() -> None:
    def nested(depth: int) -> Any:
        value: Any = "leaf"
        for _ in range(depth):
            value = [value]
        return value

    limits = ProtocolLimits(max_depth=5)
    for encode in (as_json, as_msgpack):
        assert parse(encode({"prompt": "x", "meta": nested(4)}), limits=limits)
        assert "nested" in refusal(encode({"prompt": "x", "meta": nested(5)}), limits=limits).message


def test_user_text_stays_out_of_repr() -> None:
    request = parse(flat(prompt="my secret", meta="also secret", stop="secret stop"))
    assert "secret" not in repr(request)


def test_an_envelopes_error_is_the_requests_error() -> None:
    assert refusal(flat(prompt="x", v="9")).code is ErrorCode.UNSUPPORTED_VERSION
    assert refusal(flat(prompt="x" * (1 << 21))).code is ErrorCode.PAYLOAD_TOO_LARGE
