"""The order among sequences: who is admitted first, and who gives way last. Rules that are composed, each small.

    scheduling_policy="priority,fair"   ─►   key(seq) = (rank, what its tenant has used, tie-break)

Smallest first. One key serves both ends, so nobody is let in for a reason for which it would be thrown out again.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Final

from scheduler.policy_fair import FairShare
from scheduler.policy_names import PolicyName
from scheduler.sequence import Sequence

Key = tuple[float, ...]

# Each rule is a number that a sequence has: the one with the smaller is admitted first and gives way last.
# `deadline` goes by the deadline instead of the slack: both differ by the time of day, which is the same for all.
RULES: Final = {PolicyName.PRIORITY: "rank", PolicyName.DEADLINE: "due_s", PolicyName.FAIR: "account.used"}
# The earlier arrival, then the earlier call.
AGE: Final = ("arrival_s", "serial")
# Those that were preempted ahead of their equals, then by age.
TURN: Final = ("is_new", *AGE)

age_key: Final[Callable[[Sequence], Key]] = attrgetter(*AGE)


class Policy:
    """Rules in the order of their weight; first come, first served where they leave it open.

    Keys are read by `attrgetter`: this is sorted by, hundreds of sequences in a step.

    fair: the tenants' accounts where fair share is among the rules, else None. It is the only rule by which a key
    changes while a sequence waits or runs.
    drops_hopeless: whether a sequence that can't bring a token before its deadline is to be dropped before that.
    """

    def __init__(self, names: tuple[PolicyName, ...], num_blocks: int) -> None:
        self.names = names
        self.fair = FairShare(num_blocks) if PolicyName.FAIR in names else None
        self.drops_hopeless = PolicyName.DEADLINE in names
        rules = [RULES[name] for name in names if name in RULES]
        constant = [rule for rule in rules if rule != RULES[PolicyName.FAIR]]
        # Within one tenant, fair share leaves the order to the other rules: this key never changes.
        self.key_in_tenant: Callable[[Sequence], Key] = attrgetter(*constant, *TURN)
        self.waiting_key: Callable[[Sequence], Key] = attrgetter(*rules, *TURN)
        self.protection_key: Callable[[Sequence], Key] = attrgetter(*rules, *AGE)
