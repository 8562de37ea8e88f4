"""The order that each rule gives, alone and composed; and that nobody waits for ever under any of them."""

import random
from itertools import islice

import pytest

from scheduler.errors import InvalidConfigError
from scheduler.policy import Policy
from scheduler.policy_fair import FairShare
from scheduler.policy_names import DEFAULT_POLICY, parse_policy
from scheduler.preemption import RunningQueue
from scheduler.sequence import Sequence
from scheduler.waiting_queue import ADMISSIONS_PER_TURN, WaitingQueue
from tests.unit.scheduler.fake_runner import Driver
from tests.unit.scheduler.makers import make_scheduler, make_seq

POLICIES = ["fcfs", "priority", "deadline", "fair", "priority,deadline", "fair,priority", DEFAULT_POLICY]


def a_policy(text: str) -> Policy:
    return Policy(parse_policy(text), num_blocks=100)


def arrived(policy: Policy, *seqs: Sequence) -> list[Sequence]:
    for serial, seq in enumerate(seqs):
        seq.serial = serial
        if policy.fair is not None:
            policy.fair.arrive(seq)
    return list(seqs)


@pytest.mark.parametrize(
    ("text", "order"),
    [
        ("fcfs", "first pressed urgent busy"),
        ("priority", "urgent first pressed busy"),
        ("deadline", "pressed first urgent busy"),
        ("fair", "first pressed busy urgent"),
        ("priority,deadline", "urgent pressed first busy"),
        ("deadline,priority", "pressed urgent first busy"),
        ("deadline,fair", "pressed first busy urgent"),
        ("fair,priority,deadline", "pressed first busy urgent"),
        (" priority , fcfs ", "urgent first pressed busy"),
    ],
)
def test_each_rule_orders_those_that_wait_and_the_last_is_the_first_to_give_way(text: str, order: str) -> None:
    """`urgent` is of a tenant that has used more than the others."""
    policy = a_policy(text)
    seqs = arrived(
        policy,
        make_seq("first", arrival_s=1.0),
        make_seq("pressed", arrival_s=2.0, deadline_s=9.0),
        make_seq("urgent", arrival_s=3.0, priority=1, tenant="rich"),
        make_seq("busy", arrival_s=4.0),
    )
    if policy.fair is not None:
        policy.fair.charge_prompt(seqs[2], 100)
    waiting, running = WaitingQueue(policy), RunningQueue(policy.protection_key)
    running.add(make_leader(policy))
    for seq in seqs:
        waiting.add(seq)
        running.add(seq)
    assert [seq.seq_id for seq in waiting] == order.split()
    assert [running.pop_victim().seq_id for _ in seqs] == order.split()[::-1]


def make_leader(policy: Policy) -> Sequence:
    leader = make_seq("leader", tenant="other")
    leader.serial = 99
    if policy.fair is not None:
        policy.fair.arrive(leader)
    return leader


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names ''"),
        ("lifo", "'lifo': use one or more of fcfs, priority, deadline, fair"),
        ("priority,,fair", "names ''"),
        ("fair,fair", "name each rule once"),
        ("fcfs,fair", "fcfs leaves nothing for later rules"),
    ],
)
def test_a_policy_that_means_nothing_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(InvalidConfigError, match=words):
        make_scheduler(scheduling_policy=text)


def test_a_flood_of_one_tenant_does_not_block_the_single_job_of_another() -> None:
    """A sends 1,000 at once, then B one, on 4 slots: B starts within 2 × 4 completions."""
    driver = Driver(make_scheduler(max_num_seqs=4, scheduling_policy="fair"))
    driver.add(*[make_seq(f"a{number}", 16, 8, tenant="A") for number in range(1_000)])
    for _ in range(50):
        driver.step()
    num_before = len(driver.ends)
    driver.add(lone := make_seq("b", 16, 8, tenant="B"))
    while lone.first_scheduled_s is None:
        driver.step()
    assert len(driver.ends) - num_before <= 2 * 4


