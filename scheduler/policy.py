"""The order among sequences: who is admitted first, and who gives way last. Rules that are composed, each small.

    scheduling_policy="priority,fair"   ─►   key(seq) = (-priority, what its tenant has used, tie-break)

Smallest first. One key serves both ends, so nobody is let in for a reason for which it would be thrown out again.
"""

from collections.abc import Callable
from math import inf
from typing import Protocol

from scheduler.policy_fair import FairShare
from scheduler.policy_names import PolicyName
from scheduler.sequence import Sequence

Key = tuple[float, ...]


class Rule(Protocol):
    """One way to put sequences in order: the one with the smaller number is admitted first and gives way last."""

    def __call__(self, seq: Sequence) -> float:
        """Where `seq` stands."""
        ...


class Priority:
    """The more important first."""

    def __call__(self, seq: Sequence) -> float:
        """Larger priorities are smaller numbers."""
        return -seq.priority


class Deadline:
    """The earliest deadline first; those without one last.

    The deadline stands for the slack: both differ by the time of day, which is the same for all.
    """

    def __call__(self, seq: Sequence) -> float:
        """The deadline, in seconds of the scheduler's clock."""
        return inf if seq.deadline_s is None else seq.deadline_s


class Policy:
    """Rules in the order of their weight; first come, first served where they leave it open.

    fair: the tenants' accounts where fair share is among the rules, else None. It is the only rule by which a key
    changes while a sequence waits or runs.
    drops_hopeless: whether a sequence that can't bring a token before its deadline is to be dropped before that.
    """

    def __init__(self, names: tuple[PolicyName, ...], num_blocks: int) -> None:
        self.names = names
        self.fair = FairShare(num_blocks) if PolicyName.FAIR in names else None
        self.drops_hopeless = PolicyName.DEADLINE in names
        rules: dict[PolicyName, Rule] = {PolicyName.PRIORITY: Priority(), PolicyName.DEADLINE: Deadline()}
        constant = [rules[name] for name in names if name in rules]
        if self.fair is not None:
            rules[PolicyName.FAIR] = self.fair
        ordered = [rules[name] for name in names if name in rules]
        # Within one tenant, fair share leaves the order to the other rules: this key never changes.
        self.key_in_tenant = _composed(constant, _turn_key)
        self.waiting_key = _composed(ordered, _turn_key)
        self.protection_key = _composed(ordered, age_key)


def age_key(seq: Sequence) -> Key:
    """The earlier arrival, then the earlier call."""
    return (seq.arrival_s, seq.serial)


def _turn_key(seq: Sequence) -> Key:
    """Those that were preempted ahead of their equals, then by age."""
    return (seq.num_preemptions == 0, seq.arrival_s, seq.serial)


def _composed(rules: list[Rule], last: Callable[[Sequence], Key]) -> Callable[[Sequence], Key]:
    """The rules' numbers and then the tie-break. One and two rules are spelt out: this is sorted by."""
    if not rules:
        return last
    first, *rest = rules
    if not rest:
        return lambda seq: (first(seq), *last(seq))
    second, *others = rest
    if not others:
        return lambda seq: (first(seq), second(seq), *last(seq))
    return lambda seq: (*[rule(seq) for rule in rules], *last(seq))
