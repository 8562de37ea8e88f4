"""What operators set for a queue while it runs: the hash `pagemill:{Q}:config`, typed.

A value that can't be used counts as not set, and an unknown field changes nothing; either is told in the log, once.

    max_depth 1000          lane_weights 8:4:1 or strict     paused 1     log_level debug     drain:WID 1
    tenant:NAME:weight 2    tenant:NAME:concurrency 4        tenant:NAME:rate 10
    tenant:NAME:token_rate 500                               tenant:NAME:over reject
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from dataclasses import fields as fields_of
from typing import Any, Literal

import structlog

from worker.lane_weights import LaneWeights, parse_lane_weights

log = structlog.get_logger(__name__)

# Stands for every tenant that has no value of its own.
ANY_TENANT = "*"
MAX_DEPTH = 10**12
MAX_CONCURRENCY = 100_000

_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,6})?")

Over = Literal["wait", "reject"]
LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What one tenant may have, over all workers of the queue. None: no limit.

    `weight`: its share of the places where others wait too. `rate`: jobs begun per second; `token_rate`: tokens per
    second, prompts and replies together, counted when a job ends; `concurrency`: jobs at a time. `over`: a job beyond a
    limit waits, or ends with `rate_limited`.
    """

    weight: float = 1.0
    rate: float | None = None
    token_rate: float | None = None
    concurrency: int | None = None
    over: Over = "wait"

    @property
    def is_limited(self) -> bool:
        """Whether there is anything to ask before a job of this tenant begins."""
        return not (self.rate is None and self.token_rate is None and self.concurrency is None)


NO_LIMITS = TenantLimits()


@dataclass(frozen=True, slots=True)
class Problem:
    """A field that changes nothing: its name, its value (cut), and what is accepted."""

    name: str
    value: str
    accepted: str


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """The operators' settings of one queue. None: not set, so the worker's own setting holds.

    `tenants` has what is set for a tenant by name, over what is set for `*`: ask `tenant`. Two configs are equal where
    the same holds, whatever can't be used in them.
    """

    max_depth: int | None = None
    lane_weights: LaneWeights | None = None
    is_paused: bool = False
    log_level: LogLevel | None = None
    drained_workers: frozenset[str] = frozenset()
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)
    problems: tuple[Problem, ...] = field(default=(), compare=False)

    def tenant(self, name: str) -> TenantLimits:
        """The limits of a tenant. A job without one has the empty name."""
        return self.tenants.get(name) or self.tenants.get(ANY_TENANT, NO_LIMITS)

    def changes(self, before: "QueueConfig") -> dict[str, Any]:
        """What holds now and didn't `before`, for the log: of tenants and of workers told to stop only the names."""
        values = {each.name: getattr(self, each.name) for each in fields_of(self) if each.compare}
        changed = {name: value for name, value in values.items() if value != getattr(before, name)}
        if "drained_workers" in changed:
            changed["drained_workers"] = sorted(self.drained_workers)
        if "tenants" in changed:
            names = self.tenants.keys() | before.tenants.keys()
            changed["tenants"] = sorted(name for name in names if self.tenants.get(name) != before.tenants.get(name))
        return changed


def parse_config(fields: Mapping[str, str]) -> QueueConfig:
    """The config that a hash with these `fields` stands for. Never raises: what is wrong is in `problems`."""
    values: dict[str, Any] = {}
    drained: set[str] = set()
    tenants: dict[str, dict[str, Any]] = {}
    problems: list[Problem] = []
    for name, text in sorted(fields.items()):
        kind, _, rest = name.partition(":")
        tenant, _, limit = rest.rpartition(":")
        try:
            if name in _QUEUE_FIELDS:
                values[_NAMES.get(name, name)] = _QUEUE_FIELDS[name](text)
            elif kind == "drain" and rest:
                if _flag(text):
                    drained.add(rest)
            elif kind == "tenant" and limit in _TENANT_FIELDS:
                tenants.setdefault(tenant, {})[limit] = _TENANT_FIELDS[limit](text)
            else:
                problems.append(Problem(name[:80], text[:80], f"there is no such field: use {_KNOWN}"))
        except ValueError as error:
            problems.append(Problem(name[:80], text[:80], str(error)))
    base = replace(NO_LIMITS, **tenants.pop(ANY_TENANT, {}))
    limits = {tenant: replace(base, **own) for tenant, own in tenants.items()}
    return QueueConfig(
        **values,
        drained_workers=frozenset(drained),
        tenants=limits if base == NO_LIMITS else limits | {ANY_TENANT: base},
        problems=tuple(problems),
    )


class ProblemLog:
    """Logs each problem of a config once, and again if it was gone in between."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._told: frozenset[Problem] = frozenset()

    def tell(self, config: QueueConfig) -> None:
        """Log what is new."""
        for problem in config.problems:
            if problem not in self._told:
                log.warning(
                    "queue_config_ignored",
                    key=self._key,
                    field=problem.name,
                    value=problem.value,
                    accepted=problem.accepted,
                )
        self._told = frozenset(config.problems)


def _flag(text: str) -> bool:
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("", "0", "false", "no", "off"):
        return False
    raise ValueError("use 1 or 0")


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and len(text) <= len(str(high)) and low <= int(text) <= high):
            raise ValueError(f"use a whole number from {low} to {high}")
        return int(text)

    return parse


def _positive(text: str) -> float:
    if not _NUMBER.fullmatch(text) or float(text) == 0:
        raise ValueError("use a number above 0, like 2 or 0.5")
    return float(text)


def _word(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"use one of {', '.join(words)}")
        return text

    return parse


_QUEUE_FIELDS: Mapping[str, Callable[[str], Any]] = {
    "max_depth": _whole(0, MAX_DEPTH),
    "lane_weights": parse_lane_weights,
    "paused": _flag,
    "log_level": _word("debug", "info", "warning", "error"),
}
_TENANT_FIELDS: Mapping[str, Callable[[str], Any]] = {
    "weight": _positive,
    "rate": _positive,
    "token_rate": _positive,
    "concurrency": _whole(1, MAX_CONCURRENCY),
    "over": _word("wait", "reject"),
}
_NAMES = {"paused": "is_paused"}
_KNOWN = ", ".join([*_QUEUE_FIELDS, "drain:WID", *(f"tenant:NAME:{name}" for name in _TENANT_FIELDS)])
