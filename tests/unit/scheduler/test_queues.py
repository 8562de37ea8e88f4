"""Who is admitted first, who is served first, and who gives way."""

import random

import pytest

from scheduler.policy import Policy
from scheduler.policy_names import parse_policy
from scheduler.preemption import RunningQueue
from scheduler.sequence import Sequence
from scheduler.waiting_queue import WaitingQueue
from tests.unit.scheduler.makers import make_seq

POLICY = Policy(parse_policy("priority,deadline"), num_blocks=1)


def numbered(*seqs: Sequence) -> list[Sequence]:
    for serial, seq in enumerate(seqs):
        seq.serial = serial
    return list(seqs)


def waiting_ids(queue: WaitingQueue) -> list[str]:
    return [seq.seq_id for seq in queue]


def test_the_waiting_queue_is_ordered_by_priority_then_arrival_then_call() -> None:
    queue = WaitingQueue(POLICY)
    for seq in numbered(
        make_seq("late", arrival_s=3.0),
        make_seq("early", arrival_s=1.0),
        make_seq("same time", arrival_s=1.0),
        make_seq("urgent", arrival_s=9.0, priority=1),
        make_seq("idle", arrival_s=0.0, priority=-1),
    ):
        queue.add(seq)
    assert waiting_ids(queue) == ["urgent", "early", "same time", "late", "idle"]


def test_a_preempted_sequence_waits_ahead_of_newcomers_of_its_priority_only() -> None:
    queue = WaitingQueue(POLICY)
    preempted = make_seq("preempted", arrival_s=5.0)
    preempted.num_preemptions = 1
    for seq in numbered(make_seq("early", arrival_s=1.0), preempted, make_seq("urgent", priority=1)):
        queue.add(seq)
    assert waiting_ids(queue) == ["urgent", "preempted", "early"]


def test_the_waiting_queue_gives_up_any_sequence_and_no_stranger() -> None:
    queue = WaitingQueue(POLICY)
    seqs = numbered(*(make_seq(f"s{number}", arrival_s=float(number % 7)) for number in range(100)))
    for seq in seqs:
        queue.add(seq)
    rng = random.Random(5)
    rng.shuffle(seqs)
    while seqs:
        queue.remove(seqs.pop())
        assert sorted(waiting_ids(queue)) == sorted(seq.seq_id for seq in seqs)
        assert list(queue) == sorted(seqs, key=POLICY.waiting_key)
    with pytest.raises(AssertionError, match=r"stranger.* is not in the waiting queue"):
        queue.remove(make_seq("stranger"))


def test_the_victim_has_the_lowest_priority_then_the_most_slack_then_the_latest_arrival() -> None:
    queue = RunningQueue(POLICY.protection_key)
    for seq in numbered(
        make_seq("leader", priority=-9, arrival_s=0.0),
        make_seq("newest", arrival_s=4.0),
        make_seq("pressed", arrival_s=5.0, deadline_s=10.0),
        make_seq("older", arrival_s=3.0),
        make_seq("relaxed", arrival_s=1.0, deadline_s=99.0),
        make_seq("humble", arrival_s=1.0, priority=-1, deadline_s=1.0),
        make_seq("urgent", arrival_s=6.0, priority=1),
    ):
        queue.add(seq)
    assert [seq.seq_id for seq in queue] == ["leader", "urgent", "pressed", "relaxed", "older", "newest", "humble"]
    victims = [queue.pop_victim().seq_id for _ in range(6)]
    assert victims == ["humble", "newest", "older", "relaxed", "pressed", "urgent"]
    with pytest.raises(AssertionError, match=r"leader.*is alone"):
        queue.pop_victim()


def test_when_the_leader_ends_the_oldest_leads_whatever_its_priority() -> None:
    queue = RunningQueue(POLICY.protection_key)
    leader, urgent, oldest = numbered(
        make_seq("leader", arrival_s=0.0),
        make_seq("urgent", arrival_s=2.0, priority=5),
        make_seq("oldest", arrival_s=1.0, priority=-5),
    )
    for seq in (leader, urgent, oldest):
        queue.add(seq)
    queue.remove(leader)
    assert queue.leader is oldest
    assert queue.pop_victim() is urgent
    queue.remove(oldest)
    assert queue.leader is None


def test_the_leader_stays_when_an_older_one_comes_back() -> None:
    queue = RunningQueue(POLICY.protection_key)
    young, old = numbered(make_seq("young", arrival_s=9.0), make_seq("old", arrival_s=1.0))
    queue.add(young)
    queue.add(old)
    assert queue.leader is young


def test_the_running_queue_stays_sorted_behind_its_leader() -> None:
    rng = random.Random(11)
    queue = RunningQueue(POLICY.protection_key)
    inside: list[Sequence] = []
    for serial in range(300):
        seq = make_seq(f"s{serial}", priority=rng.randrange(3), arrival_s=float(rng.randrange(9)))
        seq.serial = serial
        queue.add(seq)
        inside.append(seq)
        if rng.random() < 0.4:
            queue.remove(inside.pop(rng.randrange(len(inside))))
        behind_leader = list(queue)[1:]
        assert behind_leader == sorted(behind_leader, key=POLICY.protection_key)
        assert set(queue) == set(inside)
