"""What a stream entry says: first the envelope, which needs no decoding, then the request.

    raw fields ──parse_envelope──► JobEnvelope ──(the reply is opened)──parse_request──► GenerateRequest
               never raises                                            raises JobError and nothing else

The envelope comes first because a job whose decoding kills a worker must have been opened, and so be counted,
before it is decoded; and because its error, if it has one, needs a reply to be written to.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from scheduler.errors import InvalidSamplingParamsError
from scheduler.sampling_params import SamplingParams
from worker.errors import ErrorCode, JobError
from worker.protocol_codec import MalformedError, decode_json, decode_msgpack
from worker.protocol_envelope import (
    DEFAULT_LIMITS,
    ENVELOPE_FIELDS,
    JobEnvelope,
    ProtocolLimits,
    RawFields,
    digest_of,
    parse_envelope,
)
from worker.protocol_fields import (
    BODY_FIELDS,
    MAX_INT,
    NOT_YET_FIELDS,
    as_bool,
    as_bool_or_never,
    as_float,
    as_int,
    as_label,
    as_messages,
    as_text,
    as_text_list,
    as_token_ids,
    bad_request,
    decode_flat,
    decode_text,
    kind_name,
    refuse_not_yet,
    shown,
)

__all__ = [
    "DEFAULT_LIMITS",
    "GenerateRequest",
    "JobEnvelope",
    "ProtocolLimits",
    "RawFields",
    "digest_of",
    "parse_envelope",
    "parse_request",
]

MAX_CHUNK_MS = 60_000
_PROMPT_FIELDS = ("prompt", "messages", "tokens")
_Prompt = TypeVar("_Prompt", str, tuple[int, ...])


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A job that may run. Exactly one of `prompt`, `messages` and `tokens` is set.

    `prompt` is completed as it stands, `messages` go through the chat template. `chunk_ms` gathers tokens for that
    long before an event is written; 0 writes as soon as the last event is answered. `meta` is echoed at the end.
    `deterministic`: refuse the job where its tokens could depend on what else runs.
    User text stays out of repr, so that no log or traceback shows it.
    """

    id: str
    prompt: str | None = field(default=None, repr=False)
    messages: tuple[Mapping[str, str], ...] | None = field(default=None, repr=False)
    tokens: tuple[int, ...] | None = field(default=None, repr=False)
    sampling: SamplingParams = field(default_factory=SamplingParams, repr=False)
    stream: bool = True
    chunk_ms: int = 0
    tenant: str = ""
    priority: int = 0
    deadline_ms: int | None = None
    result_ttl_ms: int = DEFAULT_LIMITS.default_result_ttl_ms
    meta: str | None = field(default=None, repr=False)
    cache_salt: str = field(default="", repr=False)
    deterministic: bool = False
    model: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None


def parse_request(
    envelope: JobEnvelope,
    fields: RawFields,
    *,
    prompt_ref_value: bytes | None = None,
    model_names: Collection[str] = (),
    limits: ProtocolLimits = DEFAULT_LIMITS,
) -> GenerateRequest:
    """The request in `fields`. Raises JobError, and nothing else, whatever the bytes are.

    `prompt_ref_value` is the string that `envelope.prompt_ref` names, fetched by the caller; `model_names` are the
    names that this queue answers to (none: any).
    """
    if envelope.error is not None:
        raise envelope.error
    body = (
        _payload_body(fields, limits) if b"payload" in fields or b"encoding" in fields else _flat_body(fields, limits)
    )
    for name in NOT_YET_FIELDS:
        if name in body:
            refuse_not_yet(name, body[name])
    model = as_label("model", body["model"]) if "model" in body else None
    if model is not None and model_names and model not in model_names:
        raise JobError(
            ErrorCode.MODEL_NOT_FOUND,
            f"model {shown(model)} is not served here: use {' or '.join(sorted(model_names))}",
        )
    sampling, stream = _sampling_of(body), as_bool("stream", body.get("stream", True))
    if sampling.is_choosing and stream:
        raise bad_request("best_of chooses at the end, so nothing can be streamed: set stream to 0")
    if sampling.is_beam_search and stream:
        raise bad_request("beam search rewrites its past until the end, so nothing can be streamed: set stream to 0")
    return GenerateRequest(
        id=envelope.id,
        **_prompt_of(body, envelope, prompt_ref_value),
        sampling=sampling,
        stream=stream,
        chunk_ms=as_int("chunk_ms", body.get("chunk_ms", 0), 0, MAX_CHUNK_MS),
        tenant=envelope.tenant,
        priority=envelope.priority,
        deadline_ms=envelope.deadline_ms,
        result_ttl_ms=envelope.result_ttl_ms,
        meta=_meta_of(body),
        cache_salt=as_label("cache_salt", body.get("cache_salt", "")),
        deterministic=as_bool("deterministic", body.get("deterministic", False)),
        model=model,
        traceparent=envelope.traceparent,
        tracestate=envelope.tracestate,
    )


