"""The operators' hash, typed: what counts, what is ignored, and what the log says of that."""

import pytest
from structlog.testing import capture_logs

from worker.streams.queue_config import NO_LIMITS, Problem, ProblemLog, QueueConfig, TenantLimits, parse_config


def test_an_empty_hash_sets_nothing() -> None:
    assert parse_config({}) == QueueConfig()


def test_every_field_of_a_queue_is_read() -> None:
    fields = {"max_depth": "1000", "lane_weights": "5:3:1", "paused": "1", "log_level": "debug"}
    config = parse_config(fields | {"drain:host-1-ab": "1", "drain:host-2-cd": "0"})
    assert config == QueueConfig(1000, (5, 3, 1), True, "debug", frozenset({"host-1-ab"}))
    assert parse_config({"lane_weights": "strict"}).lane_weights == "strict"
    assert parse_config({"max_depth": "0"}).max_depth == 0, "no limit, whatever the worker's own setting is"


@pytest.mark.parametrize(
    ("text", "is_paused"),
    [
        *((word, True) for word in ("1", "true", "yes", "on")),
        *((word, False) for word in ("0", "false", "no", "off", "")),
    ],
)
def test_a_queue_is_paused_by_1_or_true(text: str, is_paused: bool) -> None:
    assert parse_config({"paused": text}) == QueueConfig(is_paused=is_paused)


def test_a_tenants_own_values_stand_over_those_of_all() -> None:
    config = parse_config(
        {
            "tenant:*:concurrency": "4",
            "tenant:*:weight": "0.5",
            "tenant:acme:rate": "10",
            "tenant:acme:concurrency": "8",
            "tenant:a:b:token_rate": "500",
            "tenant:a:b:over": "reject",
            "tenant::weight": "3",
        }
    )
    assert config.problems == ()
    assert config.tenant("acme") == TenantLimits(weight=0.5, rate=10, concurrency=8)
    assert config.tenant("a:b") == TenantLimits(weight=0.5, token_rate=500, concurrency=4, over="reject")
    assert config.tenant("") == TenantLimits(weight=3, concurrency=4), "a job without a tenant"
    assert config.tenant("anybody") == TenantLimits(weight=0.5, concurrency=4)


def test_without_limits_there_is_nothing_to_ask() -> None:
    assert parse_config({}).tenant("acme") == NO_LIMITS
    assert not parse_config({"tenant:acme:weight": "2"}).tenant("acme").is_limited
    assert parse_config({"tenant:acme:token_rate": "2"}).tenant("acme").is_limited


@pytest.mark.parametrize(
    ("name", "text", "accepted"),
    [
        ("max_depth", "-1", "use a whole number from 0"),
        ("max_depth", "many", "use a whole number from 0"),
        ("max_depth", "1" * 30, "use a whole number from 0"),
        ("max_depth", "²", "use a whole number from 0"),
        ("lane_weights", "8:4", "like 8:4:1"),
        ("lane_weights", "8:4:0", "like 8:4:1"),
        ("lane_weights", "fair", "use strict"),
        ("paused", "maybe", "use 1 or 0"),
        ("drain:w1", "now", "use 1 or 0"),
        ("log_level", "loud", "use one of debug, info, warning, error"),
        ("tenant:acme:weight", "0", "use a number above 0"),
        ("tenant:acme:rate", "nan", "use a number above 0"),
        ("tenant:acme:rate", "-1", "use a number above 0"),
        ("tenant:acme:token_rate", "1e400", "use a number above 0"),
        ("tenant:acme:concurrency", "0", "use a whole number from 1"),
        ("tenant:acme:over", "drop", "use one of wait, reject"),
        ("tenant:acme:speed", "1", "there is no such field: use max_depth"),
        ("tenant:acme", "1", "there is no such field"),
        ("drain:", "1", "there is no such field"),
        ("pause", "1", "there is no such field: use max_depth, lane_weights, paused"),
    ],
)
def test_what_can_not_be_used_is_ignored_and_told_with_what_is_accepted(name: str, text: str, accepted: str) -> None:
    config = parse_config({name: text, "paused": "1"} if name != "paused" else {name: text})
    assert config.is_paused is (name != "paused"), "the others count"
    (problem,) = config.problems
    assert (problem.name, problem.value) == (name, text)
    assert accepted in problem.accepted
    assert config == QueueConfig(is_paused=name != "paused", problems=(problem,))


def test_a_problem_is_logged_once_and_again_when_it_comes_back() -> None:
    bad, good = QueueConfig(problems=(Problem("paused", "yes", "use 1 or 0"),)), QueueConfig()
    problem_log = ProblemLog("pagemill:{q}:config")
    with capture_logs() as logs:
        for config in (bad, bad, good, bad):
            problem_log.tell(config)
    assert [(entry["event"], entry["field"], entry["value"], entry["accepted"]) for entry in logs] == [
        ("queue_config_ignored", "paused", "yes", "use 1 or 0")
    ] * 2


def test_what_changed_is_told_and_what_can_not_be_used_changes_nothing() -> None:
    before = parse_config({"max_depth": "10", "tenant:a:rate": "1", "tenant:b:rate": "1"})
    garbage = parse_config({"max_depth": "10", "tenant:a:rate": "1", "tenant:b:rate": "1", "nonsense": "x"})
    assert garbage == before
    assert garbage.problems
    assert garbage.changes(before) == {}
    after = parse_config({"paused": "1", "tenant:a:rate": "2", "tenant:b:rate": "1", "drain:w": "1"})
    assert after.changes(before) == {
        "max_depth": None,
        "is_paused": True,
        "drained_workers": ["w"],
        "tenants": ["a"],
    }
