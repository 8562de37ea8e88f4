"""What counts as stuck: an engine that has work and finishes no step, and a service whose loop doesn't turn."""

import pytest

from worker.liveness import Liveness

WATCHDOG_S = 60.0


class Worker:
    """A worker whose time is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.last_step_s = 0.0
        self.has_work = False
        self.liveness = Liveness(
            WATCHDOG_S,
            seconds_since_step=lambda: self.now - self.last_step_s if self.has_work else 0.0,
            clock=lambda: self.now,
        )

    def live(self, seconds: int, *, steps: bool = False) -> None:
        """Its loop turns once a second; with `steps` the engine finishes one as often."""
        for _ in range(seconds):
            self.now += 1
            if steps:
                self.last_step_s = self.now
            self.liveness.look()


@pytest.fixture
def worker() -> Worker:
    """One that has just begun, long after the step by which its engine warmed up."""
    worker = Worker()
    worker.liveness.look()
    return worker


def test_an_idle_worker_is_well_for_any_time(worker: Worker) -> None:
    worker.live(1000)
    assert worker.liveness.is_well()


def test_an_engine_that_has_work_and_ends_no_step_is_stuck_after_the_watchdog(worker: Worker) -> None:
    worker.has_work = True
    worker.live(200, steps=True)
    worker.live(60)
    assert worker.liveness.is_well()
    worker.live(1)
    assert worker.liveness.why_stuck() == "no step for 61 s while jobs run"
    worker.live(1, steps=True)
    assert worker.liveness.is_well()


def test_after_a_long_rest_the_first_step_has_the_watchdogs_time_too(worker: Worker) -> None:
    """The last step ended before the rest, and says nothing."""
    worker.live(1000)
    worker.has_work = True
    worker.live(60)
    assert worker.liveness.is_well()
    worker.live(1)
    assert not worker.liveness.is_well()


@pytest.mark.parametrize("has_work", [False, True])
def test_a_loop_that_does_not_turn_is_stuck_after_the_watchdog_whatever_the_engine_does(
    worker: Worker, has_work: bool
) -> None:
    worker.has_work = has_work
    worker.live(1, steps=True)
    worker.now += 60
    worker.last_step_s = worker.now
    assert worker.liveness.is_well()
    worker.now += 1
    assert worker.liveness.why_stuck() == "the service has been held up for 61 s"
    worker.live(1, steps=True)
    assert worker.liveness.is_well()


def test_before_it_begins_nothing_is_stuck() -> None:
    """A start may take as long as it likes: reading weights, for instance."""
    worker = Worker()
    worker.now += 1000
    assert worker.liveness.is_well()
