"""Real workers under every fault at once, and broken ones, which must be found out."""

import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.checker import Promise
from tests.faults.fleet import Crew
from tests.faults.sabotage import SABOTAGES
from tests.faults.soak import Outcome, Part, run_half, run_soak

SECONDS = 60.0


@pytest.mark.timeout(900)
async def test_every_client_gets_exactly_its_reply_whatever_fails(tiny_model: Path, tmp_path: Path) -> None:
    """Another seed each time, which follows from the one that pytest-randomly prints."""
    seed = random.randrange(10**6)
    sys.stdout.write(f"seed {seed}\n")
    outcomes = await run_soak(seed, SECONDS, tiny_model, tmp_path)
    report = "\n".join(map(str, outcomes))
    sys.stdout.write(report)
    assert all(outcome.is_ok for outcome in outcomes), report


FOUND_BY = {
    "skip_settle": {"left"},
    "write_late": {"order"},
    "repeat_tokens": {"order", "reply"},
    "drop_tokens": {"order", "reply"},
}


async def test_each_kind_of_broken_worker_is_found_out(tiny_model: Path, tmp_path: Path) -> None:
    """A queue for each, and one of an honest worker."""
    assert set(FOUND_BY) == set(SABOTAGES)
    crews = {"honest": Crew(1, step_ms=(5,))} | {name: Crew(1, (5,), [name]) for name in SABOTAGES}
    parts = {name: Part(crew, num_jobs=6) for name, crew in crews.items()}
    outcome = await run_half(1, Promise.DURABLE, parts, tiny_model, tmp_path, harm_s=0, settle_s=4)
    found = {name: {seen.kind for seen in outcome.violations if name in f"{seen}"} for name in parts}
    assert found.pop("honest") == set(), str(outcome)
    for name, kinds in FOUND_BY.items():
        assert kinds <= found[name], f"{name}: {outcome}"


def test_a_fault_that_never_struck_fails_the_run(tmp_path: Path) -> None:
    outcome = Outcome(7, Promise.BOUNDED, "valkey-9.1", tmp_path, counts={"resumed": 2})
    outcome.strikes = Counter({"kill worker": 3, "delay": 0})
    assert outcome.missed == ["delay"]
    assert not outcome.is_ok
    assert "seed 7" in str(outcome)
    assert "never struck: delay" in str(outcome)


def test_a_run_in_which_no_reply_was_gone_on_with_shows_nothing(tmp_path: Path) -> None:
    outcome = Outcome(7, Promise.DURABLE, "redis-6.2", tmp_path, strikes=Counter({"delay": 1}), counts={"resumed": 0})
    assert outcome.missed == ["resumed"]
    assert not outcome.is_ok
