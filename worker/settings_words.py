"""Settings in words: what each is called outside, and one line for each value that is refused."""

import os
from collections.abc import Mapping
from typing import Any

ENV_PREFIX = "PAGEMILL_"
# Settings whose value never appears in a message.
SECRETS = frozenset({"redis_url"})

# What is accepted, by pydantic's type of error, where its own words are long. Filled in with the error's limits.
_ADVICE = {
    "value_error": "{error}",
    "int_parsing": "use a whole number",
    "int_from_float": "use a whole number",
    "float_parsing": "use a number",
    "bool_parsing": "use on or off",
    "greater_than_equal": "use {ge} or more",
    "less_than_equal": "use {le} or less",
    "greater_than": "use more than {gt}",
    "string_too_short": "it must not be empty",
    "string_pattern_mismatch": "use 1 to 64 letters, digits, `_`, `.` or `-`",
    "extra_forbidden": "there is no such setting",
}


def env_name(name: str) -> str:
    """The environment variable of a setting."""
    return ENV_PREFIX + name.upper()


def flag_name(name: str) -> str:
    """The command line flag of a setting."""
    return "--" + name.replace("_", "-")


def problem_line(detail: Mapping[str, Any], flags: Mapping[str, Any]) -> str:
    """One line for one of pydantic's errors: where the value was set, the value, what is accepted.

    `flags` are the settings that came from the command line; any other came from the environment.
    """
    if not detail["loc"]:
        return str(detail["ctx"]["error"])
    name = str(detail["loc"][0])
    where = flag_name(name) if name in flags else env_name(name)
    value = str(flags.get(name, os.environ.get(env_name(name), "")))
    shown = "" if name in SECRETS else f" is {value[:80]!r}"
    return f"{where}{shown}: {_advice(detail)}"


def _advice(detail: Mapping[str, Any]) -> str:
    limits = detail.get("ctx", {})
    if detail["type"] == "literal_error":
        return "use one of " + str(limits["expected"]).replace("'", "").replace(" or ", ", ")
    advice = _ADVICE.get(detail["type"])
    return str(detail["msg"]) if advice is None else advice.format(**limits)
