"""The words that `scheduling_policy` is made of."""

from enum import StrEnum

from scheduler.errors import InvalidConfigError

DEFAULT_POLICY = "priority,deadline,fair"


class PolicyName(StrEnum):
    """What `scheduling_policy` is made of."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    DEADLINE = "deadline"
    FAIR = "fair"


def parse_policy(text: str) -> tuple[PolicyName, ...]:
    """The rules that a text like `priority,fair` names.

    Raises InvalidConfigError for an unknown or repeated name, and for rules after `fcfs`, which leaves nothing open.
    """
    words = [word.strip() for word in text.split(",")]
    known = [name.value for name in PolicyName]
    if bad := [word for word in words if word not in known]:
        raise InvalidConfigError(
            f"scheduling_policy names {bad[0]!r}: use one or more of {', '.join(known)} with commas between them"
        )
    names = tuple([PolicyName(word) for word in words])
    if len(set(names)) < len(names):
        raise InvalidConfigError(f"scheduling_policy is {text}: name each rule once")
    if PolicyName.FCFS in names[:-1]:
        raise InvalidConfigError(f"scheduling_policy is {text}: fcfs leaves nothing for later rules, so name it last")
    return names
