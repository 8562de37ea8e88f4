"""What a client is told about when to come back: by what was served, and never a guess beyond its bounds."""

import pytest

from worker.streams import service_rate
from worker.streams.service_rate import MAX_MS, MIN_MS, UNKNOWN_MS, ServiceRate


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr("worker.streams.service_rate.time.monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def serve(clock: Clock, rate: ServiceRate, num_jobs: int, each_s: float) -> None:
    for _ in range(num_jobs):
        clock.now_s += each_s
        rate.count()


def test_the_wait_is_the_depth_over_the_rate_of_all_workers(clock: Clock) -> None:
    rate = ServiceRate()
    serve(clock, rate, 40, 0.5)
    assert rate.per_s == pytest.approx(2)
    assert rate.ms_to_serve(100) == 50_000
    rate.num_workers = 4
    assert rate.ms_to_serve(100) == 12_500


def test_only_the_last_minute_counts(clock: Clock) -> None:
    rate = ServiceRate()
    serve(clock, rate, 600, 0.1)
    serve(clock, rate, 60, 1.0)
    assert rate.per_s == pytest.approx(1, rel=0.05)
    clock.now_s += 30
    assert rate.per_s == pytest.approx(0.5, rel=0.05)


def test_more_jobs_than_are_counted_change_no_rate(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_rate, "MAX_COUNTED", 100)
    rate = ServiceRate()
    serve(clock, rate, 400, 0.1)
    assert rate.per_s == pytest.approx(10, rel=0.05)


def test_the_wait_has_bounds_and_is_told_though_nothing_is_known(clock: Clock) -> None:
    rate = ServiceRate()
    assert rate.ms_to_serve(100) == UNKNOWN_MS
    serve(clock, rate, 10, 1.0)
    assert rate.ms_to_serve(0) == MIN_MS
    assert rate.ms_to_serve(10**9) == MAX_MS
    clock.now_s += 100
    assert rate.ms_to_serve(100) == UNKNOWN_MS
