"""The envelope of a job: what is needed before anything of it is decoded."""

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from worker.errors import ErrorCode, JobError
from worker.protocol_codec import MAX_DEPTH
from worker.protocol_fields import as_int, as_label, bad_request, decode_text, parse_int, shown

VERSION = b"1"
NAME = re.compile(rb"[A-Za-z0-9_-]{1,64}")
MAX_TIME_MS = 2**53 - 1
MAX_TTL_MS = 10 * 365 * 24 * 3600 * 1000
MAX_PRIORITY = 1_000_000
# An entry whose id lies further ahead of the server's clock was typed so.
FUTURE_MS = 1000
# Needed before anything is decoded, so they stay flat beside a `payload`.
ENVELOPE_FIELDS = frozenset(
    b"id v tenant priority idempotency_key ttl_ms deadline_ms result_ttl_ms prompt_ref traceparent tracestate".split()
)
# A resend of the same job may change these.
_NOT_IN_DIGEST = frozenset(b"traceparent tracestate meta ttl_ms deadline_ms result_ttl_ms".split())
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_ENTRY_ID = re.compile(r"([0-9]{1,20})-[0-9]{1,20}")

RawFields = Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class ProtocolLimits:
    """What a job may at most be. Bytes count names and values of all fields together."""

    max_fields_bytes: int = 1 << 20
    max_prompt_ref_bytes: int = 1 << 20
    max_depth: int = MAX_DEPTH
    default_result_ttl_ms: int = 600_000
    max_result_ttl_ms: int = 3_600_000


DEFAULT_LIMITS = ProtocolLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnvelope:
    """What is known of a job before anything of it is decoded.

    `error` is the first thing wrong with it: the job is opened all the same and ends with that error.
    `is_id_malformed`: the client's id couldn't be used, so the reply goes to another name and a dead letter is kept.
    `deadline_ms` is absolute, by the server's clock; None is no limit.
    """

    id: str
    lane: str
    entry_id: str
    digest: str
    tenant: str = ""
    priority: int = 0
    deadline_ms: int | None = None
    result_ttl_ms: int = DEFAULT_LIMITS.default_result_ttl_ms
    prompt_ref: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    is_id_malformed: bool = False
    error: JobError | None = None

    def is_expired(self, now_ms: int) -> bool:
        """Whether the job's time is up at `now_ms` of the server's clock."""
        return self.deadline_ms is not None and now_ms >= self.deadline_ms


def parse_envelope(
    lane: str,
    entry_id: str,
    fields: RawFields,
    *,
    now_ms: int,
    repeated: Collection[bytes] = (),
    limits: ProtocolLimits = DEFAULT_LIMITS,
) -> JobEnvelope:
    """The envelope of entry `entry_id` of `lane`; never raises.

    `now_ms` is the server's time of the pick-up; `repeated` names fields that the entry holds more than once.
    """
    errors: list[JobError] = []
    id_given = fields.get(b"id")
    is_id_malformed = id_given is not None and not NAME.fullmatch(id_given)
    if is_id_malformed:
        errors.append(bad_request("id must be 1 to 64 of A-Z a-z 0-9 _ -: send the job again with such an id, or none"))
    if (version := fields.get(b"v", VERSION)) != VERSION:
        given = shown(version.decode("utf-8", "replace"))
        errors.append(
            JobError(ErrorCode.UNSUPPORTED_VERSION, f"v is {given}, which is not known here: send v 1, or leave it out")
        )
    _check_size(fields, limits, errors)
    errors.extend(
        bad_request(f"{shown(name.decode('ascii', 'replace'))} is given twice: send each field once")
        for name in repeated
    )
    values = _EnvelopeValues(fields, errors)
    return JobEnvelope(
        id=_job_id(lane, entry_id, fields, is_id_malformed, errors),
        lane=lane,
        entry_id=entry_id,
        digest=digest_of(fields),
        tenant=values.label(b"tenant"),
        priority=values.int(b"priority", -MAX_PRIORITY, MAX_PRIORITY) or 0,
        deadline_ms=_deadline(entry_id, values, fields, now_ms, errors),
        result_ttl_ms=_result_ttl(values, limits),
        prompt_ref=values.name(b"prompt_ref"),
        traceparent=_trace(fields.get(b"traceparent"), is_parent=True),
        tracestate=_trace(fields.get(b"tracestate"), is_parent=False),
        is_id_malformed=is_id_malformed,
        error=errors[0] if errors else None,
    )


