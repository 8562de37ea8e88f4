"""Beside many that run a burst of newcomers is spread over a few steps, and a steady flow is not held back."""

import pytest

from scheduler.admission_pace import FEWEST, MANY_RUNNING, AdmissionPace
from tests.unit.scheduler.fake_runner import Driver
from tests.unit.scheduler.makers import make_scheduler, make_seq


def with_running(num_running: int) -> Driver:
    """A driver with room for everybody, in which so many decode."""
    driver = Driver(make_scheduler(2_000, 4, max_num_seqs=500, max_num_batched_tokens=2_000))
    driver.add(*[make_seq(f"running {number}", 3, 100) for number in range(num_running)])
    driver.step()
    while len(driver.scheduler.running) < num_running:
        driver.step()
    for _ in range(10):
        driver.step()
    return driver


def num_admitted_by_step(driver: Driver, num_newcomers: int) -> list[int]:
    num_ids = driver.scheduler.num_unfinished
    driver.add(*[make_seq(f"new {num_ids + number}", 3, 50) for number in range(num_newcomers)])
    numbers = []
    while driver.scheduler.waiting:
        before = len(driver.scheduler.running)
        driver.step()
        numbers.append(len(driver.scheduler.running) - before)
    return numbers


@pytest.mark.parametrize("num_newcomers", [FEWEST, 20])
def test_a_burst_is_spread_over_some_steps_where_many_run(num_newcomers: int) -> None:
    driver = with_running(MANY_RUNNING)
    numbers = num_admitted_by_step(driver, num_newcomers)
    assert numbers == ([FEWEST] if num_newcomers == FEWEST else [3, 4, 6, 7])


def test_a_burst_is_let_in_at_once_where_fewer_run() -> None:
    assert num_admitted_by_step(with_running(MANY_RUNNING - 1), 20) == [20]


def test_a_steady_flow_of_short_replies_is_let_in_as_fast_as_they_end() -> None:
    """25 places a step come free; those that wait for one are never more than a few steps' worth."""
    pace = AdmissionPace()
    num_free = num_admitted = worst = 0
    for step in range(400):
        num_free += 25
        most = pace.most(MANY_RUNNING)
        assert most is not None
        taken = min(most, num_free)
        pace.observe(taken)
        num_free -= taken
        num_admitted += taken
        if step > 20:
            worst = max(worst, num_free)
    assert num_admitted > 0.99 * 25 * 400
    assert worst <= 25


def test_after_a_burst_the_first_step_is_as_careful_as_ever() -> None:
    driver = with_running(MANY_RUNNING)
    num_admitted_by_step(driver, 20)
    for _ in range(4):
        driver.step()
    assert num_admitted_by_step(driver, 8)[0] == FEWEST
