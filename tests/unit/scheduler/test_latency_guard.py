"""The time between tokens kept to a target, and prompts that wait for others. What a step takes is made up."""

from collections.abc import Callable

import pytest

from scheduler import SchedulerOutput
from scheduler.errors import InvalidConfigError
from scheduler.latency_guard import LatencyGuard
from tests.unit.scheduler.fake_runner import Driver
from tests.unit.scheduler.makers import make_scheduler, make_seq

TARGET_S = 0.1


def linear(fixed_s: float, sequence_s: float, token_s: float) -> Callable[[SchedulerOutput], float]:
    """What a step takes: a fixed time, some for each sequence and some for each token beyond its first."""

    def step_s(output: SchedulerOutput) -> float:
        return fixed_s + sequence_s * len(output.chunks) + token_s * (output.num_tokens - len(output.chunks))

    return step_s


class Timed:
    """Steps a driver, and keeps what steps with decodes took."""

    def __init__(self, driver: Driver, cost: Callable[[SchedulerOutput], float]) -> None:
        self.driver = driver
        self.cost = cost
        self.decode_steps: list[float] = []
        self.sizes: list[int] = []

    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.driver.step(between=self._take_time)

    def _take_time(self, output: SchedulerOutput) -> None:
        self.driver.step_s = self.cost(output)
        if 1 in output.chunks.num_tokens:
            self.decode_steps.append(self.driver.step_s)
            self.sizes.append(len(output.chunks))


@pytest.mark.parametrize(("fixed_s", "sequence_s"), [(0.01, 0.002), (0.06, 0.002), (0.08, 0.0005), (0.0, 0.004)])
def test_a_burst_fills_the_engine_up_to_the_target_and_no_further(fixed_s: float, sequence_s: float) -> None:
    """No decode step is beyond the target, from the first on; and of what would fit, at least 80 % run in the end."""
    driver = Driver(make_scheduler(4_000, max_num_seqs=256, max_num_batched_tokens=2_048, target_itl_ms=100))
    driver.add(*[make_seq(f"s{number}", 24, 150, ignore_eos=True) for number in range(200)])
    timed = Timed(driver, linear(fixed_s, sequence_s, 0.0001))
    timed.steps(130)
    num_fitting = (0.9 * TARGET_S - fixed_s) / sequence_s
    assert max(timed.decode_steps) <= TARGET_S
    assert max(timed.sizes) >= 0.8 * min(num_fitting, 200)


def test_without_a_target_nothing_is_held_back() -> None:
    guard = LatencyGuard(None, 256, 2_048)
    guard.observe(9.0, 256, 256, 256)
    guard.observe(9.0, 2_048, 3, 2)
    assert (guard.num_seqs, guard.num_prompt_tokens, guard.num_step_tokens(200)) == (256, 2_048, 2_048)


def test_a_single_slow_step_changes_nothing_and_two_do() -> None:
    guard = LatencyGuard(100, 256, 2_048)
    for num_running in (4, 8, 16, 32):
        guard.observe(0.01, num_running, num_running, num_running)
    assert guard.num_seqs == 64
    guard.observe(0.5, 64, 64, 64)
    assert guard.num_seqs == 64
    guard.observe(0.05, 64, 64, 64)
    num_seqs = guard.num_seqs
    guard.observe(0.18, num_seqs, num_seqs, num_seqs)
    guard.observe(0.18, num_seqs, num_seqs, num_seqs)
    assert guard.num_seqs == num_seqs // 2