def waiting_limits(lane: str, entry_id: str, fields: RawFields, now_ms: int) -> tuple[str, int | None]:
    """Id and deadline of a job that waits, as `parse_envelope` finds them; nothing else of it is looked at.

    Its time has not begun where its entry's id was typed and lies in the future.
    """
    ignored: list[JobError] = []
    is_id_malformed = b"id" in fields and not NAME.fullmatch(fields[b"id"])
    job_id = _job_id(lane, entry_id, fields, is_id_malformed, ignored)
    if not (b"ttl_ms" in fields or b"deadline_ms" in fields):
        return job_id, None
    is_typed = int(entry_id.partition("-")[0]) > now_ms + FUTURE_MS and b"ttl_ms" in fields
    deadline_ms = _deadline(entry_id, _EnvelopeValues(fields, ignored), fields, now_ms, ignored)
    return job_id, None if is_typed else deadline_ms


def digest_of(fields: RawFields) -> str:
    """SHA-256 of what makes two sends the same job: all fields as they are, but for what a resend may change."""
    digest = hashlib.sha256()
    for name in sorted(fields):
        if name not in _NOT_IN_DIGEST:
            value = fields[name]
            digest.update(b"%d %d " % (len(name), len(value)))
            digest.update(name)
            digest.update(value)
    return digest.hexdigest()


def id_of_key(tenant: bytes, key: bytes) -> str:
    """The id of a job that has an `idempotency_key` and no `id`."""
    return hashlib.sha256(tenant + b"\0" + key).hexdigest()[:32]


class _EnvelopeValues:
    """Reads single flat fields; what is wrong goes to `errors`, and the field counts as left out."""

    def __init__(self, fields: RawFields, errors: list[JobError]) -> None:
        self._fields = fields
        self._errors = errors

    def int(self, name: bytes, low: int, high: int) -> int | None:
        raw = self._fields.get(name)
        if raw is None:
            return None
        try:
            label = name.decode()
            return as_int(label, parse_int(label, decode_text(label, raw)), low, high)
        except JobError as error:
            self._errors.append(error)
            return None

    def label(self, name: bytes) -> str:
        try:
            return as_label(name.decode(), decode_text(name.decode(), self._fields.get(name, b"")))
        except JobError as error:
            self._errors.append(error)
            return ""

    def name(self, name: bytes) -> str | None:
        raw = self._fields.get(name)
        if raw is None or NAME.fullmatch(raw):
            return raw.decode() if raw is not None else None
        self._errors.append(bad_request(f"{name.decode()} must be a name, not a key: use 1 to 64 of A-Z a-z 0-9 _ -"))
        return None


def _job_id(lane: str, entry_id: str, fields: RawFields, is_id_malformed: bool, errors: list[JobError]) -> str:
    if b"id" in fields and not is_id_malformed:
        return fields[b"id"].decode()
    key = fields.get(b"idempotency_key")
    if key:
        return id_of_key(fields.get(b"tenant", b""), key)
    if key is not None:
        errors.append(bad_request("idempotency_key is empty: give it a value, or leave it out"))
    return f"{lane}-{entry_id}"


def _check_size(fields: RawFields, limits: ProtocolLimits, errors: list[JobError]) -> None:
    size = sum(len(name) + len(value) for name, value in fields.items())
    if size > limits.max_fields_bytes:
        errors.append(
            JobError(
                ErrorCode.PAYLOAD_TOO_LARGE,
                f"the job has {size} bytes, {limits.max_fields_bytes} are allowed: shorten it, or use prompt_ref",
                {"bytes": size, "max_bytes": limits.max_fields_bytes},
            )
        )


def _deadline(
    entry_id: str, values: _EnvelopeValues, fields: RawFields, now_ms: int, errors: list[JobError]
) -> int | None:
    """Absolute deadline. An entry id whose time lies in the future (clients can type ids) counts as `now_ms`."""
    ttl_ms = values.int(b"ttl_ms", 1, MAX_TTL_MS)
    deadline_ms = values.int(b"deadline_ms", 0, MAX_TIME_MS)
    if b"ttl_ms" in fields and b"deadline_ms" in fields:
        errors.append(bad_request("ttl_ms and deadline_ms are both given: send one of them"))
    if ttl_ms is None:
        return deadline_ms
    match = _ENTRY_ID.fullmatch(entry_id)
    entry_ms = int(match[1]) if match else now_ms
    return min(entry_ms, now_ms) + ttl_ms


def _result_ttl(values: _EnvelopeValues, limits: ProtocolLimits) -> int:
    result_ttl_ms = values.int(b"result_ttl_ms", 1, MAX_TTL_MS)
    return min(result_ttl_ms or limits.default_result_ttl_ms, limits.max_result_ttl_ms)


def _trace(raw: bytes | None, *, is_parent: bool) -> str | None:
    """Trace context as it came; a malformed one is left out, since tracing must never fail a job."""
    if raw is None or len(raw) > 512 or not raw.isascii():
        return None
    if is_parent and not _TRACEPARENT.fullmatch(raw):
        return None
    text = raw.decode("ascii")
    return text if text.isprintable() else None