def test_tenants_with_equal_appetite_get_equal_shares_whatever_they_send() -> None:
    """Long prompts, long replies and many small ones: tokens per tenant agree to within a few sequences."""
    driver = Driver(make_scheduler(400, max_num_seqs=6, scheduling_policy="fair", enable_prefix_caching=False))
    sizes = {"prompts": (200, 10), "replies": (10, 200), "small": (20, 20)}
    for tenant, (num_prompt, max_tokens) in sizes.items():
        for number in range(6_000 // (num_prompt + max_tokens)):
            driver.add(make_seq(f"{tenant}{number}", num_prompt, max_tokens, tenant=tenant, ignore_eos=True))
    for _ in range(700):
        driver.step()
    assert driver.scheduler.policy.fair is not None
    used = driver.scheduler.policy.fair.used
    assert set(used) == set(sizes), "a tenant had too little to do"
    assert max(used.values()) - min(used.values()) <= 3 * 210


def test_blocks_that_are_held_count_as_the_tokens_that_could_have_been_computed() -> None:
    """The whole pool held for a second is as dear as a second's tokens: here 100 of them."""
    fair = FairShare(num_blocks=10)
    holder, worker = make_seq("h", tenant="holder"), make_seq("w", tenant="worker")
    for seq in (holder, worker):
        fair.arrive(seq)
    scheduler = make_scheduler(10, 4)
    scheduler.kv.allocate_slots(holder, 20)
    fair.charge_step([holder, worker], [], num_tokens=50, step_s=0.5)
    assert fair.used == {"holder": pytest.approx(5 * 0.5 * 100 / 10), "worker": 0.0}
    fair.charge_step([], [worker], num_tokens=1, step_s=0.0)
    assert fair.used["worker"] == 1.0


def test_having_been_away_is_no_credit_and_no_pardon() -> None:
    fair = FairShare(num_blocks=10)
    greedy, modest, new = (make_seq(name, tenant=name) for name in ("greedy", "modest", "new"))
    fair.arrive(greedy)
    fair.arrive(modest)
    fair.charge_prompt(greedy, 500)
    fair.charge_prompt(modest, 100)
    fair.arrive(new)
    assert fair.used["new"] == new.account.used == 100
    fair.leave(greedy)
    fair.arrive(greedy)
    assert fair.used["greedy"] == greedy.account.used == 500
    for seq in (modest, new, greedy):
        fair.leave(seq)
    fair.arrive(new)
    assert fair.used["new"] == new.account.used == 500


def test_accounts_of_tenants_that_are_gone_are_bounded() -> None:
    fair = FairShare(num_blocks=10)
    fair.arrive(make_seq("stays", tenant="stays"))
    for number in range(3_000):
        fair.arrive(seq := make_seq(f"s{number}", tenant=str(number)))
        fair.charge_prompt(seq, 5)
        fair.leave(seq)
    assert len(fair._gone) <= 1_024
    assert set(fair.used) == {"stays"}


@pytest.mark.parametrize("seed", range(3))
def test_the_waiting_queue_keeps_the_order_while_accounts_grow(seed: int) -> None:
    rng = random.Random(seed)
    policy = a_policy("priority,fair")
    assert policy.fair is not None
    queue = WaitingQueue(policy)
    inside: list[Sequence] = []
    for serial in range(600):
        seq = make_seq(f"s{serial}", priority=rng.randrange(2), tenant=str(rng.randrange(9)), arrival_s=rng.random())
        seq.serial = serial
        policy.fair.arrive(seq)
        queue.add(seq)
        inside.append(seq)
        if rng.random() < 0.45:
            queue.remove(gone := inside.pop(rng.randrange(len(inside))))
            policy.fair.leave(gone)
        for seq in rng.sample(inside, min(3, len(inside))):
            policy.fair.charge_prompt(seq, rng.randrange(50))
        # Most looks go no further than a few; it must not matter how far.
        num_looks = rng.choice([1, 3, len(inside)])
        assert list(islice(queue, num_looks)) == sorted(inside, key=policy.waiting_key)[:num_looks]
        assert len(queue) == len(inside)


def test_an_admission_moves_the_tenant_back_within_the_same_step() -> None:
    driver = Driver(make_scheduler(max_num_seqs=4, scheduling_policy="fair"))
    driver.add(*[make_seq(f"a{number}", 16, 8, tenant="A") for number in range(9)])
    driver.add(*[make_seq(f"b{number}", 16, 8, tenant="B") for number in range(9)])
    driver.step()
    assert list(driver.num_tokens_by_id()) == ["a0", "b0", "a1", "b1"]


@pytest.mark.parametrize("text", POLICIES)
def test_everybody_starts_within_a_bound_however_the_others_are_preferred(text: str) -> None:
    """Four sequences of the least worth, and in every step others come that go ahead of them by every rule."""
    num_slots = 3
    driver = Driver(make_scheduler(max_num_seqs=num_slots, scheduling_policy=text))
    humble = [make_seq(f"h{number}", 20, 3, priority=-9, tenant="humble") for number in range(4)]
    driver.add(make_seq("hog", 200, 1, tenant="humble"), *humble)
    num_added = 0
    limit = (len(humble) + 1) * (ADMISSIONS_PER_TURN + num_slots)
    while any(seq.first_scheduled_s is None for seq in humble):
        for _ in range(3):
            num_added += 1
            driver.add(
                make_seq(
                    f"n{num_added}", 4, 2, priority=9, tenant=f"t{num_added}", deadline_s=driver.now + 90,
                    arrival_s=driver.now,
                )
            )  # fmt: skip
        driver.step()
        num_started = num_added - len([seq for seq in driver.scheduler.waiting if seq.priority == 9])
        assert num_started <= limit, f"{num_started} were let in ahead of {humble}"


def test_one_of_sixteen_admissions_goes_to_who_has_waited_longest_and_no_more() -> None:
    driver = Driver(make_scheduler(max_num_seqs=1, scheduling_policy="priority"))
    driver.add(*[make_seq(f"low{number}", 4, 1) for number in range(9)])
    driver.add(*[make_seq(f"high{number}", 4, 1, priority=1, arrival_s=1.0) for number in range(90)])
    order = []
    for _ in range(50):
        driver.step()
        order += [seq_id.rstrip("0123456789") for seq_id in driver.num_tokens_by_id()]
    assert [index for index, name in enumerate(order) if name == "low"] == [15, 31, 47]