def test_when_steps_become_slower_fewer_run_as_soon_as_some_have_ended() -> None:
    driver = Driver(make_scheduler(4_000, max_num_seqs=256, max_num_batched_tokens=2_048, target_itl_ms=100))
    driver.add(*[make_seq(f"s{number}", 8, 20 + number % 9, ignore_eos=True) for number in range(900)])
    timed = Timed(driver, linear(0.01, 0.002, 0.0001))
    timed.steps(60)
    timed.cost = linear(0.01, 0.004, 0.0001)
    timed.steps(40)
    del timed.decode_steps[:]
    timed.steps(60)
    ordered = sorted(timed.decode_steps)
    assert ordered[len(ordered) * 95 // 100] <= TARGET_S


@pytest.mark.parametrize("target_itl_ms", [None, 100.0])
def test_a_long_prompt_slows_those_that_decode_by_no_more_than_a_budgeted_step(target_itl_ms: float | None) -> None:
    """16 decode, and a prompt of 16,000 tokens comes: no step is beyond that of a full budget, or of the target."""
    driver = Driver(
        make_scheduler(
            3_000, max_model_len=20_000, max_num_seqs=32, max_num_batched_tokens=512, target_itl_ms=target_itl_ms
        )
    )
    cost = linear(0.02, 0.001, 0.0005)
    driver.add(*[make_seq(f"s{number:02}", 16, 600, ignore_eos=True) for number in range(16)])
    timed = Timed(driver, cost)
    timed.steps(60)
    driver.add(long := make_seq("long", 16_000, 4))
    while not long.is_finished:
        timed.steps(1)
    budgeted_s = 0.02 + 17 * 0.001 + 512 * 0.0005
    assert max(timed.decode_steps) <= (budgeted_s if target_itl_ms is None else TARGET_S)
    assert min(timed.sizes[60:]) >= 16


def test_even_a_target_that_cannot_be_kept_stops_nobody() -> None:
    driver = Driver(make_scheduler(400, max_num_seqs=8, target_itl_ms=1))
    driver.add(*[make_seq(f"s{number}", 60, 5) for number in range(9)])
    timed = Timed(driver, linear(0.05, 0.01, 0.001))
    timed.steps(150)
    assert len(driver.ends) == 9
    assert timed.sizes[-1] == 1


def test_prompts_wait_for_others_as_long_as_the_factor_says_and_no_longer() -> None:
    """A decode step takes 0.5 s and the factor is 5: who arrives at 3.0 is let in by the step that begins at 6.0."""
    driver = Driver(make_scheduler(scheduler_delay_factor=5))
    driver.step_s = 0.5
    driver.add(make_seq("runs", 16, 40))
    for _ in range(3):
        driver.step()
    driver.add(make_seq("early", 20, 4, arrival_s=3.0))
    driver.step()
    driver.add(make_seq("late", 20, 4, arrival_s=4.0))
    driver.step()
    assert driver.num_tokens_by_id() == {"runs": 1}
    driver.step()
    assert driver.num_tokens_by_id() == {"runs": 1, "early": 20, "late": 20}


def test_prompts_that_fill_the_step_do_not_wait() -> None:
    driver = Driver(make_scheduler(scheduler_delay_factor=5, max_num_batched_tokens=40))
    driver.step_s = 0.5
    driver.add(make_seq("runs", 16, 40))
    for _ in range(3):
        driver.step()
    driver.add(make_seq("early", 20, 4, arrival_s=3.0), make_seq("other", 20, 4, arrival_s=3.0))
    driver.step()
    assert driver.num_tokens_by_id() == {"runs": 1, "early": 20, "other": 19}


def test_where_nothing_runs_nothing_waits() -> None:
    driver = Driver(make_scheduler(scheduler_delay_factor=100))
    driver.step_s = 0.5
    for name in ("a", "b"):
        driver.add(make_seq(name, 4, 3, arrival_s=driver.now))
        driver.step()
        assert driver.num_tokens_by_id() == {name: 4}
        driver.run()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scheduler_delay_factor": -0.1}, "scheduler_delay_factor is -0.1"),
        ({"target_itl_ms": 0}, "target_itl_ms is 0"),
    ],
)
def test_waits_and_targets_that_cannot_work_are_refused(options: dict[str, float], words: str) -> None:
    with pytest.raises(InvalidConfigError, match=words):
        make_scheduler(**options)  # type: ignore[arg-type]
