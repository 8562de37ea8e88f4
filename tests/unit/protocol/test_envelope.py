"""What is known of a job before it is decoded."""

import hashlib

import pytest

from worker.errors import ErrorCode
from worker.protocol import JobEnvelope, ProtocolLimits, digest_of, parse_envelope

NOW_MS = 1_764_464_400_500
ENTRY_ID = "1764464400123-0"


def envelope(fields: dict[bytes, bytes], *, entry_id: str = ENTRY_ID, repeated: tuple[bytes, ...] = ()) -> JobEnvelope:
    return parse_envelope("normal", entry_id, fields, now_ms=NOW_MS, repeated=repeated)


def test_a_given_id_is_the_jobs_id() -> None:
    assert envelope({b"id": b"01JABC"}).id == "01JABC"


def test_a_job_without_an_id_is_named_after_lane_and_entry() -> None:
    assert envelope({}).id == f"normal-{ENTRY_ID}"


@pytest.mark.parametrize("bad", [b"", b"a b", b"a/b", b"x" * 65, b"\xff", "ü".encode(), b"a\n"])
def test_a_malformed_id_counts_as_none_and_is_told(bad: bytes) -> None:
    parsed = envelope({b"id": bad})
    assert parsed.id == f"normal-{ENTRY_ID}"
    assert parsed.is_id_malformed
    assert parsed.error is not None
    assert parsed.error.code is ErrorCode.BAD_REQUEST


def test_an_idempotency_key_names_the_job_per_tenant() -> None:
    expected = hashlib.sha256(b"acme\0order-7").hexdigest()[:32]
    assert envelope({b"tenant": b"acme", b"idempotency_key": b"order-7"}).id == expected
    assert envelope({b"tenant": b"other", b"idempotency_key": b"order-7"}).id != expected
    assert envelope({b"idempotency_key": b"order-7", b"id": b"mine"}).id == "mine"


def test_ttl_counts_from_the_entrys_own_time() -> None:
    parsed = envelope({b"ttl_ms": b"1000"})
    assert parsed.deadline_ms == 1_764_464_401_123
    assert not parsed.is_expired(1_764_464_401_122)
    assert parsed.is_expired(1_764_464_401_123)


@pytest.mark.parametrize("entry_id", ["99999999999999-0", "18446744073709551615-18446744073709551615"])
def test_an_entry_id_from_the_future_counts_as_the_moment_of_pick_up(entry_id: str) -> None:
    assert envelope({b"ttl_ms": b"1000"}, entry_id=entry_id).deadline_ms == NOW_MS + 1000


def test_a_deadline_is_absolute_and_no_limit_is_none() -> None:
    assert envelope({b"deadline_ms": b"5"}).deadline_ms == 5
    assert envelope({b"prompt": b"x"}).deadline_ms is None
    assert not envelope({}).is_expired(2**60)


def test_result_ttl_is_capped() -> None:
    limits = ProtocolLimits(default_result_ttl_ms=10, max_result_ttl_ms=100)
    for given, kept in ((b"50", 50), (b"5000", 100)):
        parsed = parse_envelope("low", ENTRY_ID, {b"result_ttl_ms": given}, now_ms=NOW_MS, limits=limits)
        assert parsed.result_ttl_ms == kept
    assert parse_envelope("low", ENTRY_ID, {}, now_ms=NOW_MS, limits=limits).result_ttl_ms == 10


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({b"ttl_ms": b"soon"}, "ttl_ms"),
        ({b"ttl_ms": b"0"}, "ttl_ms"),
        ({b"ttl_ms": b"-5"}, "ttl_ms"),
        ({b"ttl_ms": b"9" * 19}, "ttl_ms"),
        ({b"ttl_ms": b"1" * 5000}, "ttl_ms"),
        ({b"ttl_ms": b"1.5"}, "ttl_ms"),
        ({b"ttl_ms": "٣".encode()}, "ttl_ms"),
        ({b"deadline_ms": b"nan"}, "deadline_ms"),
        ({b"ttl_ms": b"5", b"deadline_ms": b"5"}, "one of them"),
        ({b"priority": b"high"}, "priority"),
        ({b"priority": b"99999999"}, "priority"),
        ({b"tenant": b"\xff"}, "tenant"),
        ({b"tenant": b"x" * 129}, "tenant"),
        ({b"tenant": b"a\nb"}, "tenant"),
        ({b"idempotency_key": b""}, "idempotency_key"),
        ({b"prompt_ref": b"pagemill:{m}:jobs:normal"}, "prompt_ref"),
        ({b"result_ttl_ms": b"\xff"}, "result_ttl_ms"),
    ],
)
def test_a_wrong_envelope_field_is_a_bad_request_that_names_it(fields: dict[bytes, bytes], word: str) -> None:
    error = envelope(fields).error
    assert error is not None
    assert error.code is ErrorCode.BAD_REQUEST
    assert word in error.message


def test_an_unknown_version_is_refused() -> None:
    for version in (b"2", b"", b"01", b"\xff"):
        error = envelope({b"v": version}).error
        assert error is not None
        assert error.code is ErrorCode.UNSUPPORTED_VERSION
    assert envelope({b"v": b"1"}).error is None


def test_a_job_that_is_too_large_is_told_how_large_it_is() -> None:
    error = envelope({b"prompt": b"x" * (1 << 20)}).error
    assert error is not None
    assert error.code is ErrorCode.PAYLOAD_TOO_LARGE
    assert error.details == {"bytes": (1 << 20) + 6, "max_bytes": 1 << 20}
    many = {b"unknown%d" % number: b"x" * 40_000 for number in range(30)}
    assert envelope(many).error is not None, "the sum counts, not the single field"


def test_a_field_that_is_given_twice_is_refused_by_name() -> None:
    error = envelope({b"prompt": b"x"}, repeated=(b"prompt",)).error
    assert error is not None
    assert "'prompt' is given twice" in error.message


def test_malformed_trace_context_fails_no_job() -> None:
    good = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    assert envelope({b"traceparent": good}).traceparent == good.decode()
    for bad in (b"", b"00-zz", b"\xff", good + b"x", b"x" * 600):
        parsed = envelope({b"traceparent": bad})
        assert (parsed.traceparent, parsed.error) == (None, None)
    assert envelope({b"tracestate": b"a=b"}).tracestate == "a=b"
    assert envelope({b"tracestate": b"a\x00"}).tracestate is None


def test_a_resend_may_change_trace_context_meta_and_time_limits() -> None:
    fields = {b"id": b"a", b"prompt": b"x"}
    changed = {b"traceparent": b"t", b"tracestate": b"s", b"meta": b"m", b"ttl_ms": b"1", b"result_ttl_ms": b"2"}
    assert digest_of(fields) == digest_of(fields | changed)
    assert digest_of(fields) == digest_of(dict(reversed(fields.items())))


def test_any_other_difference_is_another_job() -> None:
    jobs: list[dict[bytes, bytes]] = [
        {b"prompt": b"x"},
        {b"prompt": b"y"},
        {b"prompt": b"x", b"seed": b"1"},
        {b"promptx": b""},
        {b"prompt": b"", b"x": b""},
    ]
    assert len({digest_of(fields) for fields in jobs}) == len(jobs)
