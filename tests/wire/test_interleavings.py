"""Whatever the order of commands and whatever is lost: every client sees one whole reply, and nothing is left.

The adversary claims the entry away from whoever has it (who lives on as a zombie), loses connections before and after
a command, deletes the reply between owners, cuts the reply back to a prefix, as a promoted replica does, fills the
server up, calls the job off, and has it handed over.
"""

import pytest

from tests.wire.broken_rules import BROKEN_RULES, BrokenRule, coarse_clock
from tests.wire.interleavings import World
from tests.wire.resp import RespClient
from worker.streams.keys import QueueKeys

ADVERSARIES = {
    "claims": ["claim", "hand_over"],
    "claims-and-lost-connections": ["claim", "lose", "lose_settling", "refuse"],
    "claims-and-lost-replies": ["claim", "expire"],
    "claims-and-failovers": ["claim", "fail_over"],
    "everything": ["claim", "hand_over", "lose", "lose_settling", "refuse", "expire", "fail_over", "cancel"],
}
FEW_SEEDS, MANY_SEEDS = 100, 1500
NUM_SEEDS = [FEW_SEEDS, pytest.param(MANY_SEEDS, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]


@pytest.mark.two_servers
@pytest.mark.parametrize("adversary", ADVERSARIES)
@pytest.mark.parametrize("num_seeds", NUM_SEEDS)
async def test_in_every_order_every_client_sees_one_whole_reply(
    raw: RespClient, redis_url: str, keys: QueueKeys, adversary: str, num_seeds: int
) -> None:
    world = await World.make(raw, redis_url, keys)
    for seed in range(num_seeds):
        assert await world.run(seed, ADVERSARIES[adversary]) == []


@pytest.mark.two_servers
@pytest.mark.parametrize("num_seeds", NUM_SEEDS)
async def test_equal_attempts_of_a_coarse_clock_change_nothing(
    raw: RespClient, redis_url: str, keys: QueueKeys, num_seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within one second all attempts would have the same number, but each is one more than any earlier one."""
    coarse_clock(monkeypatch)
    world = await World.make(raw, redis_url, keys)
    for seed in range(num_seeds):
        assert await world.run(seed, ADVERSARIES["everything"]) == []


@pytest.mark.two_servers
@pytest.mark.parametrize("broken", BROKEN_RULES, ids=[broken.rule for broken in BROKEN_RULES])
async def test_without_one_of_the_rules_some_order_shows_it(
    raw: RespClient, redis_url: str, keys: QueueKeys, broken: BrokenRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    for patch in broken.patches:
        patch(monkeypatch)
    world = await World.make(raw, redis_url, keys)
    for seed in range(FEW_SEEDS):
        if await world.run(seed, broken.deeds):
            return
    pytest.fail(f"nobody noticed in {FEW_SEEDS} orders")
