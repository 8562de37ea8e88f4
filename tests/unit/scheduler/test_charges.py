"""What a tenant pays for a prompt that has been computed already, or is looked up more than once."""

from scheduler import Scheduler, Sequence
from scheduler.family import Family
from scheduler.sampling_params import SamplingParams
from tests.unit.scheduler.fake_runner import Driver
from tests.unit.scheduler.makers import make_scheduler

PROMPT = list(range(1, 31))


def used_after_admission(driver: Driver) -> float:
    scheduler: Scheduler = driver.scheduler
    assert scheduler.policy.fair is not None
    scheduler.schedule(driver.now)
    return scheduler.policy.fair.used[""]


def test_the_choices_of_a_request_pay_for_their_prompt_once() -> None:
    driver = Driver(make_scheduler(scheduling_policy="fair", enable_prefix_caching=False), lambda seq_id: "")
    family, sampling = Family(), SamplingParams(max_tokens=9)
    driver.add(*[Sequence(f"c{index}", PROMPT, sampling, family=family) for index in range(4)])
    driver.step()
    assert driver.scheduler.policy.fair is not None
    before = driver.scheduler.policy.fair.used[""]
    # Three forks compute a token each.
    assert used_after_admission(driver) - before == 3


def test_a_resumed_sequence_that_is_cached_beyond_its_prompt_pays_nothing_and_gets_nothing_back() -> None:
    driver = Driver(make_scheduler(scheduling_policy="fair"), lambda seq_id: "")
    driver.add(Sequence("first", PROMPT, SamplingParams(max_tokens=1)))
    driver.run()
    driver.add(Sequence("stays", [40], SamplingParams(max_tokens=9)))
    driver.step()
    assert driver.scheduler.policy.fair is not None
    before = driver.scheduler.policy.fair.used[""]
    driver.add(Sequence("again", PROMPT[:2], SamplingParams(max_tokens=40), generated_token_ids=PROMPT[2:]))
    assert used_after_admission(driver) == before