def _flat_body(fields: RawFields, limits: ProtocolLimits) -> dict[str, Any]:
    body: dict[str, Any] = {}
    for raw_name, raw in fields.items():
        _refuse_must(raw_name)
        name = raw_name.decode("ascii", "replace")
        kind = BODY_FIELDS.get(name) or (NOT_YET_FIELDS[name][0] if name in NOT_YET_FIELDS else None)
        if kind is not None:
            body[name] = decode_flat(name, kind, raw, limits.max_depth)
    return body


def _payload_body(fields: RawFields, limits: ProtocolLimits) -> dict[str, Any]:
    for name in fields:
        _refuse_must(name)
        if name not in ENVELOPE_FIELDS and name not in (b"payload", b"encoding"):
            shown_name = shown(name.decode("ascii", "replace"))
            raise bad_request(f"{shown_name} stands beside payload: send it flat without payload, or inside it")
    encoding = fields.get(b"encoding")
    if b"payload" not in fields or encoding not in (b"msgpack", b"json"):
        raise bad_request("payload and encoding go together: set encoding to msgpack or json, and payload to a map")
    decode = decode_msgpack if encoding == b"msgpack" else decode_json
    try:
        body = decode(fields[b"payload"], limits.max_depth)
    except MalformedError as error:
        raise bad_request(f"payload can't be read as {encoding.decode()}: {error}") from error
    if type(body) is not dict:
        raise bad_request(f"payload is {kind_name(body)}: use a map of field names to values")
    for text in body:
        _refuse_must(text.encode())
        if text.encode() in ENVELOPE_FIELDS or text in ("payload", "encoding"):
            raise bad_request(f"{text} is inside payload: send it as a flat field beside payload")
    return {name: value for name, value in body.items() if value is not None}


def _refuse_must(name: bytes) -> None:
    if name.startswith(b"must_"):
        shown_name = shown(name.decode("ascii", "replace"))
        raise bad_request(
            f"{shown_name} is not known here and says that it must be: leave it out, or use another worker"
        )


def _prompt_of(body: Mapping[str, Any], envelope: JobEnvelope, prompt_ref_value: bytes | None) -> dict[str, Any]:
    given = [name for name in _PROMPT_FIELDS if name in body]
    if len(given) + (envelope.prompt_ref is not None) != 1:
        found = ", ".join([*given, *(["prompt_ref"] if envelope.prompt_ref is not None else [])]) or "none"
        raise bad_request(f"give exactly one of prompt, messages, tokens and prompt_ref: this job has {found}")
    if envelope.prompt_ref is not None:
        if prompt_ref_value is None:
            raise bad_request(f"prompt_ref {envelope.prompt_ref} names no prompt: SET it (with EX) before the XADD")
        return {"prompt": _not_empty("prompt_ref", decode_text("the prompt of prompt_ref", prompt_ref_value))}
    name = given[0]
    if name == "messages":
        return {"messages": as_messages(body[name])}
    if name == "tokens":
        return {"tokens": _not_empty(name, as_token_ids(name, body[name]))}
    return {"prompt": _not_empty(name, as_text(name, body[name]))}


def _not_empty(name: str, value: _Prompt) -> _Prompt:
    if not value:
        raise bad_request(f"{name} is empty: send at least one character or token")
    return value


def _sampling_of(body: Mapping[str, Any]) -> SamplingParams:
    params: dict[str, Any] = {}
    for name in (
        *("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
        "length_penalty",
    ):
        if name in body:
            params[name] = as_float(name, body[name])
    for name in ("top_k", "max_tokens", "seed", "n", "best_of", "beam_width"):
        if name in body:
            params[name] = as_int(name, body[name], -MAX_INT - 1, MAX_INT)
    params["beam_width"] = params.get("beam_width") or 1
    if "early_stopping" in body:
        params["early_stopping"] = as_bool_or_never("early_stopping", body["early_stopping"])
    for name in ("include_stop", "ignore_eos"):
        if name in body:
            params[name] = as_bool(name, body[name])
    if "stop" in body:
        params["stop"] = as_text_list("stop", body["stop"])
    if "stop_token_ids" in body:
        params["stop_token_ids"] = as_token_ids("stop_token_ids", body["stop_token_ids"])
    try:
        return SamplingParams(**params)
    except InvalidSamplingParamsError as error:
        raise bad_request(str(error)) from error


def _meta_of(body: Mapping[str, Any]) -> str | None:
    """Text as it is; in a payload any value, as compact JSON."""
    meta = body.get("meta")
    if meta is None or type(meta) is str:
        return meta
    return json.dumps(meta, ensure_ascii=False, separators=(",", ":"))
