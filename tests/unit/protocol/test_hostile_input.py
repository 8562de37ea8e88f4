"""Whatever the bytes are, a job parses or ends with a JobError: nothing else ever leaves the parser."""

import json
import re
import string
from typing import Any

import msgpack
from hypothesis import given
from hypothesis import strategies as st

from worker.errors import ErrorCode, JobError
from worker.protocol import GenerateRequest, parse_envelope, parse_request
from worker.protocol_envelope import ENVELOPE_FIELDS
from worker.protocol_fields import BODY_FIELDS, NOT_YET_FIELDS, ROLES

NAMES = sorted(
    {*(name.encode() for name in (*BODY_FIELDS, *NOT_YET_FIELDS)), *ENVELOPE_FIELDS, b"payload", b"encoding", b"must_x"}
)
TRICKY = st.sampled_from(
    [
        *(b"", b"0", b"-0", b"1", b"NaN", b"1e9999", b"[[[[", b"{}", b"null", b"[1,true]", b"msgpack", b"json"),
        *(b'"\\ud800"', b"9" * 400, b'{"a":1,"a":2}', b"[" * 3000, b"\xc1", b"\xdc\xff\xff", b"-" * 50, b"\xff\xfe"),
        "٣".encode(),
    ]
)
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8)
TREES = st.recursive(
    SCALARS | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6) | SCALARS, inner, max_size=4),
    max_leaves=12,
)


# One of these verbs is in whatever tells its reader what to do.
ADVICE = re.compile(r"\b(use|send|give|leave|set|SET|shorten|flatten|encode)\b")


def parse(fields: dict[bytes, bytes], prompt_ref_value: bytes | None = None) -> GenerateRequest | JobError:
    envelope = parse_envelope("low", "1-1", fields, now_ms=5)
    try:
        return parse_request(envelope, fields, prompt_ref_value=prompt_ref_value, model_names={"tiny"})
    except JobError as error:
        refused = error
    assert refused.code in ErrorCode
    assert refused.message.encode()
    assert ADVICE.search(refused.message), f"it says nothing about what to do: {refused.message}"
    assert json.dumps(refused.details)
    return refused


@given(st.dictionaries(st.binary(max_size=20), st.binary(max_size=50)), st.none() | st.binary(max_size=20))
def test_random_fields(fields: dict[bytes, bytes], prompt: bytes | None) -> None:
    parse(fields, prompt)


@given(st.dictionaries(st.sampled_from(NAMES), TRICKY | st.binary(max_size=30), max_size=8))
def test_known_fields_with_random_values(fields: dict[bytes, bytes]) -> None:
    parse(fields, b"prompt")


@given(st.sampled_from([*BODY_FIELDS, *NOT_YET_FIELDS]), TREES)
def test_a_payload_with_any_tree_in_any_field(name: str, tree: Any) -> None:
    for body in ({name: tree}, {"prompt": "x", name: tree}, {"messages": [{"role": "user", "content": tree}]}):
        parse({b"payload": msgpack.packb(body), b"encoding": b"msgpack"})


@given(TREES)
def test_a_payload_that_is_any_tree(tree: Any) -> None:
    parse({b"payload": msgpack.packb(tree), b"encoding": b"msgpack"})


@given(
    st.sampled_from([b"msgpack", b"json"]),
    st.binary(max_size=200) | st.text(alphabet='[]{}",:0e-.\\u d8').map(str.encode),
)
def test_a_payload_of_random_bytes(encoding: bytes, payload: bytes) -> None:
    parse({b"payload": payload, b"encoding": encoding})


LABELS = st.text(alphabet=string.ascii_letters + string.digits + "äß -", min_size=1, max_size=10)
TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
PROMPTS = st.one_of(
    st.fixed_dictionaries({"prompt": TEXTS}),
    st.fixed_dictionaries({"tokens": st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5)}),
    st.fixed_dictionaries(
        {
            "messages": st.lists(
                st.fixed_dictionaries({"role": st.sampled_from(ROLES), "content": TEXTS}), min_size=1, max_size=3
            )
        }
    ),
)
REST = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(1, 10**9),
        "temperature": st.floats(0, 100),
        "top_p": st.floats(0.001, 1),
        "top_k": st.integers(0, 10**6),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "stop": st.lists(TEXTS, max_size=3),
        "stop_token_ids": st.lists(st.integers(0, 2**31 - 1), max_size=3),
        "include_stop": st.booleans(),
        "ignore_eos": st.booleans(),
        "stream": st.booleans(),
        "chunk_ms": st.integers(0, 60_000),
        "cache_salt": LABELS,
        "meta": TEXTS,
        "model": st.just("tiny"),
        "n": st.integers(1, 16),
        "tools": st.just([]),
    },
)


@given(PROMPTS, REST)
def test_valid_requests_parse_equal_in_all_three_forms(prompt: dict[str, Any], rest: dict[str, Any]) -> None:
    body = prompt | rest
    flat = {
        name.encode(): (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
        for name, value in body.items()
    }
    request = parse(flat)
    assert isinstance(request, GenerateRequest), request
    assert parse({b"payload": json.dumps(body).encode(), b"encoding": b"json"}) == request
    assert parse({b"payload": msgpack.packb(body), b"encoding": b"msgpack"}) == request
